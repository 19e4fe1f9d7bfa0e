"""Turns scores into lower bounds on epsilon and beta that hold with a stated confidence.

(epsilon, beta)-DP means P(E) <= e^epsilon Q(E) + beta for every event E, where P and Q are the laws
of the views of two neighbouring populations, in either order. A distinguisher gives every view a
score, large where P is likelier. Its events are "score >= t", and "score <= t" with P and Q
exchanged. One sample chooses the event with the largest bound. A fresh sample gives Clopper-Pearson
bounds: p below P(E), and q above Q(E). Then

    epsilon >= log((p - beta) / q),    and at the claimed epsilon, beta >= p - e^epsilon q.

One event is chosen for epsilon and one for beta, so there are four one-sided bounds. Each fails
with probability error / 4, so together they hold with probability 1 - error. The choice of events
costs no confidence, because it uses other trials. Any score gives valid bounds, but a bad score
gives weak ones.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

FloatArray = NDArray[np.float64]

MOST_THRESHOLDS = 2_000
STATED_BOUNDS = 4


@dataclass(frozen=True, slots=True)
class Scores:
    """One distinguisher's scores under each population, two arrays of shape (trials,)."""

    first: FloatArray
    second: FloatArray


@dataclass(frozen=True, slots=True)
class Event:
    """The event ``score >= threshold`` under the first population, or ``<=`` under the second."""

    distinguisher: str
    from_first: bool
    threshold: float

    def __str__(self) -> str:
        sign, whom = (">=", "first") if self.from_first else ("<=", "second")
        return f"{self.distinguisher} {sign} {self.threshold:.6g}, {whom} population likelier"

    def hits(self, scores: Scores) -> tuple[int, int]:
        """Returns the event's count under its own population, and under the other one."""
        if self.from_first:
            likelier, other = scores.first >= self.threshold, scores.second >= self.threshold
        else:
            likelier, other = scores.second <= self.threshold, scores.first <= self.threshold
        return int(likelier.sum()), int(other.sum())


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on epsilon (at the claimed beta) and beta (at the claimed epsilon)."""

    epsilon: float
    beta: float
    epsilon_event: Event
    beta_event: Event
    error: float
    trials: int
    tuning_trials: int


def bound(
    tuning: Mapping[str, Scores],
    fresh: Mapping[str, Scores],
    *,
    epsilon: float,
    beta: float,
    error: float,
) -> Bounds:
    """Returns bounds from fresh scores, for events that tuning scores select."""
    each = error / STATED_BOUNDS
    trials = len(next(iter(fresh.values())).first)

    def epsilon_of(p: FloatArray, q: FloatArray) -> FloatArray:
        return np.log(np.maximum(p - beta, 1e-300) / q)

    def beta_of(p: FloatArray, q: FloatArray) -> FloatArray:
        return np.asarray(p - math.exp(epsilon) * q)

    for_epsilon = choose(tuning, epsilon_of, each)
    for_beta = choose(tuning, beta_of, each)
    p, q = rates(*for_epsilon.hits(fresh[for_epsilon.distinguisher]), trials, each)
    p_beta, q_beta = rates(*for_beta.hits(fresh[for_beta.distinguisher]), trials, each)
    return Bounds(
        epsilon=max(0.0, float(epsilon_of(p, q))),
        beta=max(0.0, float(beta_of(p_beta, q_beta))),
        epsilon_event=for_epsilon,
        beta_event=for_beta,
        error=error,
        trials=trials,
        tuning_trials=len(next(iter(tuning.values())).first),
    )


def choose(
    tuning: Mapping[str, Scores],
    value: Callable[[FloatArray, FloatArray], FloatArray],
    error: float,
) -> Event:
    """Returns the event with the largest bound on the tuning sample itself.

    A choice by rates, not bounds, would favour rare events that look good by chance.
    """
    best, chosen = -math.inf, None
    for name, scores in tuning.items():
        for from_first in (True, False):
            thresholds, likelier, other = _hits_by_threshold(scores, from_first=from_first)
            values = value(*rates(likelier, other, len(scores.first), error))
            i = int(np.argmax(values))
            if chosen is None or values[i] > best:
                best, chosen = float(values[i]), Event(name, from_first, float(thresholds[i]))
    if chosen is None:
        raise ValueError("an audit needs at least one distinguisher")
    return chosen


def rates(
    likelier: float | FloatArray, other: float | FloatArray, trials: int, error: float
) -> tuple[FloatArray, FloatArray]:
    """Returns two Clopper-Pearson bounds: one below the first rate, one above the second rate."""
    return lower(likelier, trials, error), upper(other, trials, error)


def lower(hits: float | FloatArray, trials: int, error: float) -> FloatArray:
    """Returns a bound that is below the true rate with probability at least 1 - error."""
    k = np.asarray(hits, dtype=np.float64)
    quantile = special.betaincinv(np.maximum(k, 1e-9), trials - k + 1, error)
    return np.where(k > 0, quantile, 0.0)


def upper(hits: float | FloatArray, trials: int, error: float) -> FloatArray:
    """Returns a bound that is above the true rate with probability at least 1 - error."""
    k = np.asarray(hits, dtype=np.float64)
    quantile = special.betaincinv(k + 1, np.maximum(trials - k, 1e-9), 1.0 - error)
    return np.where(k < trials, quantile, 1.0)


def _hits_by_threshold(
    scores: Scores, *, from_first: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    sign = 1.0 if from_first else -1.0
    likelier, other = (scores.first, scores.second) if from_first else (scores.second, scores.first)
    thresholds = np.unique(np.concatenate([scores.first, scores.second]))
    if len(thresholds) > MOST_THRESHOLDS:
        at = np.linspace(0, len(thresholds) - 1, MOST_THRESHOLDS).astype(np.int64)
        thresholds = thresholds[at]
    return (
        thresholds,
        _at_least(sign * likelier, sign * thresholds),
        _at_least(sign * other, sign * thresholds),
    )


def _at_least(values: FloatArray, thresholds: FloatArray) -> FloatArray:
    below = np.searchsorted(np.sort(values), thresholds, side="left")
    return np.asarray(len(values) - below, dtype=np.float64)
