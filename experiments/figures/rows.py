"""Results as they come: one JSON document a line, one line for each (run, seed), appended at once.

A row says which code made it (a digest of the sources that shape a result). Rows of other code are
never mixed in silently. A last line cut short by a crash is dropped, and its seed runs again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from riffle.common.descriptor import first_fault
from riffle.common.errors import LocalError
from riffle.experiments.figures.catalogue import Value

SHAPING = ("common", "coordinator", "experiments", "node_client")
Identity = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One seed of one run; `reason` says why there is no result, and is None when there is one."""

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
        """Which job this is the result of."""
        return self.key, self.seed


@lru_cache(maxsize=1)
def code_digest() -> str:
    """16 hexadecimal digits of all sources whose change may change a result.

    Drawing and tables (`experiments/figures` but for the adapter) do not.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    files = [file for folder in SHAPING for file in (root / folder).rglob("*.py")]
    for file in sorted(files):
        if file.parent.name == "figures" and file.name != "adapter.py":
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
        """The result of a job, if it is there."""
        return self._rows.get(identity)

    def append(self, row: Row) -> None:
        """Keep a result, on disk before this returns."""
        self._rows[row.identity] = row
        with self._file.open("a") as stream:
            stream.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")

    def check_code(self, wanted: set[Identity]) -> None:
        """Refuse to go on with rows of these jobs that other code made.

        Raises:
            LocalError: ``wrong-state``.
        """
        stale = [i for i in wanted if i in self._rows and self._rows[i].code != code_digest()]
        if stale:
            raise LocalError(
                "wrong-state",
                f"{self._file} has {len(stale)} results made by other code than this; choose "
                "another --out, or compute them again with --force",
            )

    def forget(self, identities: set[Identity]) -> None:
        """Drop rows, to compute them again."""
        self._rows = {i: row for i, row in self._rows.items() if i not in identities}
        aside = self._file.with_suffix(".new")
        aside.write_text("".join(json.dumps(asdict(r)) + "\n" for r in self._rows.values()))
        aside.replace(self._file)


def _read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    *lines, last = file.read_bytes().split(b"\n")
    if last:  # cut short: no newline was written after it
        file.write_bytes(b"".join(line + b"\n" for line in lines))
    return [_row(file, number, line) for number, line in enumerate(lines, 1)]


def _row(file: Path, number: int, line: bytes) -> Row:
    try:
        return _ROW.validate_json(line, strict=True)
    except ValidationError as error:
        raise LocalError(
            "malformed", f"{file}, line {number}, is no result ({first_fault(error)}); remove it"
        ) from error
