"""Attacks the deployed code on neighbouring populations with the best possible distinguisher.

By the Neyman-Pearson lemma, no test of a given size beats the likelihood ratio of the true model.
Let the data of all users except user 0 be fixed, and let base_i be their count on cell i. User 0
adds one to every up cell in the first population, and to every down cell in the second (`world`).
The noise on each cell is Binomial(N, p), with mass function b. The score of counts y is

    sum over up cells i   of log b(y_i - base_i - 1) - log b(y_i - base_i)
    + sum over down cells of log b(y_i - base_i)     - log b(y_i - base_i - 1).

The score ignores padding and the permutation. A second distinguisher, `head`, looks for a
permutation that does not move the first report.

Let P and Q be the laws of the views of the two populations, in either order. (epsilon, beta)-DP
means P(E) <= e^epsilon Q(E) + beta for every event E. The events here are scores above or below a
threshold. A tuning sample chooses one event for epsilon and one for beta. A fresh sample then gives
Clopper-Pearson bounds, p below P(E) and q above Q(E), so that

    epsilon >= log((p - beta) / q),    and at the claimed epsilon, beta >= p - e^epsilon q.

Each of the four one-sided bounds fails with probability at most error / 4.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from riffle.common.mechanism.counters import Ints
from riffle.experiments.audit.pipeline import Views, identity_seals, views, views_of_the_analyzer
from riffle.experiments.audit.world import Setting, World

FloatArray = NDArray[np.float64]
Value = Callable[[FloatArray, FloatArray], FloatArray]

MOST_THRESHOLDS = 2_000
STATED_BOUNDS = 4


@dataclass(frozen=True, slots=True)
class Scores:
    """A distinguisher's scores (trials,) for each of two neighbouring populations of users."""

    first: FloatArray
    second: FloatArray


@dataclass(frozen=True, slots=True)
class Event:
    """The event ``score >= threshold``, or ``score <= threshold`` if not ``from_first``."""

    distinguisher: str
    from_first: bool
    threshold: float

    def __str__(self) -> str:
        sign, whom = (">=", "first") if self.from_first else ("<=", "second")
        return f"{self.distinguisher} {sign} {self.threshold:.6g}, {whom} population likelier"

    def hits(self, scores: Scores) -> tuple[int, int]:
        """Counts the trials in the event, first for the population where the event is likelier."""
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

    def evaluate(value: Value) -> tuple[float, Event]:
        event = choose(tuning, value, each)
        p, q = rates(*event.hits(fresh[event.distinguisher]), trials, each)
        return max(0.0, float(value(p, q))), event

    epsilon_bound, epsilon_event = evaluate(epsilon_of)
    beta_bound, beta_event = evaluate(beta_of)
    tuning_trials = len(next(iter(tuning.values())).first)
    return Bounds(
        epsilon_bound, beta_bound, epsilon_event, beta_event, error, trials, tuning_trials
    )


def choose(tuning: Mapping[str, Scores], value: Value, error: float) -> Event:
    """Returns the event that has the largest bound in the tuning sample.

    A choice by rates, not bounds, would favour rare events that look good by chance.
    """
    best: dict[Event, float] = {}
    for name, scores in tuning.items():
        for from_first in (True, False):
            thresholds, likelier, other = _hits_by_threshold(scores, from_first=from_first)
            values = value(*rates(likelier, other, len(scores.first), error))
            i = int(np.argmax(values))
            best[Event(name, from_first, float(thresholds[i]))] = float(values[i])
    if not best:
        raise ValueError("an audit needs at least one distinguisher")
    return max(best, key=lambda event: best[event])


def rates(
    likelier: float | FloatArray, other: float | FloatArray, trials: int, error: float
) -> tuple[FloatArray, FloatArray]:
    """Returns Clopper-Pearson bounds of rates: ``likelier`` from below, ``other`` from above."""
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


CERTAIN = 1e3
"""The score of an outcome that is possible under only one population."""

TUNING_SHARE = 2
"""Fresh trials for each tuning trial."""

Pair = tuple[Views, Views]


