"""Gathers the results of a figure's runs as curves. Lists the reason for a missing result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.figures.catalogue import Curve, Figure, Line
from riffle.experiments.regret import Band, stack, student_band
from riffle.experiments.study import SeedResult
from riffle.experiments.sweep import Rows, Run, Value

Constants = dict[str, Value]
PER_SEED = frozenset({"seed"})


@dataclass(frozen=True, slots=True)
class Point:
    """A run of a curve over all seeds: x, the results, and the reasons for missing results."""

    x: float
    run: Run
    rows: tuple[SeedResult, ...]
    missing: str = ""

    @property
    def regret(self) -> Band:
        """The band of the regret of the whole run, as single numbers."""
        return student_band([row.regret for row in self.rows])

    @property
    def switches(self) -> Band | None:
        """The band of policy changes, or None if every episode has a policy of its own."""
        values = [row.policy_switches for row in self.rows]
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
        band = student_band([row.cumulative for row in rows_of_run])
    missing = [point.missing for point in points if point.missing]
    missing += [f"{x:,.10g}: {reason}" for x, reason in curve.absent]
    ceilings = [point.rows[0].optimal_value * point.run.K for point in computed]
    constants = merge_constants([p.rows[0].constants for p in computed])
    ceiling = ceilings[0] if ceilings and not math.isnan(ceilings[0]) else None
    return Series(curve.line, x, band, points, constants, tuple(missing), ceiling)


def _point(x: float, run: Run, rows: Rows, seeds: int) -> Point:
    key = run.key
    known = [row for seed in range(seeds) if (row := rows.get((key, seed))) is not None]
    results = tuple(row.result for row in known if row.result is not None)
    reasons = Counter(row.reason for row in known if row.reason is not None)
    texts = [f"{x:,.10g}: {n} of {seeds} seeds: {reason}" for reason, n in reasons.items()]
    return Point(x, run, results, "; ".join(texts))


def merge_constants(constants: Sequence[Constants]) -> dict[str, str]:
    """Returns a curve's constants by name. Values that differ are listed in the points' order."""
    names = dict.fromkeys(name for point in constants for name in point if name not in PER_SEED)
    texts = {name: [_text(point.get(name, "-")) for point in constants] for name in names}
    return {
        name: values[0] if len(set(values)) == 1 else " / ".join(values)
        for name, values in texts.items()
    }


def _text(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
