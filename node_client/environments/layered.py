"""Loop-free layered MDPs drawn from a seed (004, section 2.1).

States come in layers of sizes (X_0, ..., X_H), X_0 = X_H = 1, and every transition leads to the
next layer: P_h(. | x, a) ~ Dirichlet(c, ..., c) over layer h + 1, r_h(x, a) ~ Uniform(0, 1). States
are numbered from 0 in every layer, so an MDP has X = max X_h states; at layers with fewer, the rest
are never reached and lead to state 0. Steps are the layers: H of them.
"""

import numpy as np

from riffle.common.randomness import generator_for
from riffle.node_client.environments.tabular import TabularMDP


def layered_mdp(
    widths: tuple[int, ...], actions: int, seed: int, concentration: float = 1.0
) -> TabularMDP:
    """The layered MDP of ``seed``.

    Small ``concentration`` makes transitions nearly deterministic, large makes them uniform.

    Raises:
        ValueError: fewer than two layers, a layer without states, or ends that are no singletons.
    """
    if len(widths) < 2 or min(widths) < 1 or widths[0] != 1 or widths[-1] != 1:
        raise ValueError(f"layers must have sizes such as (1, 3, 3, 1), not {widths}")
    H, W, A = len(widths) - 1, max(widths), actions
    generator = generator_for(seed, "LayeredMDP-v0", *widths, A, str(concentration))
    P = np.zeros((H, W, A, W))
    P[..., 0] = 1.0
    for h in range(H):
        after = np.full(widths[h + 1], concentration)
        P[h, : widths[h]] = 0.0
        P[h, : widths[h], :, : widths[h + 1]] = generator.dirichlet(after, (widths[h], A))
    r = generator.uniform(0, 1, size=(H, W, A))
    start = np.zeros(W)
    start[0] = 1.0
    return TabularMDP(P, r, start)
