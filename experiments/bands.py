"""Means over seeds with confidence bands: two-sided 95 % Student t intervals at each point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from riffle.coordinator.learning import true_values
from riffle.coordinator.learning.learner import FloatArray

METHOD = "two-sided 95 % Student t over seeds"


def seeds_note(seeds: int) -> str:
    """Returns a note on the number of seeds and the band. A single seed has no band."""
    return f"{seeds} seeds; band: {METHOD}" if seeds > 1 else "1 seed, so no band"


@dataclass(frozen=True, slots=True)
class Band:
    """The mean over seeds, its interval (low, high) and the standard deviation sd, each (c,)."""

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    sd: FloatArray


def student_band(values: ArrayLike) -> Band:
    """Returns the band of values (S, ...) over S seeds; for one seed, low = high = mean."""
    array = np.asarray(values, dtype=np.float64)
    S = len(array)
    mean = np.asarray(array.mean(axis=0))
    if S < 2:
        return Band(mean, mean, mean, np.zeros_like(mean))
    sd = np.asarray(array.std(axis=0, ddof=1))
    half = true_values.student(sd, S)
    return Band(mean, mean - half, mean + half, sd)


def band(values: list[float]) -> tuple[float, list[float] | None]:
    """Returns the mean and its Student t interval, which is None for a single value."""
    result = student_band(values)
    return float(result.mean), [float(result.low), float(result.high)] if len(values) > 1 else None


def share(flags: list[bool | None]) -> float | None:
    """Returns the share of true flags, or None if the flag of any run is None."""
    return None if None in flags else float(np.mean([bool(flag) for flag in flags]))


def stack(bands: list[Band]) -> Band:
    """Joins the bands of single numbers into one band."""
    return Band(
        *(np.array([getattr(band, name) for band in bands]) for name in Band.__dataclass_fields__)
    )
