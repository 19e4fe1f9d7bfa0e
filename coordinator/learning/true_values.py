"""The true values of what was deployed, as the operator of a simulated environment supplies them.

The coordinator never knows an environment. Who simulates one does: V*, and V of every deployed
mixture, exactly. Supplied for a run they are kept beside it, marked as supplied, and no learner
reads them. From them follows the exact pseudo-regret, after deployment i

    regret_i = sum over j <= i of n_j (V* - V_j),

n_j the episodes executed. Where runs whose specs differ in id and seeds at most have supplied
values, a band is drawn over those that came at least as far as the run looked at: pointwise, the
mean over runs with its two-sided 95 % Student t interval. Between deployments regret is linear,
value constant. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95
GRID = 200
"""Points of a band along the episodes."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrueRow:
    """A deployment with its true value and the episodes executed for it."""

    index: int
    episodes: int
    optimal: float
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """episodes (D,) cumulative, value (D,) of each deployment, regret (D,) cumulative."""

    episodes: Floats
    value: Floats
    regret: Floats


@dataclass(frozen=True, slots=True)
class Band:
    """Mean, low and high (G,) over runs, at the same episodes."""

    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Bands:
    """Bands of regret and value over ``runs`` runs, at ``episodes`` (G,)."""

    runs: int
    episodes: Floats
    regret: Band
    value: Band


def curve(rows: Sequence[TrueRow]) -> Curve:
    """A run's curve; deployments that executed nothing, or without a value, are left out."""
    done = [row for row in rows if row.episodes > 0]
    n = np.array([row.episodes for row in done], dtype=np.float64)
    value = np.array([row.value for row in done], dtype=np.float64)
    optimal = np.array([row.optimal for row in done], dtype=np.float64)
    return Curve(np.cumsum(n), value, np.cumsum(n * (optimal - value)))


def bands(own: Curve, others: Sequence[Curve]) -> Bands | None:
    """Bands over a run and those others that came as far; None when none did."""
    if not own.episodes.size:
        return None
    end = own.episodes[-1]
    curves = [own, *(c for c in others if c.episodes.size and c.episodes[-1] >= end)]
    if len(curves) < 2:
        return None
    grid = np.linspace(0, end, GRID + 1)[1:]
    regret = [np.interp(grid, np.r_[0, c.episodes], np.r_[0, c.regret]) for c in curves]
    value = [c.value[np.searchsorted(c.episodes, grid, "left")] for c in curves]
    return Bands(len(curves), grid, _band(regret), _band(value))


def _band(curves: list[Floats]) -> Band:
    array = np.array(curves)
    mean, half = array.mean(axis=0), student(array.std(axis=0, ddof=1), len(array))
    return Band(mean, mean - half, mean + half)


def student(sd: Floats, count: int) -> Floats:
    """Half of the interval of a mean of ``count`` values, two or more, of standard deviation sd."""
    half: Floats = stats.t.ppf((1 + LEVEL) / 2, count - 1) * sd / np.sqrt(count)
    return half
