"""Attacks the deployed code on neighbouring populations with the best possible distinguisher.

By the Neyman-Pearson lemma, no test of a given size beats the likelihood ratio of the true model.
Given everybody else's data, the analyzer's counts are independent: base + Binomial(N, p). One user
moves `cells` of them up and `cells` down. Let b be the binomial mass function and base_i the other
users' count on cell i. The score of counts y is

    sum over up cells i   of log b(y_i - base_i - 1) - log b(y_i - base_i)
    + sum over down cells of log b(y_i - base_i)     - log b(y_i - base_i - 1).

This model ignores padding and the permutation. A second distinguisher, `head`, looks for a
permutation that does not move the first report.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from riffle.common.mechanism.counters import Ints
from riffle.experiments.audit import evidence
from riffle.experiments.audit.evidence import Bounds, FloatArray, Scores
from riffle.experiments.audit.pipeline import Views, identity_seals, views, views_of_the_analyzer
from riffle.experiments.audit.world import Setting, World

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
        """Returns whether the bounds refute the claim at the stated error."""
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
    """Returns an attack's outcome at the setting's claim."""
    epsilon, beta = setting.epsilon, setting.beta
    bounds = evidence.bound(tuning, fresh, epsilon=epsilon, beta=beta, error=error)
    return Attack(name, epsilon, beta, bounds)


def both_views(world: World, trials: int, start: int = 0) -> Pair:
    """Returns the views of trials under both populations. No two trials share a seeded stream."""
    return (
        views(world, trials, first=True, start=2 * start),
        views(world, trials, first=False, start=2 * start + trials),
    )


def scores(world: World, pair: Pair) -> dict[str, Scores]:
    """Returns the scores of both distinguishers."""
    up, down = world.cells()

    def head(view: Views) -> FloatArray:
        difference = view.head[:, up].sum(axis=1) - view.head[:, down].sum(axis=1)
        return np.asarray(difference, dtype=np.float64)

    return {
        "likelihood ratio": Scores(*(likelihood_ratio(world, view.counts) for view in pair)),
        "head": Scores(*(head(view) for view in pair)),
    }


def likelihood_ratio(world: World, counts: Ints) -> FloatArray:
    """Returns the scores of counts (trials, C), within [-CERTAIN, CERTAIN] for each cell."""
    up, down = world.cells()
    gain = log_ratios(world.noise_bits, world.noise.p)
    others = world.setting.n - 1
    rising = _look_up(gain, counts[:, up])
    falling = _look_up(gain, counts[:, down] - others)
    return np.asarray(rising.sum(axis=1) - falling.sum(axis=1))


def log_ratios(N: int, p: float) -> FloatArray:
    """Returns log b(y - 1) - log b(y) for y = 0 ... N + 1, shape (N + 2,)."""
    y = np.arange(N + 2)
    with np.errstate(divide="ignore"):
        log_mass = stats.binom.logpmf(np.arange(-1, N + 2), N, p)
    ratios = log_mass[y] - log_mass[y + 1]
    return np.asarray(np.clip(ratios, -CERTAIN, CERTAIN))


def agreement(world: World, pair: Pair, trials: int) -> float:
    """Returns the p-value of the hypothesis that trials with HPKE seals have the law of ``pair``.

    The deployed analyzer opens the sealed trials. There is one chi-square test for each population,
    on the scores in bins at the deciles of ``pair``; a Bonferroni factor of two combines the tests.
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


def _look_up(gain: FloatArray, y: Ints) -> FloatArray:
    return np.asarray(gain[np.clip(y, 0, len(gain) - 1)])
