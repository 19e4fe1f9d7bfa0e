"""Exact values and pseudo-regret, computed from the true MDP, and their bands over seeds.

    regret = sum over deployments of n (V* - V^mixture).

Realised rewards are not used, so the only randomness is the learner's choice of policies. At each
point of a curve, the band is the two-sided 95 % Student t interval of the mean over seeds.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning import true_values
from riffle.coordinator.learning.learner import Deployment, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import plan, value
from riffle.node_client.environments.tabular import TabularMDP

Constant = str | int | float | bool
METHOD = "two-sided 95 % Student t over seeds"


def optimal_value(mdp: TabularMDP) -> float:
    """Returns V*, the largest value of any policy from the start distribution."""
    return float(plan(mdp.P, mdp.r, mdp.d1).value)


def policy_value(mdp: TabularMDP, policy: PolicyArray) -> float:
    """Returns the value of a deterministic policy (H, X)."""
    return float(value(mdp.P, mdp.r, mdp.d1, policy))


def mixture_value(mdp: TabularMDP, mixture: Mixture) -> float:
    """Returns the value of a mixture: the weighted mean of its policies' values."""
    return float(mixture.probabilities @ value(mdp.P, mdp.r, mdp.d1, mixture.policies))


@dataclass(frozen=True, slots=True)
class Regret:
    """Cumulative episodes and regret (D,) after each of D deployments; the number of switches."""

    episodes: FloatArray
    cumulative: FloatArray
    switches: int

    @property
    def total(self) -> float:
        """The regret of the whole run."""
        return float(self.cumulative[-1]) if self.cumulative.size else 0.0


def regret(mdp: TabularMDP, deployments: list[Deployment]) -> Regret:
    """Returns the pseudo-regret of a run from its deployments, in order."""
    best = optimal_value(mdp)
    n = np.array([float(deployment.n) for deployment in deployments])
    gaps = np.array([best - mixture_value(mdp, d.mixture) for d in deployments])
    return Regret(np.cumsum(n), np.cumsum(n * gaps), switches(deployments))


def switches(deployments: list[Deployment]) -> int:
    """Returns how often the deployed mixture changed."""
    mixtures = [deployment.mixture for deployment in deployments]
    return sum(not after.same_as(before) for before, after in pairwise(mixtures))


@dataclass(frozen=True, slots=True)
class Band:
    """Mean over seeds, its interval (low, high) and standard deviation at c points, each (c,)."""

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    sd: FloatArray


def student_band(values: ArrayLike) -> Band:
    """Returns the band (...) of values (S, ...) over S seeds; for one seed, low = high = mean."""
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
    """Joins c bands, each of a single number, into one band (c,)."""
    return Band(
        *(np.array([getattr(band, name) for band in bands]) for name in Band.__dataclass_fields__)
    )


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The result of one simulated run: regret, learned policy, cost, and every constant used.

    `episodes` (c,) are checkpoints, and `cumulative` (c,) is the regret there. `optimal_survives`
    tells whether an optimal policy is in the active set at the end. `eliminated` tells whether some
    policy has left it. Both are None for learners without an active set. Regret and values are NaN
    if the environment's probabilities are unknown.

    For the learners of paper 004, values are NaN, `policy_switches` is None, and `uniform_regret`
    is the regret of uniform play. `reward_mean`, `episodes_failed` and `first_failure` are set only
    in runs user by user (`per_user`).
    """

    seed: int
    regret: float = math.nan
    optimal_value: float = math.nan
    policy_value: float = math.nan
    policy_switches: int | None = None
    messages: int = 0
    seconds: float = 0.0
    policy: list[list[int]] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    optimal_survives: bool | None = None
    eliminated: bool | None = None
    episodes: tuple[float, ...] = ()
    cumulative: tuple[float, ...] = ()
    uniform_regret: float = math.nan
    value_estimate: float | None = None
    reward_mean: float | None = None
    episodes_failed: int | None = None
    first_failure: str | None = None

    @property
    def value_share(self) -> float | None:
        """The learned policy's value over V*, or None if either is unknown."""
        return None if math.isnan(self.policy_value) else self.policy_value / self.optimal_value

    @property
    def within_5_percent(self) -> bool:
        """Returns whether the learned policy loses at most 5 % of the optimal value."""
        return self.policy_value >= 0.95 * self.optimal_value
