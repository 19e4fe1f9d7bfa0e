"""True values of deployments, supplied by the operator of a simulated environment.

Such an operator knows the optimal value V*, and the value V of every deployed mixture, exactly. No
learner reads supplied values. They give the exact pseudo-regret after deployment i,

    regret_i = sum over j <= i of n_j (V* - V_j),

where n_j is the number of episodes executed for deployment j. A run's bands cover the run itself
and all comparable runs. A comparable run has the same spec, except for id and seeds, and has
executed no fewer episodes. Bands assume that, within one deployment, regret grows linearly with
the episodes and the value is constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # `stats` would slow every process's start by half a second

from riffle.coordinator.learning.learner import FloatArray

LEVEL = 0.95
GRID = 200
"""The number of points at which a band is computed."""


@dataclass(frozen=True, slots=True)
class TrueRow:
    """A deployment with its true value and the episodes executed for it."""

    index: int
    episodes: int
    optimal: float
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """For each of D deployments: episodes so far, the deployment's value, and regret so far."""

    episodes: FloatArray
    value: FloatArray
    regret: FloatArray


@dataclass(frozen=True, slots=True)
class Band:
    """For each point, a mean over runs and the two ends of its interval."""

    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True)
class Bands:
    """Student t intervals of mean regret and value. The runs differ in ids and seeds only."""

    runs: int
    episodes: list[float]
    regret: Band
    value: Band
    confidence: float = LEVEL


def curve(rows: Sequence[TrueRow]) -> Curve:
    """Returns a run's values and regret; leaves out deployments that executed no episode."""
    rows = [row for row in rows if row.episodes > 0]
    n = np.array([row.episodes for row in rows], dtype=np.float64)
    value = np.array([row.value for row in rows], dtype=np.float64)
    optimal = np.array([row.optimal for row in rows], dtype=np.float64)
    return Curve(np.cumsum(n), value, np.cumsum(n * (optimal - value)))


def bands(own: Curve, others: Sequence[Curve]) -> Bands | None:
    """Returns bands of regret and value over `own` and all `others` that are at least as long.

    Returns None if `others` has no such curve, or if `own` has no episodes.
    """
    if not own.episodes.size:
        return None
    end = own.episodes[-1]
    curves = [own, *(c for c in others if c.episodes.size and c.episodes[-1] >= end)]
    if len(curves) < 2:
        return None
    grid = np.linspace(0, end, GRID + 1)[1:]
    regret = [np.interp(grid, np.r_[0, c.episodes], np.r_[0, c.regret]) for c in curves]
    value = [c.value[np.searchsorted(c.episodes, grid, "left")] for c in curves]
    return Bands(len(curves), grid.tolist(), _band(regret), _band(value))


def _band(curves: list[FloatArray]) -> Band:
    array = np.array(curves)
    mean, half = array.mean(axis=0), student(array.std(axis=0, ddof=1), len(array))
    return Band(mean.tolist(), (mean - half).tolist(), (mean + half).tolist())


def student(sd: FloatArray, count: int) -> FloatArray:
    """Returns half the width of Student's interval for the mean of ``count`` >= 2 values.

    ``sd`` is the standard deviation of the values.
    """
    half: FloatArray = special.stdtrit(count - 1, (1 + LEVEL) / 2) * sd / np.sqrt(count)
    return half