@dataclass(frozen=True, slots=True)
class Attack:
    """The outcome of one attack on one encoding: the claim, and bounds on the real guarantee."""

    name: str
    epsilon: float
    beta: float
    bounds: Bounds

    @property
    def violated(self) -> bool:
        """Returns whether the lower bound on epsilon or beta exceeds the claimed number."""
        return self.bounds.epsilon > self.epsilon or self.bounds.beta > self.beta

    def as_dict(self) -> dict[str, Any]:
        """Returns the outcome under the keys that the command prints."""
        b = self.bounds
        return {
            "attack": self.name,
            "epsilon_claimed": self.epsilon,
            "epsilon_lower_bound": b.epsilon,
            "epsilon_share": b.epsilon / self.epsilon,
            "beta_claimed": self.beta,
            "beta_lower_bound": b.beta,
            "beta_share": b.beta / self.beta,
            "family_wise_error": b.error,
            "trials_a_side": b.trials,
            "tuning_trials_a_side": b.tuning_trials,
            "threshold_epsilon": str(b.epsilon_event),
            "threshold_beta": str(b.beta_event),
            "verdict": "violated" if self.violated else "not refuted",
        }


def audit(world: World, trials: int, error: float) -> tuple[Attack, Pair]:
    """Attacks unencrypted batches; returns the outcome and the views of fresh trials."""
    tuning_trials = max(1, trials // TUNING_SHARE)
    with identity_seals():
        tuning = both_views(world, tuning_trials)
        fresh = both_views(world, trials, start=tuning_trials)
    return judge("riffle", world.setting, scores(world, tuning), scores(world, fresh), error), fresh


def judge(
    name: str,
    setting: Setting,
    tuning: dict[str, Scores],
    fresh: dict[str, Scores],
    error: float,
) -> Attack:
    """Compares an attack's bounds with the setting's claim; returns the outcome."""
    epsilon, beta = setting.epsilon, setting.beta
    bounds = bound(tuning, fresh, epsilon=epsilon, beta=beta, error=error)
    return Attack(name, epsilon, beta, bounds)


def both_views(world: World, trials: int, start: int = 0) -> Pair:
    """Returns the views of trials under both populations. No two trials share a seeded stream."""
    return (
        views(world, trials, first=True, start=2 * start),
        views(world, trials, first=False, start=2 * start + trials),
    )


def scores(world: World, pair: Pair) -> dict[str, Scores]:
    """Returns the scores of the distinguishers "likelihood ratio" and "head"."""
    up, down = world.cells()

    def head(view: Views) -> FloatArray:
        difference = view.head[:, up].sum(axis=1) - view.head[:, down].sum(axis=1)
        return np.asarray(difference, dtype=np.float64)

    return {
        "likelihood ratio": Scores(*(likelihood_ratio(world, view.counts) for view in pair)),
        "head": Scores(*(head(view) for view in pair)),
    }


def likelihood_ratio(world: World, counts: Ints) -> FloatArray:
    """Returns the scores of counts (trials, C). A cell changes a score by at most CERTAIN."""
    up, down = world.cells()
    gain = log_ratios(world.noise_bits, world.noise.p)
    others = world.setting.n - 1
    rising = gain.take(counts[:, up], mode="clip")
    falling = gain.take(counts[:, down] - others, mode="clip")
    return np.asarray(rising.sum(axis=1) - falling.sum(axis=1))


def log_ratios(N: int, p: float) -> FloatArray:
    """Returns log b(y - 1) - log b(y) for y = 0 ... N + 1; b is the mass of Binomial(N, p)."""
    y = np.arange(N + 2)
    with np.errstate(divide="ignore"):
        log_mass = stats.binom.logpmf(np.arange(-1, N + 2), N, p)
    ratios = log_mass[y] - log_mass[y + 1]
    return np.asarray(np.clip(ratios, -CERTAIN, CERTAIN))


def agreement(world: World, pair: Pair, trials: int) -> float:
    """Tests whether trials with HPKE seals have the same law as ``pair``; returns the p-value.

    A Bonferroni factor of two combines the tests of both populations.
    """
    start = 1 << 32
    sealed = [
        views_of_the_analyzer(world, trials, first=first, start=start) for first in (True, False)
    ]
    values = [
        _same_law(likelihood_ratio(world, a.counts), likelihood_ratio(world, b.counts))
        for a, b in zip(sealed, pair, strict=True)
    ]
    return min(1.0, 2 * min(values))


def _same_law(few: FloatArray, many: FloatArray) -> float:
    edges = np.unique(np.quantile(many, np.linspace(0.1, 0.9, 9)))
    table = np.array(
        [np.bincount(np.searchsorted(edges, s), minlength=len(edges) + 1) for s in (few, many)]
    )
    table = table[:, table.sum(axis=0) > 0]
    return float(stats.chi2_contingency(table).pvalue)
