"""Upper occupancy bounds u_k (004, Eq. 4.2; Jin et al. 2020, Algorithm 3).

    u(x, a) = pi(a|x) max over P in the set of Pr[visit x | P, pi].

Reaching one state is a reward, and rows of the set are boxes of their own, so the maximum is
reached by backward induction: f(y) = sum_a pi(a|y) max_{p in box(y,a)} p . f', and the best p of a
box puts the mass left over by the lower bounds on the successors of largest f' first. All target
states are done at once. u >= q_k, because the transitions that q_k induces are in the set.
"""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import FloatArray


def upper_occupancy(layers: Layers, box: Box, policy: FloatArray) -> FloatArray:
    """u(x, a) (H, W, A) for policy (H, W, A)."""
    H, W = layers.H, layers.W
    reached = np.empty((H, W))
    targets = np.zeros((0, W))  # of later layers: f at the layer that the loop is at
    for h in reversed(range(H)):
        targets = np.concatenate((np.eye(W), targets))
        if h > 0:
            best = largest(box.lower[h - 1], box.upper[h - 1], targets)
            targets = (policy[h - 1] * best).sum(axis=-1)
        else:
            reached = targets[:, 0].reshape(H, W)
    return np.asarray(reached[..., None] * policy)


def largest(lower: FloatArray, upper: FloatArray, f: FloatArray) -> FloatArray:
    """max of p . f over the box, for targets f (T, W) and rows (W, A, W): (T, W, A)."""
    order = np.argsort(-f, axis=-1)
    ranked = np.take_along_axis(f, order, axis=-1)[:, None, None, :]
    low = np.moveaxis(lower[..., order], -2, 0)
    room = np.moveaxis(upper[..., order], -2, 0) - low
    left = 1 - lower.sum(axis=-1)[..., None]
    before = np.cumsum(room, axis=-1) - room
    p = low + np.clip(left - before, 0.0, room)
    return np.asarray((p * ranked).sum(axis=-1))
