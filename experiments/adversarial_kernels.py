"""The convex steps of document 004, compiled: `ftrl_step` and `log_barrier_step`.

They take the iterations of `coordinator.learning.adversarial.omd` and `log_barrier`, in the same
letters, on the cells that exist instead of padded arrays, and stop on the same certificates. Sums
are taken in another order, so the answers agree with the references to rounding, not bit by bit
(tests). Arrays are float64 of the shapes that `layered` names.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from coordinator.learning.adversarial import log_barrier, omd
from coordinator.learning.adversarial.confidence import Box
from coordinator.learning.adversarial.layered import Layers
from coordinator.learning.learner import LearnerError
from experiments.kernels import Floats, Ints, compiled

# -- Eq. 3.2, full information ---------------------------------------------------------------------


def ftrl_step(
    layers: Layers,
    box: Box,
    cost: Floats,
    start: Floats | None = None,
    tolerance: float = omd.TOLERANCE,
) -> omd.Step:
    """`omd.ftrl_step`: the same arguments, answer and errors."""
    bounds = omd.Bounds.of(layers, box, cost)
    logs = np.stack((bounds.log_lower, bounds.log_upper))
    v = np.zeros((layers.H + 1, layers.W)) if start is None else start.copy()
    longest = omd.LONGEST_STEP + float(np.ptp(cost)) / 10
    m, p = np.zeros((2, *layers.pairs.shape)), np.zeros((3, *layers.cells.shape))
    m[1], p[1] = -omd.ABSENT, omd.LOG_ZERO
    flows = np.zeros((2, layers.H + 1, layers.W))
    widths = np.array(layers.widths)
    try:
        f, iterations = descend(widths, logs, cost, v, tolerance, longest, m, p, flows)
    except np.linalg.LinAlgError as error:
        raise LearnerError("the FTRL step met a singular system") from error
    point = omd.Point(v, f, (flows[0] - flows[1])[1:-1], m[1], m[0], p[1], p[0], p[2])
    if not point.residual <= max(omd.HOPELESS, tolerance):
        raise LearnerError(f"the FTRL step stopped at flow residual {point.residual:.1e}")
    return omd.answer(layers, cost, point, iterations)


@compiled
def descend(
    widths: Ints,
    logs: Floats,
    cost: Floats,
    v: Floats,
    tolerance: float,
    longest: float,
    m: Floats,
    p: Floats,
    flows: Floats,
) -> tuple[float, int]:
    """The loop of `omd.ftrl_step` in place: v, m = (m, ln m), p = (p, ln p, p on free cells).

    flows (2, H + 1, W) are inflow and outflow of every state; returns f and the number of steps.
    """
    H, W = len(widths) - 1, v.shape[1]
    blocks, step, before = np.zeros((3, H, W, W)), np.zeros((H - 1, W)), v.copy()
    gradient = np.zeros((H - 1, W))
    f = evaluate(widths, logs, cost, v, m, p, flows)
    for iteration in range(omd.MAX_ITERATIONS):
        gradient[:] = flows[0, 1:-1] - flows[1, 1:-1]
        residual = np.abs(gradient).max() if H > 1 else 0.0
        if residual <= tolerance:
            return f, iteration
        derivatives(widths, m[0], p, flows, blocks)
        inflow, outflow = flows[0].copy(), flows[1].copy()
        before[:] = v
        accepted = False
        for attempt in range(1 + len(omd.DAMPING)):
            if attempt == 0:
                step[:] = logarithmic_step(widths, inflow, outflow, blocks)
                step *= min(1.0, longest / max(np.abs(step).max(), omd.TINY))
            else:
                step[:] = damped_step(widths, gradient, blocks, omd.DAMPING[attempt - 1])
            v[1:-1] = before[1:-1] + step
            tried = evaluate(widths, logs, cost, v, m, p, flows)
            slope = (gradient * step).sum()
            left = np.abs(flows[0, 1:-1] - flows[1, 1:-1]).max()
            descends = slope < 0 and tried <= f + 1e-4 * slope + 1e-13 * (1.0 + abs(f))
            if descends or left <= residual / 2:
                f, accepted = tried, True
                break
        if not accepted:
            v[:] = before
            return evaluate(widths, logs, cost, v, m, p, flows), iteration
    return f, omd.MAX_ITERATIONS


@compiled
def evaluate(
    widths: Ints, logs: Floats, cost: Floats, v: Floats, m: Floats, p: Floats, flows: Floats
) -> float:
    """f at v; m, p and flows are overwritten."""
    H, A = len(widths) - 1, cost.shape[2]
    f = 0.0
    flows[:] = 0.0
    for h in range(H):
        n, top = widths[h + 1], -np.inf
        for x in range(widths[h]):
            for a in range(A):
                project_row(n, logs[:, h, x, a], v[h + 1], p[:, h, x, a])
                phi = 0.0
                for y in range(n):
                    phi += p[0, h, x, a, y] * (p[1, h, x, a, y] - v[h + 1, y])
                m[1, h, x, a] = -cost[h, x, a] - v[h, x] - phi
                top = max(top, m[1, h, x, a])
        Z = 0.0
        for x in range(widths[h]):
            for a in range(A):
                m[0, h, x, a] = np.exp(m[1, h, x, a] - top)
                Z += m[0, h, x, a]
        log_Z = top + np.log(Z)
        f += log_Z
        for x in range(widths[h]):
            for a in range(A):
                m[1, h, x, a] -= log_Z
                m[0, h, x, a] /= Z
                flows[1, h, x] += m[0, h, x, a]
                for y in range(n):
                    flows[0, h + 1, y] += m[0, h, x, a] * p[0, h, x, a, y]
    return f


@compiled
def project_row(n: int, logs: Floats, after: Floats, p: Floats) -> None:
    """`omd._project_rows` of one row of n successors: p (3, W) is p, ln p, p on free cells."""
    last = last_break(n, logs, after)
    left, mass, shift = 1.0, 0.0, -omd.ABSENT
    for y in range(n):
        p[2, y] = 0.0
        if logs[1, y] - after[y] <= last:
            left -= np.exp(logs[1, y])
        elif logs[0, y] - after[y] <= last:
            p[2, y] = 1.0
            shift = max(shift, after[y])
        else:
            left -= np.exp(logs[0, y])
    for y in range(n):
        if p[2, y] > 0.0:
            mass += np.exp(after[y] - shift)
    delta = last
    if mass > 0.0:
        delta = max(np.log(max(left, omd.TINY) / max(mass, omd.TINY)) - shift, last)
    for y in range(n):
        p[1, y] = min(max(after[y] + delta, logs[0, y]), logs[1, y])
        p[0, y] = np.exp(p[1, y])
        p[2, y] *= p[0, y]


@compiled
def last_break(n: int, logs: Floats, after: Floats) -> float:
    """The last delta at which a bound starts or ends to hold and the row's sum is at most one."""
    last = -np.inf
    for bound in range(2):
        for y in range(n):
            at, total = logs[bound, y] - after[y], 0.0
            for z in range(n):
                total += np.exp(min(max(after[z] + at, logs[0, z]), logs[1, z]))
            if total <= 1.0:
                last = max(last, at)
    return last


