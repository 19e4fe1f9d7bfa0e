"""The results of jobs on disk, and the curves of a figure made from them.

`Rows` is a file with one JSON document per line, one line for each (run, seed), appended when the
job ends. A row names the code that made it (a digest of the sources that affect a result), and rows
of different code are never mixed silently. If a crash cut the last line short, the line is dropped
and its job runs again. `gather` turns the rows of all seeds into a figure's series, with the reason
for every missing result.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.bands import Band, stack, student_band
from riffle.experiments.figures.catalogue import Curve, Figure, Line, Run, Value

SHAPING = ("common", "coordinator", "experiments", "node_client")
Identity = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one seed of one run; without a result, `reason` says why.

    episodes (c,) are the checkpoints and regret (c,) the regret there. value_share is the last
    policy's value over V*. switches and value_share are None where they have no meaning: paper
    004's learners change policy in every episode and have no V*. ceiling is V* K or None.
    """

    key: str
    seed: int
    code: str
    reason: str | None = None
    episodes: tuple[float, ...] = ()
    regret: tuple[float, ...] = ()
    switches: int | None = None
    value_share: float | None = None
    ceiling: float | None = None
    seconds: float = 0.0
    constants: dict[str, Value] | None = None

    @property
    def identity(self) -> Identity:
        """The job that made this result: run key and seed."""
        return self.key, self.seed


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Returns a digest (16 hexadecimal digits) of all sources that can affect a result.

    The code of drawings and tables (`figures` except `sweep`) affects none and is left out.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    files = [file for folder in SHAPING for file in (root / folder).rglob("*.py")]
    for file in sorted(files):
        if file.parent.name == "figures" and file.name != "sweep.py":
            continue
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


_ROW = TypeAdapter(Row)


class Rows:
    """The rows of one results folder."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows = {row.identity: row for row in _read(file)}

    def get(self, identity: Identity) -> Row | None:
        """Returns the result of a job, or None."""
        return self._rows.get(identity)

    def append(self, row: Row) -> None:
        """Stores a result; it is on disk when this returns."""
        self._rows[row.identity] = row
        with self._file.open("a") as stream:
            stream.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")

    def check_code(self, jobs: set[Identity]) -> None:
        """Checks that this code made the rows of these jobs.

        Raises:
            LocalError: ``wrong-state``: other code made some of them.
        """
        stale = [i for i in jobs if i in self._rows and self._rows[i].code != code_digest()]
        if stale:
            raise LocalError(
                "wrong-state",
                f"{self._file} has {len(stale)} results made by other code than this; choose "
                "another --out, or compute them again with --force",
            )

    def forget(self, identities: set[Identity]) -> None:
        """Removes rows, so that their jobs run again."""
        self._rows = {i: row for i, row in self._rows.items() if i not in identities}
        aside = self._file.with_suffix(".new")
        aside.write_text("".join(json.dumps(asdict(r)) + "\n" for r in self._rows.values()))
        aside.replace(self._file)


def _read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    *lines, last = file.read_bytes().split(b"\n")
    if last:  # cut short: the newline after it is missing
        file.write_bytes(b"".join(line + b"\n" for line in lines))
    return [_row(file, number, line) for number, line in enumerate(lines, 1)]


def _row(file: Path, number: int, line: bytes) -> Row:
    try:
        return _ROW.validate_json(line, strict=True)
    except ValidationError as error:
        raise LocalError(
            "malformed", f"{file}, line {number}, is no result ({first_fault(error)}); remove it"
        ) from error


Constants = dict[str, Value]
PER_SEED = frozenset({"seed"})


@dataclass(frozen=True, slots=True)
class Point:
    """A run of a curve over all seeds: x, the results, and the reasons for missing ones."""

    x: float
    run: Run
    rows: tuple[Row, ...]
    missing: str = ""

    @property
    def regret(self) -> Band:
        """The band of the regret of the whole run, as single numbers."""
        return student_band([row.regret[-1] for row in self.rows])

    @property
    def switches(self) -> Band | None:
        """The band of policy changes; None where every episode has its own policy."""
        values = [row.switches for row in self.rows]
        return None if None in values else student_band([float(v or 0) for v in values])

    @property
    def within_5_percent(self) -> float | None:
        """The share of seeds whose last policy loses at most 5 % of V*."""
        values = [row.value_share for row in self.rows if row.value_share is not None]
        return float(np.mean([v >= 0.95 for v in values])) if values else None

    @property
    def seconds(self) -> float:
        """The mean time of a seed."""
        return float(np.mean([row.seconds for row in self.rows]))


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: x (c,), the band of regret at x, its points, and the constants that they used.

    x and band are empty if nothing could be computed.
    """

    line: Line
    x: FloatArray
    band: Band
    points: tuple[Point, ...]
    constants: dict[str, str]
    missing: tuple[str, ...] = ()
    ceiling: float | None = None

    @property
    def computed(self) -> tuple[Point, ...]:
        """Returns the points that have at least one seed."""
        return tuple(point for point in self.points if point.rows)


def gather(figure: Figure, rows: Rows, seeds: int) -> tuple[Series, ...]:
    """Returns the series of a figure, in the order of its curves."""
    return tuple(_series(figure, curve, rows, seeds) for curve in figure.curves)


def _series(figure: Figure, curve: Curve, rows: Rows, seeds: int) -> Series:
    points = tuple(_point(x, run, rows, seeds) for x, run in zip(curve.x, curve.runs, strict=True))
    computed = [point for point in points if point.rows]
    x = np.array([point.x for point in computed])
    band = stack([point.regret for point in computed])
    if figure.kind == "time" and computed:
        rows_of_run = computed[0].rows
        x = np.array(rows_of_run[0].episodes)
        band = student_band([row.regret for row in rows_of_run])
    missing = [point.missing for point in points if point.missing]
    missing += [f"{x:,.10g}: {reason}" for x, reason in curve.absent]
    ceilings = [row.ceiling for point in computed for row in point.rows]
    constants = merge_constants([p.rows[0].constants or {} for p in computed])
    ceiling = ceilings[0] if ceilings else None
    return Series(curve.line, x, band, points, constants, tuple(missing), ceiling)


def _point(x: float, run: Run, rows: Rows, seeds: int) -> Point:
    known = [row for seed in range(seeds) if (row := rows.get((run.key, seed))) is not None]
    results = tuple(row for row in known if row.reason is None)
    reasons = Counter(row.reason for row in known if row.reason is not None)
    texts = [f"{x:,.10g}: {n} of {seeds} seeds: {reason}" for reason, n in reasons.items()]
    return Point(x, run, results, "; ".join(texts))


def merge_constants(constants: Sequence[Constants]) -> dict[str, str]:
    """Returns a curve's constants by name; values that differ are listed in the points' order."""
    names = dict.fromkeys(name for point in constants for name in point if name not in PER_SEED)
    texts = {name: [_text(point.get(name, "-")) for point in constants] for name in names}
    return {
        name: values[0] if len(set(values)) == 1 else " / ".join(values)
        for name, values in texts.items()
    }


def _text(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
