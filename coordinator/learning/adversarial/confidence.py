"""Private counts and the confidence set of Eq. 3.1 of paper 004.

Counts: a Privatizer of precision E (noise on every count is within E / 4) releases N(x,a,x') and
N(x,a). Eq. 5.1 (in closed form, as in `postprocess.project`) and the add-on, Eq. 5.2, turn these
counts into N~. Then

    P~(x'|x,a) = N~(x,a,x') / N~(x,a)  (uniform where N~(x,a) = 0),
    beta(x'|x,a) = min{1, sqrt(2 P~ (1 - P~) ln iota / N~(x,a)) + (4 E + 7 ln iota) / N~(x,a)},

with iota = X A K / delta. The set is {P : |P - P~| <= beta}: every row is a box, lower <= P <=
upper. By Lemma 3.1, with probability at least 1 - 6 delta, the set contains the true P in every
episode. In places, paper 004 prints beta's second term under the root. But the proof of E.14 in 004
bounds beta as above.

Empty sets. A row of a box may be empty: its lower bounds sum to more than one, or its upper bounds
to less than one. A row that is empty, or nearly so, is widened to [lower - s, upper + s] within [0,
1], with the least s >= 0 such that

    sum lower <= 1 - MARGIN   and   sum upper >= 1 + MARGIN.

A widened row has an interior, which the log-barrier needs. No upper bound is below MARGIN. A row
with one successor has the bounds [0, 1].

Upper occupancy bounds u_k (004, Eq. 4.2; Jin et al. 2020, Algorithm 3).

    u(x, a) = pi(a|x) max over P in the set of Pr[visit x | P, pi].

Backward induction finds the largest probability f of reaching x from each state. The p with the
largest p . f starts at the lower bounds, and fills up the successors with the largest f first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.planning import Floats, Ints, compiled
from riffle.coordinator.learning.postprocess import project

MARGIN = 1e-6
NEVER = -1e18  # count of a successor that does not exist: Eq. 5.1 makes it zero


@dataclass(frozen=True, slots=True)
class Counts:
    """Consistent N~(x,a,x') (H, W, A, W) and N~(x,a) (H, W, A) of precision E; W is `Layers.W`."""

    transitions: FloatArray
    visits: FloatArray
    E: float


@dataclass(frozen=True, slots=True)
class Box:
    """The set of P with lower <= P(x'|x,a) <= upper, each (H, W, A, W). No row is empty.

    Successors that do not exist have the bounds [0, 0]. A state that does not exist is never
    reached; its existing successors have the bounds [0, 1]. `widened` (H, W, A) says by how much
    both bounds of each row were moved outward, usually by 0.
    """

    lower: FloatArray
    upper: FloatArray
    widened: FloatArray


def post_process(layers: Layers, transitions: FloatArray, visits: FloatArray, E: float) -> Counts:
    """Applies Eq. 5.1, 5.2 of paper 004 to noisy counts, padded to (H, W, A, W) and (H, W, A)."""
    c = np.where(layers.cells, transitions, NEVER)
    n = project(c, visits * layers.pairs, E / 4) + E / (2 * layers.successors[..., None])
    n *= layers.cells
    return Counts(n, n.sum(axis=-1), E)


def log_iota(layers: Layers, K: int, delta: float) -> float:
    """Returns ln iota with iota = X A K / delta."""
    return math.log(layers.X * layers.A * K / delta)


def estimate(
    layers: Layers, counts: Counts, ln_iota: float, scale: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """Returns P~ (004, Eq. 2.5) and the width beta (004, Eq. 3.1), each (H, W, A, W)."""
    N = counts.visits[..., None]
    unknown = np.broadcast_to(1 / layers.successors[..., None], layers.cells.shape)
    P = np.divide(counts.transitions, N, out=unknown * layers.cells, where=N > 0)
    N = np.maximum(N, 1e-300)
    width = np.sqrt(2 * P * (1 - P) * ln_iota / N) + (4 * counts.E + 7 * ln_iota) / N
    return P, np.minimum(scale * width, 1.0)


def confidence_set(layers: Layers, counts: Counts, ln_iota: float, scale: float = 1.0) -> Box:
    """Returns the confidence set P_k of Eq. 3.1 of paper 004."""
    return box(layers, *estimate(layers, counts, ln_iota, scale))


def everything(layers: Layers) -> Box:
    """Returns the set of all transition functions, which is P_1 in 004, Algorithm 3."""
    return box(layers, np.zeros(layers.cells.shape), np.ones(layers.cells.shape))


def box(layers: Layers, centre: FloatArray, width: FloatArray) -> Box:
    """Returns the set |P - centre| <= width. Empty rows are widened (see the module)."""
    lower, upper = np.zeros((2, *layers.cells.shape))
    widened = np.zeros(layers.pairs.shape)
    bounds(np.array(layers.widths), centre, width, lower, upper, widened)
    return Box(lower, upper, widened)


def upper_occupancy(layers: Layers, box: Box, policy: FloatArray) -> FloatArray:
    """Returns u (H, W, A), the largest probability of visits to (x, a) that the box allows."""
    visits = most_visits(np.array(layers.widths), box.lower, box.upper, policy)
    return np.asarray(visits[..., None] * policy)


@compiled
def rank(size: int, values: Floats, order: Ints) -> None:
    """Writes the indices of the first `size` values into `order`, the largest value first."""
    for i in range(size):
        j = i
        while j > 0 and values[order[j - 1]] < values[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@compiled
def bounds(
    widths: Ints, centre: Floats, width: Floats, lower: Floats, upper: Floats, widened: Floats
) -> None:
    """Writes the bounds of a box's rows, and by how much each row was widened."""
    order, bound = np.zeros(centre.shape[3], np.int64), 1 - MARGIN
    for h in range(len(centre)):
        size = widths[h + 1]
        upper[h, :, :, :size] = 1.0
        if size == 1:
            continue
        for x in range(widths[h]):
            for a in range(centre.shape[2]):
                low, high = lower[h, x, a], upper[h, x, a]
                for y in range(size):
                    P, beta = centre[h, x, a, y], width[h, x, a, y]
                    low[y] = min(max(P - beta, 0.0), 1.0)
                    high[y] = min(max(P + beta, MARGIN), 1.0)
                s = least_shift(size, low, bound, order)
                s = max(s, least_shift(size, 1.0 - high, size - 2 + bound, order))
                if s > 0.0:
                    widened[h, x, a] = s
                    for y in range(size):
                        low[y], high[y] = max(low[y] - s, 0.0), min(high[y] + s, 1.0)


@compiled
def least_shift(size: int, values: Floats, bound: float, order: Ints) -> float:
    """Returns the least s >= 0 with sum max(values - s, 0) <= `bound`; `order` is scratch."""
    if values[:size].sum() <= bound:
        return 0.0
    rank(size, values, order)
    s, prefix = 0.0, 0.0
    for k in range(1, size + 1):
        prefix += values[order[k - 1]]
        s = max(s, (prefix - bound) / k)
    return s


@compiled
def most_visits(widths: Ints, lower: Floats, upper: Floats, policy: Floats) -> Floats:
    """Returns the largest probability of visiting each state (H, W) if P is within the bounds."""
    H, W, A = policy.shape
    f, before, order = np.zeros((H * W, W)), np.zeros(W), np.zeros(W, np.int64)
    for h in range(H - 1, -1, -1):
        for w in range(widths[h]):
            f[h * W + w, w] = 1.0
        if h == 0:
            break
        for target in range(h * W, H * W):
            rank(widths[h], f[target], order)
            before[:] = 0.0
            for x in range(widths[h - 1]):
                for a in range(A):
                    row = lower[h - 1, x, a], upper[h - 1, x, a]
                    before[x] += policy[h - 1, x, a] * largest(widths[h], row, f[target], order)
            f[target] = before
    return f[:, 0].copy().reshape(H, W)


@compiled
def largest(size: int, row: tuple[Floats, Floats], f: Floats, order: Ints) -> float:
    """Returns the largest p . f of all p in a `row` of the box, with f ranked in `order`."""
    (lower, upper), rest, best = row, 1.0, 0.0
    for y in range(size):
        rest -= lower[y]
    for i in range(size):
        y = order[i]
        more = min(max(rest, 0.0), upper[y] - lower[y])
        best += (lower[y] + more) * f[y]
        rest -= upper[y] - lower[y]
    return best
