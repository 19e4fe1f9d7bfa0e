"""Exact values and pseudo-regret, computed from the true MDP.

    regret = sum over deployments of n (V* - V^mixture).

V* comes from backward induction, and a mixture's value is the weighted mean of its policies'
values. Realised rewards are not used, so the only randomness is the learner's choice of policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import Deployment, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import plan, value
from riffle.node_client.environments.tabular import TabularMDP


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
    """Cumulative pseudo-regret after each deployment, against cumulative episodes.

    episodes (D,), cumulative (D,); switches counts changes of the deployed mixture.
    """

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
