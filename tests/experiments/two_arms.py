"""Two arms whose mean losses, 0.3 and 0.7, swap after a quarter of the episodes.

Uniform play loses 0.1 an episode to the second arm, which is the best in the whole run. A learner
that never leaves the first arm loses 0.2.
"""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.adversarial.layered import Layers, uniform_policy
from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.adversarial import learn, regret_curve
from riffle.experiments.adversaries import Case, Estimator, Privacy

LAYERS = Layers((1, 1), 2)
P = np.ones((1, 1, 2, 1))


def losses(K: int, seed: int) -> FloatArray:
    """Losses (K, 1, 1, 2)."""
    means = np.where((np.arange(K) < K // 4)[:, None], (0.3, 0.7), (0.7, 0.3))
    drawn = np.random.default_rng((seed, K)).random((K, 2)) < means
    return drawn.astype(np.float64).reshape(K, 1, 1, 2)


def regret(
    K: int, seed: int, estimator: Estimator, privacy: Privacy = "central", epsilon: float = 1000.0
) -> tuple[float, float]:
    """The regret an episode of UOB-LBPS, and of uniform play."""
    case = Case(
        "uob-lbps", K, epsilon, 1e-5, privacy, "exact", seed, widths=(1, 1), estimator=estimator
    )
    drawn = losses(K, seed)
    policies, _ = learn(case, LAYERS, P, drawn)
    uniform = np.broadcast_to(uniform_policy(LAYERS), drawn.shape)
    totals = (regret_curve(LAYERS, P, played, drawn)[1][-1] for played in (policies, uniform))
    mine, theirs = (float(total) / K for total in totals)
    return mine, theirs
