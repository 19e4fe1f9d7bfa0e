"""The boxes and occupancy bounds of `confidence` in NumPy: the oracle of its loops."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import MARGIN, Box, Counts, estimate
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import BoolArray, FloatArray


def confidence_set(layers: Layers, counts: Counts, ln_iota: float, scale: float = 1.0) -> Box:
    """P_k of Eq. 3.1."""
    return box(layers, *estimate(layers, counts, ln_iota, scale))


def box(layers: Layers, centre: FloatArray, width: FloatArray) -> Box:
    """The set |P - centre| <= width, rows that are empty widened as the module says."""
    exists, free = _structure(layers)
    lower = np.where(free, 0.0, np.clip(centre - width, 0.0, 1.0)) * exists
    upper = np.where(free, 1.0, np.clip(centre + width, MARGIN, 1.0)) * exists
    bound = np.where(free[..., 0], np.inf, 1 - MARGIN)
    slack = layers.successors - 2 + bound
    if (lower.sum(axis=-1) <= bound).all() and ((exists - upper).sum(axis=-1) <= slack).all():
        return Box(lower, upper, np.zeros(bound.shape))
    s = np.maximum(_least_shift(lower, bound), _least_shift(exists - upper, slack))
    lower = np.maximum(lower - s[..., None], 0.0)
    return Box(lower, np.minimum(upper + s[..., None], 1.0) * exists, s)


def _least_shift(values: FloatArray, bound: FloatArray) -> FloatArray:
    """Least s >= 0 with sum (values - s)_+ <= bound > 0, row by row."""
    S = np.cumsum(-np.sort(-values, axis=-1), axis=-1)
    k = np.arange(1, values.shape[-1] + 1)
    s: FloatArray = np.maximum(((S - bound[..., None]) / k).max(axis=-1), 0.0)
    return s


@lru_cache(maxsize=64)
def _structure(layers: Layers) -> tuple[FloatArray, BoolArray]:
    """Successors that exist in a step (0 or 1), and cells of rows that no bound concerns."""
    after = np.arange(layers.W) < layers.successors[..., None]
    exists = np.broadcast_to(after, layers.cells.shape).astype(np.float64)
    free = (layers.successors[..., None] == 1) | ~layers.pairs[..., None]
    return exists, np.broadcast_to(free, layers.cells.shape)


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