@compiled
def derivatives(widths: Ints, m: Floats, p: Floats, flows: Floats, blocks: Floats) -> None:
    """`omd._Derivatives`: blocks (3, H, W, W) are, at step h, into h + 1, leaving h, and across."""
    inflow, outflow = flows
    blocks[:] = 0.0
    for h in range(len(widths) - 1):
        into, leave, across = blocks[0, h], blocks[1, h], blocks[2, h]
        for x in range(widths[h]):
            leave[x, x] += outflow[h, x]
            for z in range(widths[h]):
                leave[x, z] -= outflow[h, x] * outflow[h, z]
            for y in range(widths[h + 1]):
                across[x, y] += outflow[h, x] * inflow[h + 1, y]
            for a in range(m.shape[2]):
                add_row(widths[h + 1], m[h, x, a], p[0, h, x, a], p[2, h, x, a], into, across[x])
        for y in range(widths[h + 1]):
            for z in range(widths[h + 1]):
                into[y, z] -= inflow[h + 1, y] * inflow[h + 1, z]


@compiled
def add_row(n: int, m: float, p: Floats, free: Floats, into: Floats, across: Floats) -> None:
    """What the row of one pair adds: p moves on free cells only."""
    total = 0.0
    for y in range(n):
        total += free[y]
    share = m / max(total, omd.TINY)
    for y in range(n):
        across[y] -= m * p[y]
        into[y, y] += m * free[y]
        for z in range(n):
            into[y, z] += m * p[y] * p[z] - share * free[y] * free[z]


