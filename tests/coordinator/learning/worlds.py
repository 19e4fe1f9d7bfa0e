"""Small MDPs and an unprivate problem, shared by the learners' tests."""

from __future__ import annotations

import numpy as np

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model
from riffle.coordinator.learning.sdp_pe.active import ROUNDING, ImplicitPolicies
from riffle.experiments.regret import optimal_value, policy_value
from riffle.node_client.environments.tabular import TabularMDP


def random_model(sizes: Sizes, seed: int, mass: float = 1.0) -> tuple[Model, FloatArray]:
    """A random model whose rows sum to `mass` (below one: the rest goes to x-dagger), and d1."""
    generator = np.random.default_rng(seed)
    X, A, H = sizes.X, sizes.A, sizes.H
    P = mass * generator.dirichlet(np.full(X, 0.5), (H, X, A))
    d1 = generator.dirichlet(np.ones(X))
    return Model(P, generator.uniform(size=(H, X, A))), d1


def perturb(model: Model, share: float, seed: int) -> Model:
    """Replaces `share` of every row of a model at random, and adds as much noise to its rewards."""
    generator = np.random.default_rng(seed)
    rows = generator.dirichlet(np.full(model.P.shape[-1], 0.5), model.r.shape)
    noise = share * generator.normal(size=model.r.shape)
    return Model((1 - share) * model.P + share * rows, np.clip(model.r + noise, 0, 1))


def suboptimality(mdp: TabularMDP, policy: PolicyArray) -> float:
    """1 - V^pi / V*: the share of the optimal value that a policy loses; 0 when V* is 0."""
    best = optimal_value(mdp)
    return 1 - policy_value(mdp, policy) / best if best > 0 else 0.0


def is_exact(phi: ImplicitPolicies) -> bool:
    """Whether the set is phi itself, not a superset (up to rounding)."""
    return all(i.sure - i.least <= 2 * ROUNDING * (1 + abs(i.sure)) for i in phi.inequalities)
