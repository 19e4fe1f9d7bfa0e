"""Small MDPs and an unprivate problem, shared by the learners' tests."""

from __future__ import annotations

import numpy as np

from common.counters import Sizes
from coordinator.learning.enumeration import Model
from coordinator.learning.learner import FloatArray


def random_model(sizes: Sizes, seed: int, mass: float = 1.0) -> tuple[Model, FloatArray]:
    """A random model whose rows sum to `mass` (below one: the rest goes to x-dagger), and d1."""
    generator = np.random.default_rng(seed)
    X, A, H = sizes.X, sizes.A, sizes.H
    P = mass * generator.dirichlet(np.full(X, 0.5), (H, X, A))
    d1 = generator.dirichlet(np.ones(X))
    return Model(P, generator.uniform(size=(H, X, A))), d1
