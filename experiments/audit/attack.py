"""The audit of Riffle as it is: real code, neighbouring populations, the best distinguisher.

By Neyman and Pearson no test of a given size beats the likelihood ratio of the true model. Given
everybody else's data the analyzer's counts are independent, base + Binomial(N, p), and one user
moves `cells` of them up and as many down. With b the binomial mass, base_up what others put on an
up cell, and so on, the score of counts y is

    sum over up cells   of log b(y - base_up - 1)   - log b(y - base_up)
    + sum over down cells of log b(y - base_down) - log b(y - base_down - 1).

Padding and the permutation have no part in that model; `head` looks for a permutation that does
not move the first report.
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
"""The score that stands for an outcome which only one population can have."""

TUNING_SHARE = 2
"""One tuning trial for so many fresh ones."""

Pair = tuple[Views, Views]


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack on one encoding: what was claimed of it, what was found."""

    name: str
    epsilon: float
    beta: float
    bounds: Bounds

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted at the stated error."""
        return self.bounds.epsilon > self.epsilon or self.bounds.beta > self.beta

    def document(self) -> dict[str, Any]:
        """What was found, under the keys that the command documents."""
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
    """Attack a batch with an identity seal; also what the fresh trials showed."""
    tuning_trials = max(1, trials // TUNING_SHARE)
    with identity_seals():
        tuning = both(world, tuning_trials)
        fresh = both(world, trials, start=tuning_trials)
    return judge("riffle", world.setting, scores(world, tuning), scores(world, fresh), error), fresh


def judge(
    name: str,
    setting: Setting,
    tuning: dict[str, Scores],
    fresh: dict[str, Scores],
    error: float,
) -> Attack:
    """An attack's outcome at the setting's claim."""
    claim = (setting.epsilon, setting.beta)
    found = evidence.bound(tuning, fresh, epsilon=claim[0], beta=claim[1], error=error)
    return Attack(name, *claim, found)


def both(world: World, trials: int, start: int = 0) -> Pair:
    """Views (trials) under both populations; seeded trials are numbered apart."""
    return (
        views(world, trials, first=True, start=2 * start),
        views(world, trials, first=False, start=2 * start + trials),
    )


def scores(world: World, pair: Pair) -> dict[str, Scores]:
    """Both distinguishers' scores."""
    up, down = world.cells()

    def head(seen: Views) -> FloatArray:
        difference = seen.head[:, up].sum(axis=1) - seen.head[:, down].sum(axis=1)
        return np.asarray(difference, dtype=np.float64)

    return {
        "likelihood ratio": Scores(*(likelihood_ratio(world, seen.counts) for seen in pair)),
        "head": Scores(*(head(seen) for seen in pair)),
    }


def likelihood_ratio(world: World, counts: Ints) -> FloatArray:
    """The score of counts (trials, C), in [-CERTAIN, CERTAIN] for each cell."""
    up, down = world.cells()
    gain = step(world.noise_bits, world.noise.p)
    others = world.setting.n - 1
    rising = _look_up(gain, counts[:, up])
    falling = _look_up(gain, counts[:, down] - others)
    return np.asarray(rising.sum(axis=1) - falling.sum(axis=1))


def step(N: int, p: float) -> FloatArray:
    """log b(y - 1) - log b(y) for y = 0 ... N + 1, shape (N + 2,)."""
    y = np.arange(N + 2)
    with np.errstate(divide="ignore"):
        log_mass = stats.binom.logpmf(np.arange(-1, N + 2), N, p)
    found = log_mass[y] - log_mass[y + 1]
    return np.asarray(np.clip(found, -CERTAIN, CERTAIN))


def agreement(world: World, pair: Pair, trials: int) -> float:
    """p-value of "trials with real HPKE seals have the same law as those of ``pair``".

    The sealed ones are opened by the deployed analyzer. Chi-square tests on the scores, binned at
    the identity trials' deciles, one a population, with Bonferroni's factor two.
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