@compiled
def logarithmic_step(widths: Ints, inflow: Floats, outflow: Floats, blocks: Floats) -> Floats:
    """`omd._logarithmic_step` (H - 1, W)."""
    H, W = len(widths) - 1, inflow.shape[1]
    matrix, target = null_space(widths, W), np.zeros((H - 1, W))
    for h in range(1, H):
        for x in range(W):
            flow, out = max(inflow[h, x], omd.TINY), max(outflow[h, x], omd.TINY)
            if x < widths[h]:
                target[h - 1, x] = np.log(out) - np.log(flow)
            row = (h - 1) * W + x
            for y in range(W):
                matrix[row, (h - 1) * W + y] += blocks[0, h - 1, x, y] / flow
                matrix[row, (h - 1) * W + y] += blocks[1, h, x, y] / out
                if h < H - 1:
                    matrix[row, h * W + y] += blocks[2, h, x, y] / out
                if h > 1:
                    matrix[row, (h - 2) * W + y] += blocks[2, h - 1, y, x] / flow
    target[:] = np.linalg.solve(matrix, target.ravel()).reshape(H - 1, W)
    return target


@compiled
def damped_step(widths: Ints, gradient: Floats, blocks: Floats, damping: float) -> Floats:
    """`omd._damped_step` (H - 1, W)."""
    H, W = len(widths) - 1, gradient.shape[1]
    matrix = null_space(widths, W) + damping * np.eye((H - 1) * W)
    for h in range(1, H):
        for x in range(W):
            row = (h - 1) * W + x
            for y in range(W):
                matrix[row, (h - 1) * W + y] += blocks[0, h - 1, x, y] + blocks[1, h, x, y]
                if h < H - 1:
                    matrix[row, h * W + y] += blocks[2, h, x, y]
                if h > 1:
                    matrix[row, (h - 2) * W + y] += blocks[2, h - 1, y, x]
    step = np.zeros((H - 1, W))
    step[:] = np.linalg.solve(matrix, -gradient.ravel()).reshape(H - 1, W)
    return step


@compiled
def null_space(widths: Ints, W: int) -> Floats:
    """`omd._null_space`."""
    n = len(widths) - 2
    matrix = omd.RIDGE * np.eye(n * W)
    for h in range(n):
        for x in range(W):
            if x >= widths[h + 1]:
                matrix[h * W + x, h * W + x] += 1.0
                continue
            for y in range(widths[h + 1]):
                matrix[h * W + x, h * W + y] += 1.0
    return matrix


# -- Eq. 4.3-4.4, bandit feedback ------------------------------------------------------------------


def log_barrier_step(
    layers: Layers, box: Box, cost: Floats, q: Floats, tolerance: float = log_barrier.GAP
) -> omd.Step:
    """`log_barrier.log_barrier_step`: the same arguments, answer and errors."""
    problem = log_barrier.Problem.of(layers, box, cost, q)
    point = log_barrier.start_at(layers, box, problem, q)
    rows, y = np.stack((point.q, point.s_u, point.s_l, point.z, point.z_u, point.z_l)), point.y
    given = np.stack((problem.c, problem.upper, problem.lower))
    try:
        gap, iterations = follow(*_numbers(layers), given, rows, y, tolerance)
    except np.linalg.LinAlgError as error:
        raise LearnerError("the log-barrier step met a singular system") from error
    if not np.isfinite(gap) or iterations == log_barrier.MAX_ITERATIONS:
        raise LearnerError(f"the log-barrier step stopped at a gap of {gap:.1e}")
    return log_barrier.answer(layers, rows[0], gap, iterations)


