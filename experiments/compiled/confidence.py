"""The sets, bounds and episodes of document 004 (Eq. 2.5, 3.1, 4.2, 5.1-5.2), compiled.

They take the arithmetic of `coordinator.learning.adversarial.confidence` and `upper_occupancy` in
the same letters, row by row on the cells that exist instead of padded arrays. Sums are taken in
another order, so the answers agree with the references to rounding (tests). Arrays are float64 of
the shapes that `layered` names; widths (H + 1,) are those of the layers.
"""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.adversarial import confidence
from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.adversarial.uc_o_reps import Settings
from riffle.coordinator.learning.adversarial.uob_lbps import PrivateUOBLBPS
from riffle.coordinator.learning.compiled import Floats, Ints, compiled


class CompiledSettings(Settings):
    """`Settings` with a compiled confidence set."""

    def confidence_set(self, transitions: Floats, visits: Floats, E: float) -> Box:
        """`Settings.confidence_set`; a set with an empty row is left to it."""
        layers = self.layers
        lower, upper = np.zeros((2, *layers.cells.shape))
        ln_iota = confidence.log_iota(layers, self.K, self.delta)
        widths = np.array(layers.widths)
        if not bounds(widths, transitions, visits, E, ln_iota, self.scale, lower, upper):
            return super().confidence_set(transitions, visits, E)
        return Box(lower, upper, np.zeros(visits.shape))


class CompiledUOBLBPS(PrivateUOBLBPS):
    """`PrivateUOBLBPS` with compiled upper occupancy bounds."""

    def upper_bound(self) -> Floats:
        """u_k (H, W, A)."""
        return upper_occupancy(self.settings.layers, self.box, self.policy)


def upper_occupancy(layers: Layers, box: Box, policy: Floats) -> Floats:
    """`upper_occupancy.upper_occupancy`: the same arguments and answer."""
    return reached(np.array(layers.widths), box.lower, box.upper, policy)[..., None] * policy


@compiled
def bounds(
    widths: Ints,
    transitions: Floats,
    visits: Floats,
    E: float,
    ln_iota: float,
    scale: float,
    lower: Floats,
    upper: Floats,
) -> bool:
    """P_k of Eq. 3.1 from noisy counts, into lower and upper; whether no row of it is empty."""
    H, W, A = visits.shape
    n, order = np.zeros(W), np.zeros(W)
    whole = True
    for h in range(H):
        size = widths[h + 1]
        upper[h, :, :, :size] = 1.0
        if size == 1:
            continue
        for x in range(widths[h]):
            for a in range(A):
                nearest(size, transitions[h, x, a], visits[h, x, a], E / 4, n, order)
                total = 0.0
                for y in range(size):
                    n[y] += E / (2 * size)
                    total += n[y]
                low, room = 0.0, 0.0
                for y in range(size):
                    P = n[y] / total if total > 0.0 else 1 / size
                    N = max(total, 1e-300)
                    width = np.sqrt(2 * P * (1 - P) * ln_iota / N) + (4 * E + 7 * ln_iota) / N
                    width = min(scale * width, 1.0)
                    lower[h, x, a, y] = min(max(P - width, 0.0), 1.0)
                    upper[h, x, a, y] = min(max(P + width, confidence.MARGIN), 1.0)
                    low += lower[h, x, a, y]
                    room += 1.0 - upper[h, x, a, y]
                bound = 1.0 - confidence.MARGIN
                whole &= low <= bound and room <= size - 2 + bound
    return whole


@compiled
def nearest(size: int, c: Floats, total: float, tolerance: float, n: Floats, order: Floats) -> None:
    """`postprocess.nearest` of a row of `size` counts into n; `order` is scratch."""
    for i in range(size):
        j = i
        while j > 0 and order[j - 1] < c[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = c[i]
    prefix, raised, lowered = 0.0, np.inf, np.inf
    for k in range(1, size + 1):
        prefix += order[k - 1]
        raised = min(raised, (total - tolerance - prefix) / k)
        lowered = min(lowered, (total + tolerance - prefix) / k)
    shift = max(0.0, raised) + min(0.0, lowered)
    for y in range(size):
        n[y] = max(c[y] + shift, 0.0) if total + tolerance >= 0 else 0.0


@compiled
def reached(widths: Ints, lower: Floats, upper: Floats, policy: Floats) -> Floats:
    """The most that a state is visited, (H, W): backward induction for all of them at once."""
    H, W, A = policy.shape
    f, before, order = np.zeros((H * W, W)), np.zeros(W), np.zeros(W, np.int64)
    for h in range(H - 1, -1, -1):
        for w in range(widths[h]):
            f[h * W + w, w] = 1.0
        if h == 0:
            break
        for target in range(h * W, H * W):
            ranked(widths[h], f[target], order)
            before[:] = 0.0
            for x in range(widths[h - 1]):
                for a in range(A):
                    row = lower[h - 1, x, a], upper[h - 1, x, a]
                    before[x] += policy[h - 1, x, a] * largest(widths[h], row, f[target], order)
            f[target] = before
    return f[:, 0].copy().reshape(H, W)


@compiled
def ranked(size: int, f: Floats, order: Ints) -> None:
    """Successors by f, the largest first."""
    for i in range(size):
        j = i
        while j > 0 and f[order[j - 1]] < f[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@compiled
def largest(size: int, row: tuple[Floats, Floats], f: Floats, order: Ints) -> float:
    """`upper_occupancy.largest` of one row, lower and upper, and one target."""
    (lower, upper), left, best = row, 1.0, 0.0
    for y in range(size):
        left -= lower[y]
    for i in range(size):
        y = order[i]
        more = min(max(left, 0.0), upper[y] - lower[y])
        best += (lower[y] + more) * f[y]
        left -= upper[y] - lower[y]
    return best


@compiled
def play(generator: np.random.Generator, P: Floats, policy: Floats) -> Floats:
    """`adversarial.play`: the same arguments and answer."""
    visited, x = np.zeros(P.shape), 0
    for h in range(len(P)):
        u, w = generator.random(), generator.random()
        a = choice(policy[h, x], u)
        y = choice(P[h, x, a], w)
        visited[h, x, a, y] = 1.0
        x = y
    return visited


@compiled
def choice(p: Floats, u: float) -> int:
    """The first whose running sum exceeds u, the last one at most."""
    i, total = 0, p[0]
    while i < len(p) - 1 and total <= u:
        i += 1
        total += p[i]
    return i
