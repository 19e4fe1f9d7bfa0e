"""Means over seeds with their confidence bands: two-sided 95 % Student t intervals, pointwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from riffle.coordinator.learning import true_values
from riffle.coordinator.learning.learner import FloatArray

METHOD = "two-sided 95 % Student t over seeds"


def told(seeds: int) -> str:
    """How many seeds, and what their band is: one seed has none."""
    return f"{seeds} seeds; band: {METHOD}" if seeds > 1 else "1 seed, so no band"


@dataclass(frozen=True, slots=True)
class Band:
    """mean, low, high and the standard deviation sd over seeds, all of one shape (c,)."""

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    sd: FloatArray


def student(values: ArrayLike) -> Band:
    """Band of values (S, ...) over S seeds; one seed has no band: low = high = mean."""
    array = np.asarray(values, dtype=np.float64)
    S = len(array)
    mean = np.asarray(array.mean(axis=0))
    if S < 2:
        return Band(mean, mean, mean, np.zeros_like(mean))
    sd = np.asarray(array.std(axis=0, ddof=1))
    half = true_values.student(sd, S)
    return Band(mean, mean - half, mean + half, sd)


def stacked(bands: list[Band]) -> Band:
    """Bands of single numbers, side by side."""
    return Band(
        *(np.array([getattr(band, name) for band in bands]) for name in Band.__dataclass_fields__)
    )