@lru_cache(maxsize=64)
def _numbers(layers: Layers) -> tuple[Ints, Ints, Ints]:
    """Of every row: successors, its state, and the first state of the next layer (-1: x_H)."""
    h, x, _ = np.nonzero(layers.pairs)
    widths = np.array(layers.widths)
    first = np.cumsum(widths) - widths
    after = np.where(h + 1 < layers.H, first[h + 1], -1)
    return widths[h + 1], first[h] + x, after


@compiled
def follow(
    sizes: Ints, own: Ints, after: Ints, given: Floats, rows: Floats, y: Floats, tolerance: float
) -> tuple[float, int]:
    """The loop of `log_barrier_step` in place: given = (c, upper, lower), rows = (q, s_u, s_l, z,
    z_u, z_l), each (R, W); the gap and the number of steps.
    """
    sigma, change = 0.1, np.zeros(rows.shape)
    count = sizes.sum()
    for iteration in range(log_barrier.MAX_ITERATIONS):
        gap, mu = duality_gap(sizes, own, after, given, rows, y), 0.0
        for i in range(len(sizes)):
            for w in range(sizes[i]):
                mu += rows[1, i, w] * rows[4, i, w] + rows[2, i, w] * rows[5, i, w]
        mu /= 2 * count
        if not (gap > tolerance and mu > log_barrier.ROUNDING):
            return gap, iteration
        moved = newton(sizes, own, after, given, rows, sigma * mu, change)
        t, u = longest(sizes, rows[:3], change[:3]), longest(sizes, rows[3:], change[3:])
        rows[:3] += t * change[:3]
        rows[3:] += u * change[3:]
        y += u * (moved - y)
        sigma = min(0.5, max(0.01, (1 - min(t, u)) ** 2))
    return gap, log_barrier.MAX_ITERATIONS


@compiled
def pull(own: int, after: int, w: int, y: Floats) -> float:
    """A^T y at one cell."""
    return float(y[own] - (y[after + w] if after >= 0 else 0.0))


@compiled
def duality_gap(
    sizes: Ints, own: Ints, after: Ints, given: Floats, rows: Floats, y: Floats
) -> float:
    """`log_barrier.Problem.gap`."""
    gap = float(y[0])
    for i in range(len(sizes)):
        row = 0.0
        for w in range(sizes[i]):
            row += given[2, i, w] * rows[5, i, w] - given[1, i, w] * rows[4, i, w]
        for w in range(sizes[i]):
            z = given[0, i, w] + (rows[4, i, w] - rows[5, i, w] + row)
            z += pull(own[i], after[i], w, y)
            if z <= 0:
                return np.inf
            q = rows[0, i, w]
            gap += given[0, i, w] * q - np.log(q) - 1 - np.log(z)
    return gap


@compiled
def newton(
    sizes: Ints, own: Ints, after: Ints, given: Floats, rows: Floats, mu: float, change: Floats
) -> Floats:
    """One Newton step towards mu: `change` of rows, and the new y (S,)."""
    R, W = given.shape[1:]
    inverses, g = np.zeros((R, W, W)), np.zeros((R, W))
    S = own[-1] + 1
    matrix, target = np.zeros((S, S)), np.zeros(S)
    target[0] = -1.0
    for i in range(R):
        n = sizes[i]
        gradient(n, given[:, i], rows[:, i], mu, g[i])
        invert(n, given[:, i], rows[:, i], inverses[i])
        add_to_schur(n, own[i], after[i], inverses[i], g[i], rows[0, i], matrix, target)
    y = np.linalg.solve(matrix, target)
    for i in range(R):
        for w in range(sizes[i]):
            g[i, w] += pull(own[i], after[i], w, y)
        change_row(sizes[i], given[:, i], rows[:, i], mu, inverses[i], g[i], change[:, i])
    return y


