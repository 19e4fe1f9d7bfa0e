"""The absorbing MDP of 000, section III-B, estimated from private counts.

Tuples (h, x, a, x') in W lead to x-dagger, where every reward is zero:

    P~(x' | x, a) = N(x, a, x') / N(x, a)  off W,   0 on W,   the rest of the row to x-dagger,
    r~(x, a)      = clip(R(x, a) / N(x, a), 0, 1),  0 at x-dagger.

`Estimate Transition` and `Estimate Rewards` are not written out in the document; this is them. As
x-dagger has value zero, P~ is kept as a sub-stochastic array (H, X, A, X) without a row for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from riffle.coordinator.learning.learner import FloatArray

BoolArray = NDArray[np.bool_]


def infrequent(transitions: FloatArray, threshold: FloatArray | float) -> BoolArray:
    """W of Algorithm 2, line 9: tuples whose private count is at most `threshold` (in counts)."""
    return transitions <= threshold


def estimate_transition(transitions: FloatArray, W: BoolArray) -> FloatArray:
    """P~ (..., X, A, X) from consistent counts of the same shape; a row without visits is all W."""
    visits = transitions.sum(axis=-1, keepdims=True)
    rows = np.divide(transitions, visits, out=np.zeros_like(transitions), where=visits > 0)
    return np.where(W, 0.0, rows)


def estimate_rewards(rewards: FloatArray, visits: FloatArray) -> FloatArray:
    """r~ (..., X, A) = R / N clipped to [0, 1], and 0 without visits."""
    ratio = np.divide(rewards, visits, out=np.zeros_like(rewards), where=visits > 0)
    return np.clip(ratio, 0.0, 1.0)
