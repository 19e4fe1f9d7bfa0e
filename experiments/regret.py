"""Exact values and pseudo-regret: what was lost, computed from the true MDP.

    regret = sum over deployments of n (V* - V^mixture),

with V* by backward induction and a mixture's value the weighted mean of its policies' values. No
realised reward enters, so the only randomness left is the learner's choice of policies.
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
    """V*, the largest value of any policy from the start distribution."""
    return float(plan(mdp.P, mdp.r, mdp.d1).value)


def policy_value(mdp: TabularMDP, policy: PolicyArray) -> float:
    """Value of a deterministic policy (H, X)."""
    return float(value(mdp.P, mdp.r, mdp.d1, policy))


def mixture_value(mdp: TabularMDP, mixture: Mixture) -> float:
    """Value of a mixture: its policies' values, weighted."""
    return float(mixture.probabilities @ value(mdp.P, mdp.r, mdp.d1, mixture.policies))


def suboptimality(mdp: TabularMDP, policy: PolicyArray) -> float:
    """1 - V^pi / V*: the share of the optimal value that a policy loses; 0 when V* is 0."""
    best = optimal_value(mdp)
    return 1 - policy_value(mdp, policy) / best if best > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Regret:
    """Cumulative pseudo-regret after each deployment, against cumulative episodes.

    episodes (D,), cumulative (D,), per_episode (D,) the gap V* - V^mixture of each deployment;
    switches counts changes of the deployed mixture.
    """

    episodes: FloatArray
    cumulative: FloatArray
    per_episode: FloatArray
    switches: int

    @property
    def total(self) -> float:
        """Regret of the whole run."""
        return float(self.cumulative[-1]) if self.cumulative.size else 0.0


def regret(mdp: TabularMDP, deployments: list[Deployment]) -> Regret:
    """Pseudo-regret of a run from what it deployed, in order."""
    best = optimal_value(mdp)
    n = np.array([float(deployment.n) for deployment in deployments])
    gaps = np.array([best - mixture_value(mdp, d.mixture) for d in deployments])
    return Regret(np.cumsum(n), np.cumsum(n * gaps), gaps, switches(deployments))


def switches(deployments: list[Deployment]) -> int:
    """How often the deployed mixture changed."""
    mixtures = [deployment.mixture for deployment in deployments]
    return sum(not after.same_as(before) for before, after in pairwise(mixtures))
