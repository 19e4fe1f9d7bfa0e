"""RandomMDP-v0: an MDP drawn from a seed, for tests and sweeps.

P_h(. | x, a) ~ Dirichlet(1, ..., 1), r_h(x, a) ~ Uniform(0, 1), d1 ~ Dirichlet(1, ..., 1), every
step on its own; the same seed and sizes give the same MDP on every machine.
"""

import numpy as np

from riffle.common.counters import Sizes
from riffle.common.randomness import generator_for
from riffle.node_client.environments.tabular import TabularMDP


def random_mdp(sizes: Sizes, seed: int) -> TabularMDP:
    """The MDP of ``seed`` with these sizes."""
    X, A, H = sizes.X, sizes.A, sizes.H
    generator = generator_for(seed, "RandomMDP-v0", X, A, H)
    P = generator.dirichlet(np.ones(X), size=(H, X, A))
    r = generator.uniform(0, 1, size=(H, X, A))
    return TabularMDP(P, r, generator.dirichlet(np.ones(X)))
