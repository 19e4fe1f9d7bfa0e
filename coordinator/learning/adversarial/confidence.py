"""Private counts and the confidence set of Eq. 3.1 of 004.

Counts: the noisy N(x,a,x'), N(x,a) of a Privatizer of precision E (every noise within E / 4) become
N~ by Eq. 5.1 (closed form, `coordinator.learning.postprocess.nearest`) and the add-on Eq. 5.2. Then

    P~(x'|x,a) = N~(x,a,x') / N~(x,a)  (uniform where N~(x,a) = 0),
    beta(x'|x,a) = min{1, sqrt(2 P~ (1 - P~) ln iota / N~(x,a)) + (4 E + 7 ln iota) / N~(x,a)},

iota = X A K / delta, and the set is {P : |P - P~| <= beta}: every row a box, lower <= P <= upper.
Lemma 3.1: it holds the true P at all k <= K with probability at least 1 - 6 delta. (The second term
is printed under the root in places; what the proof of E.14 bounds is the sum of the two.) `scale`
multiplies beta: 1 is the document's.

Empty sets. From N~ the set is never empty, as P~ is in it. Boxes made otherwise may be: a row whose
lower bounds sum to more than one, or upper bounds to less. The answer is the least widening: the
row becomes [lower - s, upper + s] within [0, 1], with the least s >= 0 such that

    sum lower <= 1 - MARGIN   and   sum upper >= 1 + MARGIN,

so that it is not empty and has an interior, which the log-barrier needs; s is reported (`widened`,
zero where nothing was done). It is continuous in the data, and s is by how much the bounds
contradict each other. No upper bound is below MARGIN. A row with one successor is [0, 1]: that it
sums to one determines it.

Upper occupancy bounds u_k (004, Eq. 4.2; Jin et al. 2020, Algorithm 3).

    u(x, a) = pi(a|x) max over P in the set of Pr[visit x | P, pi].

Reaching one state is a reward, and rows of the set are boxes of their own, so the maximum is
reached by backward induction: f(y) = sum_a pi(a|y) max_{p in box(y,a)} p . f', and the best p of a
box puts the mass left over by the lower bounds on the successors of largest f' first. All target
states are done at once. u >= q_k, because the transitions that q_k induces are in the set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import BoolArray, FloatArray
from riffle.coordinator.learning.postprocess import project

MARGIN = 1e-6
_NEVER = -1e18  # stands for a successor that does not exist: Eq. 5.1 gives it zero


@dataclass(frozen=True, slots=True)
class Counts:
    """N~(x,a,x') (H, W, A, W) and N~(x,a) (H, W, A), consistent; E of the noise in them."""

    transitions: FloatArray
    visits: FloatArray
    E: float


@dataclass(frozen=True, slots=True)
class Box:
    """Row-wise bounds lower <= P(x'|x,a) <= upper, each (H, W, A, W), of a set that is not empty.

    Padding cells are [0, 0]; rows of padding states are treated as if they had all successors
    of their step, and are never reached. `widened` (H, W, A) is s, zero in rows left as they were.
    """

    lower: FloatArray
    upper: FloatArray
    widened: FloatArray

    def holds(self, P: FloatArray, layers: Layers, slack: float = 1e-12) -> bool:
        """Whether P (H, W, A, W) is in the set."""
        inside = (self.lower - slack <= P) & (self.upper + slack >= P)
        return bool(inside[layers.cells].all())


def post_process(layers: Layers, transitions: FloatArray, visits: FloatArray, E: float) -> Counts:
    """Eq. 5.1 and 5.2 on noisy counts (H, W, A, W) and (H, W, A)."""
    c = np.where(layers.cells, transitions, _NEVER)
    n = project(c, visits * layers.pairs, E / 4) + E / (2 * layers.successors[..., None])
    n *= layers.cells
    return Counts(n, n.sum(axis=-1), E)


def log_iota(layers: Layers, K: int, delta: float) -> float:
    """ln iota with iota = X A K / delta."""
    return math.log(layers.X * layers.A * K / delta)


def estimate(layers: Layers, counts: Counts) -> FloatArray:
    """P~ of Eq. 2.5 (H, W, A, W)."""
    visits = counts.visits[..., None]
    unknown = np.broadcast_to(1 / layers.successors[..., None], counts.transitions.shape)
    return np.divide(counts.transitions, visits, out=unknown * layers.cells, where=visits > 0)


def confidence_set(layers: Layers, counts: Counts, ln_iota: float, scale: float = 1.0) -> Box:
    """P_k of Eq. 3.1."""
    P = estimate(layers, counts)
    N = np.maximum(counts.visits[..., None], 1e-300)
    width = np.sqrt(2 * P * (1 - P) * ln_iota / N) + (4 * counts.E + 7 * ln_iota) / N
    return box(layers, P, np.minimum(scale * width, 1.0))


def everything(layers: Layers) -> Box:
    """The set of all transition functions, P_1."""
    return box(layers, np.zeros(layers.cells.shape), np.ones(layers.cells.shape))


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
