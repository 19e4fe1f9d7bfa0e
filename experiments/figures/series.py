"""A figure's curves as numbers: rows of all seeds, gathered, with what is missing and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.figures.bands import Band, stacked, student
from riffle.experiments.figures.catalogue import Curve, Figure, Line, Run, Value
from riffle.experiments.figures.rows import Row, Rows

Constants = dict[str, Value]
PER_SEED = frozenset({"seed"})


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a curve over its seeds: x, what came, and why some or all did not."""

    x: float
    run: Run
    rows: tuple[Row, ...]
    missing: str = ""

    @property
    def regret(self) -> Band:
        """Regret of the whole run; a single number."""
        return student([row.regret[-1] for row in self.rows])

    @property
    def switches(self) -> Band | None:
        """Changes of the deployed policy; None where every episode has its own."""
        values = [row.switches for row in self.rows]
        return None if None in values else student([float(v or 0) for v in values])

    @property
    def within_5_percent(self) -> float | None:
        """Share of seeds whose last policy loses at most 5 % of V*."""
        values = [row.value_share for row in self.rows if row.value_share is not None]
        return float(np.mean([v >= 0.95 for v in values])) if values else None

    @property
    def seconds(self) -> float:
        """Mean time of a seed."""
        return float(np.mean([row.seconds for row in self.rows]))


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: x (c,) and the band of regret there; its points; constants that shaped them.

    x and band are empty when nothing could be computed.
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
        """Points that have at least one seed."""
        return tuple(point for point in self.points if point.rows)


def gather(figure: Figure, rows: Rows, seeds: int) -> tuple[Series, ...]:
    """The series of a figure, in the order of its curves."""
    return tuple(_series(figure, curve, rows, seeds) for curve in figure.curves)


def _series(figure: Figure, curve: Curve, rows: Rows, seeds: int) -> Series:
    points = tuple(_point(x, run, rows, seeds) for x, run in zip(curve.x, curve.runs, strict=True))
    done = [point for point in points if point.rows]
    x, band = _against_time(done) if figure.kind == "time" else _at_points(done)
    said = [point.missing for point in points if point.missing]
    said += [f"{x:,.10g}: {reason}" for x, reason in curve.absent]
    ceilings = [row.ceiling for point in done for row in point.rows]
    constants = merged([row.constants or {} for point in done for row in point.rows[:1]])
    ceiling = ceilings[0] if ceilings else None
    return Series(curve.line, x, band, points, constants, tuple(said), ceiling)


def _point(x: float, run: Run, rows: Rows, seeds: int) -> Point:
    found = [row for seed in range(seeds) if (row := rows.get((run.key, seed))) is not None]
    done = tuple(row for row in found if row.reason is None)
    reasons = Counter(row.reason for row in found if row.reason is not None)
    said = "; ".join(f"{x:,.10g}: {n} of {seeds} seeds: {reason}" for reason, n in reasons.items())
    return Point(x, run, done, said)


def _against_time(points: Sequence[Point]) -> tuple[FloatArray, Band]:
    if not points:
        return _at_points(points)
    rows = points[0].rows
    return np.array(rows[0].episodes), student([row.regret for row in rows])


def _at_points(points: Sequence[Point]) -> tuple[FloatArray, Band]:
    return np.array([point.x for point in points]), stacked([point.regret for point in points])


def merged(constants: Sequence[Constants]) -> dict[str, str]:
    """Constants of a curve's points by name; those that differ are listed in the points' order."""
    names = dict.fromkeys(name for known in constants for name in known if name not in PER_SEED)
    found = {name: [_text(known.get(name, "-")) for known in constants] for name in names}
    return {
        name: values[0] if len(set(values)) == 1 else " / ".join(values)
        for name, values in found.items()
    }


def _text(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