@compiled
def gradient(n: int, given: Floats, row: Floats, mu: float, g: Floats) -> None:
    """The barrier's gradient of a row, without A^T y."""
    shared = 0.0
    for w in range(n):
        shared += given[2, w] * (mu / row[2, w]) - given[1, w] * (mu / row[1, w])
    for w in range(n):
        g[w] = given[0, w] - 1 / row[0, w] + (mu / row[1, w] - mu / row[2, w] + shared)


@compiled
def invert(n: int, given: Floats, row: Floats, inverse: Floats) -> None:
    """`log_barrier._inverse` of `_row_hessian`: Gauss-Jordan on a unit diagonal."""
    total, matrix, scale = 0.0, np.zeros((n, n)), np.zeros(n)
    for w in range(n):
        D_u, D_l = row[4, w] / row[1, w], row[5, w] / row[2, w]
        total += D_u * given[1, w] ** 2 + D_l * given[2, w] ** 2
        cross = D_u * given[1, w] + D_l * given[2, w]
        matrix[w, w] += row[3, w] / row[0, w] + D_u + D_l
        for v in range(n):
            matrix[w, v] -= cross
            matrix[v, w] -= cross
    for w in range(n):
        scale[w] = 1 / np.sqrt(matrix[w, w] + total)
    for w in range(n):
        for v in range(n):
            matrix[w, v] = (matrix[w, v] + total) * (scale[w] * scale[v])
        matrix[w, w] += 1e-15
    for k in range(n):
        pivot, matrix[k, k] = matrix[k, k], 1.0
        for v in range(n):
            matrix[k, v] /= pivot
        for w in range(n):
            if w != k:
                factor, matrix[w, k] = matrix[w, k], 0.0
                for v in range(n):
                    matrix[w, v] -= factor * matrix[k, v]
    for w in range(n):
        for v in range(n):
            inverse[w, v] = matrix[w, v] * scale[w] * scale[v]


@compiled
def add_to_schur(
    n: int,
    own: int,
    after: int,
    inverse: Floats,
    g: Floats,
    q: Floats,
    matrix: Floats,
    target: Floats,
) -> None:
    """One row's part of A R A^T and of A q - A R g."""
    for w in range(n):
        sums, moved = 0.0, q[w]
        for v in range(n):
            sums += inverse[w, v]
            moved -= inverse[w, v] * g[v]
        matrix[own, own] += sums
        target[own] += moved
        if after >= 0:
            matrix[own, after + w] -= sums
            matrix[after + w, own] -= sums
            target[after + w] -= moved
            for v in range(n):
                matrix[after + w, after + v] += inverse[w, v]


@compiled
def change_row(
    n: int, given: Floats, row: Floats, mu: float, inverse: Floats, pulled: Floats, change: Floats
) -> None:
    """dq = -R (g + A^T y) of a row, and what follows for slacks and duals."""
    dm = 0.0
    for w in range(n):
        change[0, w] = 0.0
        for v in range(n):
            change[0, w] -= inverse[w, v] * pulled[v]
        dm += change[0, w]
    for w in range(n):
        dq = change[0, w]
        change[1, w], change[2, w] = given[1, w] * dm - dq, dq - given[2, w] * dm
        change[3, w] = 1 / row[0, w] - row[3, w] - row[3, w] / row[0, w] * dq
        for s, z in ((1, 4), (2, 5)):
            change[z, w] = mu / row[s, w] - row[z, w] - row[z, w] / row[s, w] * change[s, w]


@compiled
def longest(sizes: Ints, values: Floats, steps: Floats) -> float:
    """`log_barrier._length`."""
    worst = 0.0
    for k in range(len(values)):
        for i in range(len(sizes)):
            for w in range(sizes[i]):
                worst = max(worst, -steps[k, i, w] / values[k, i, w])
    return min(1.0, log_barrier.STAY / worst) if worst > 0 else 1.0
