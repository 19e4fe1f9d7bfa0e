"""Solves the step of Private-UC-O-REPS (Eq. 3.2 and C.2 of 004) through a reduced dual problem.

    min over q in Delta(P_k) of   <cost, q> + sum q ln q,      cost = eta L~(x, a).

Write q(x,a,x') = m(x,a) p(x'|x,a) with p in the box lower <= p <= upper of (x,a). The flow
multipliers v have one free number for each inner state, and v(x_0) = v(x_H) = 0. If v is fixed,
every p(.|x,a) is an entropic projection on its box,

    phi(x,a) = min_p sum_x' p(x') (ln p(x') - v(x')),
    p(x') = clip(exp(v(x') + delta), lower, upper),   delta such that p sums to one,

and every layer is a soft minimum. The remaining problem is unconstrained,

    min_v f(v) = sum_h ln Z_h,   Z_h = sum_{x in X_h, a} exp(-cost(x,a) - v(x) - phi(x,a)),
    m(x,a) = exp(-cost - v(x) - phi) / Z_h,         gradient = inflow(x) - outflow(x),

and f is convex. Newton's method is applied to ln inflow = ln outflow, which is nearly linear in v
even far from the solution. The residual is the largest |inflow - outflow|. If a step neither
decreases f nor halves the residual, damped Newton steps on f are tried. All steps use the
derivatives of inflow and outflow with the active bounds held fixed. Adding a constant to v on a
layer changes nothing. So a matrix of ones is added to every layer's block, which makes Newton's
matrix invertible.

Computing delta: sum_x' clip(exp(v + delta), lower, upper) grows with delta. The form of the sum
changes at the 2 W breakpoints ln lower - v and ln upper - v. The last breakpoint at which this sum
is at most 1 tells which cells are not clipped (free). The free cells give delta in closed form. A
bound of zero counts as exp(LOG_ZERO), so that q has a logarithm everywhere.

Certificate. The dual's q violates the equations of flow by the residual. So the answer is the
occupancy measure of the policy and transitions that this q induces. gap = (the answer's objective)
+ f(v) >= 0 bounds how far the answer's objective is from the minimum. By Pinsker's inequality, the
answer q and the minimiser q* satisfy sum_h ||q - q*||_1^2 <= 2 gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import FloatArray, LearnerError
from riffle.coordinator.learning.planning import Floats, Ints, compiled

TOLERANCE = 1e-7  # largest flow residual, in probability
LOG_ZERO = -1e5
MAX_ITERATIONS = 500
HOPELESS = 1e-4
ABSENT = 1e12  # -ABSENT is below every dual value
RIDGE = 1e-10
DAMPING = tuple(10.0**power for power in range(-6, 3))
LONGEST_STEP = 100.0  # largest change of v; a tenth of the cost's range is added
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Step:
    """An occupancy measure `q` (H, W, A, W), 004's q_{k+1} in Delta(P_{k+1}), and its certificate.

    `policy` (H, W, A) and `transitions` (H, W, A, W) are induced by q. `log_q` is the logarithm of
    q, finite even if q underflows (-inf on padding). `residual` is the largest |inflow - outflow|
    before the answer was made feasible. `gap` bounds how far the objective is from its optimum. `v`
    has the dual values from which the next step starts (empty if the method has none).
    """

    q: FloatArray
    log_q: FloatArray
    policy: FloatArray
    transitions: FloatArray
    residual: float
    gap: float
    iterations: int
    v: FloatArray


def ftrl_step(
    layers: Layers,
    box: Box,
    cost: FloatArray,
    start: FloatArray | None = None,
    tolerance: float = TOLERANCE,
) -> Step:
    """Returns the next occupancy measure. `cost` (H, W, A) is eta times the noisy losses L~.

    W is the size of the largest layer. The dual values start at `start` (H + 1, W) or at 0. If
    rounding keeps the residual above `tolerance` (as with costs beyond 10^3), the search stops.
    Raises LearnerError if the residual stays above HOPELESS, or a linear system is singular.
    """
    v = np.zeros((layers.H + 1, layers.W)) if start is None else start.copy()
    try:
        q, log_q, policy, transitions, residual, gap, iterations = solve(
            np.array(layers.widths), box.lower, box.upper, cost, v, tolerance
        )
    except np.linalg.LinAlgError as error:
        raise LearnerError("the FTRL step met a singular system") from error
    if not residual <= max(HOPELESS, tolerance):
        raise LearnerError(f"the FTRL step stopped at flow residual {residual:.1e}")
    return Step(q, log_q, policy, transitions, residual, gap, iterations, v)


@compiled
def solve(
    widths: Ints, lower: Floats, upper: Floats, cost: Floats, v: Floats, tolerance: float
) -> tuple[Floats, Floats, Floats, Floats, float, float, int]:
    """Runs `ftrl_step` without its checks of the answer; overwrites v.

    Returns q, log_q, policy, transitions, residual, gap and the number of iterations.
    """
    H, W, A = cost.shape
    logs, m, p = np.zeros((2, H, W, A, W)), np.zeros((2, H, W, A)), np.zeros((3, H, W, A, W))
    flows = np.zeros((2, H + 1, W))
    logs[0] = np.where(lower > 0.0, np.log(np.maximum(lower, TINY)), LOG_ZERO)
    logs[1] = np.where(upper > 0.0, np.log(np.maximum(upper, TINY)), LOG_ZERO)
    longest = LONGEST_STEP + (cost.max() - cost.min()) / 10
    f, iterations = descend(widths, logs, cost, v, tolerance, longest, m, p, flows)
    residual = np.abs(flows[0, 1:-1] - flows[1, 1:-1]).max() if H > 1 else 0.0
    q, log_q, policy = np.zeros((H, W, A, W)), np.full((H, W, A, W), -np.inf), np.zeros((H, W, A))
    gap = f + answer(widths, cost, m[1], p, q, log_q, policy)
    return q, log_q, policy, p[0].copy(), residual, gap, iterations


@compiled
def answer(
    widths: Ints, cost: Floats, log_m: Floats, p: Floats, q: Floats, log_q: Floats, policy: Floats
) -> float:
    """Writes the answer (see the module) to q, log_q and policy; returns the answer's objective."""
    H, W, A = cost.shape
    visits, objective = np.zeros((H + 1, W)), 0.0
    visits[0, 0] = 1.0
    for h in range(H):
        for x in range(widths[h]):
            top, total = log_m[h, x].max(), 0.0
            for a in range(A):
                policy[h, x, a] = np.exp(log_m[h, x, a] - top)
                total += policy[h, x, a]
            for a in range(A):
                policy[h, x, a] /= total
                here = visits[h, x] * policy[h, x, a]
                for y in range(widths[h + 1]):
                    flow = here * p[0, h, x, a, y]
                    q[h, x, a, y], log_q[h, x, a, y] = flow, log_m[h, x, a] + p[1, h, x, a, y]
                    visits[h + 1, y] += flow
                    objective += flow * (cost[h, x, a] + np.log(max(flow, TINY)))
    return objective


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
    """Minimises the dual function f over `v`. Returns f and the number of iterations.

    Overwrites `v`, `m`, `p` and `flows`. The module's docstring defines f, m and p. `m` gets m and
    ln m. `p` gets p, ln p, and p on free cells only. `flows` gets the inflow and outflow of every
    state. If neither Newton's step nor a damped step helps, the search stops.
    """
    H, W = len(widths) - 1, v.shape[1]
    blocks, step, before = np.zeros((3, H, W, W)), np.zeros((H - 1, W)), v.copy()
    gradient, ones = np.zeros((H - 1, W)), np.ones((H + 1, W))
    f = evaluate(widths, logs, cost, v, m, p, flows)
    for iteration in range(MAX_ITERATIONS):
        gradient[:] = flows[0, 1:-1] - flows[1, 1:-1]
        residual = np.abs(gradient).max() if H > 1 else 0.0
        if residual <= tolerance:
            return f, iteration
        derivatives(widths, m[0], p, flows, blocks)
        inflow, outflow = np.maximum(flows[0], TINY), np.maximum(flows[1], TINY)
        before[:] = v
        accepted = False
        for attempt in range(1 + len(DAMPING)):
            if attempt == 0:
                target = np.log(outflow[1:-1]) - np.log(inflow[1:-1])
                step[:] = newton_step(widths, target, blocks, inflow, outflow, 0.0)
                step *= min(1.0, longest / max(np.abs(step).max(), TINY))
            else:
                damping = DAMPING[attempt - 1]
                step[:] = newton_step(widths, -gradient, blocks, ones, ones, damping)
            v[1:-1] = before[1:-1] + step
            trial = evaluate(widths, logs, cost, v, m, p, flows)
            slope = (gradient * step).sum()
            rest = np.abs(flows[0, 1:-1] - flows[1, 1:-1]).max()
            descends = slope < 0 and trial <= f + 1e-4 * slope + 1e-13 * (1.0 + abs(f))
            if descends or rest <= residual / 2:
                f, accepted = trial, True
                break
        if not accepted:
            v[:] = before
            return evaluate(widths, logs, cost, v, m, p, flows), iteration
    return f, MAX_ITERATIONS


@compiled
def evaluate(
    widths: Ints, logs: Floats, cost: Floats, v: Floats, m: Floats, p: Floats, flows: Floats
) -> float:
    """Returns the dual function f at `v`; overwrites `m`, `p` and `flows` (see `descend`)."""
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
    """Projects a row of n successors on its box. `after` (W,) has the dual values v(x').

    `logs` (2, W) are the logarithms of the bounds. The rows of `p` (3, W) get the projected
    probabilities, their logarithms, and the probabilities with zeros on cells that are not free.
    """
    last = last_break(n, logs, after)
    rest, mass, shift = 1.0, 0.0, -ABSENT
    for y in range(n):
        p[2, y] = 0.0
        if logs[1, y] - after[y] <= last:
            rest -= np.exp(logs[1, y])
        elif logs[0, y] - after[y] <= last:
            p[2, y] = 1.0
            shift = max(shift, after[y])
        else:
            rest -= np.exp(logs[0, y])
    for y in range(n):
        if p[2, y] > 0.0:
            mass += np.exp(after[y] - shift)
    delta = last
    if mass > 0.0:
        delta = max(np.log(max(rest, TINY) / max(mass, TINY)) - shift, last)
    for y in range(n):
        p[1, y] = min(max(after[y] + delta, logs[0, y]), logs[1, y])
        p[0, y] = np.exp(p[1, y])
        p[2, y] *= p[0, y]


@compiled
def last_break(n: int, logs: Floats, after: Floats) -> float:
    """Returns the last breakpoint at which the sum in delta (see the module) is at most one."""
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
    """Writes derivatives of inflow and outflow by the flow multipliers v to `blocks` (3, H, W, W).

    A subscript h means layer h. For step h, the blocks are

    - `into`: d inflow_{h+1} / d v_{h+1};
    - `leave`: -d outflow_h / d v_h;
    - `across`: -d outflow_h / d v_{h+1}. Its transpose is d inflow_{h+1} / d v_h.
    """
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
    """Adds the terms of one pair (x, a) to the blocks `into` and `across` of `derivatives`.

    Only the free cells of the pair's row p can change. On these cells, the derivative of p with
    respect to v is diag(p) - p p^T / sum p.
    """
    total = 0.0
    for y in range(n):
        total += free[y]
    share = m / max(total, TINY)
    for y in range(n):
        across[y] -= m * p[y]
        into[y, y] += m * free[y]
        for z in range(n):
            into[y, z] += m * p[y] * p[z] - share * free[y] * free[z]


@compiled
def newton_step(
    widths: Ints, target: Floats, blocks: Floats, inflow: Floats, outflow: Floats, damping: float
) -> Floats:
    """Returns Newton's step (H - 1, W) of the multipliers v; `blocks` are the flows' derivatives.

    If `inflow` and `outflow` are the flows, the step is for ln inflow = ln outflow. If both are one
    and `target` is -gradient, it is -(Hessian of f + damping)^-1 gradient. Padding states get 0.
    """
    H, W = len(widths) - 1, inflow.shape[1]
    matrix, step = null_space(widths, W) + damping * np.eye((H - 1) * W), np.zeros((H - 1, W))
    for h in range(1, H):
        for x in range(W):
            into, out, row = inflow[h, x], outflow[h, x], (h - 1) * W + x
            if x < widths[h]:
                step[h - 1, x] = target[h - 1, x]
            for y in range(W):
                matrix[row, (h - 1) * W + y] += blocks[0, h - 1, x, y] / into
                matrix[row, (h - 1) * W + y] += blocks[1, h, x, y] / out
                if h < H - 1:
                    matrix[row, h * W + y] += blocks[2, h, x, y] / out
                if h > 1:
                    matrix[row, (h - 2) * W + y] += blocks[2, h - 1, y, x] / into
    step[:] = np.linalg.solve(matrix, step.ravel()).reshape(H - 1, W)
    return step


@compiled
def null_space(widths: Ints, W: int) -> Floats:
    """Returns a matrix (n W, n W) that makes the Newton matrix regular; there are n inner layers.

    A constant added to a layer's multipliers changes no flow, so each layer has a block of ones. A
    state that only pads a layer to W states has a 1 on the diagonal. A small ridge is added.
    """
    n = len(widths) - 2
    matrix = RIDGE * np.eye(n * W)
    for h in range(n):
        for x in range(W):
            if x >= widths[h + 1]:
                matrix[h * W + x, h * W + x] += 1.0
                continue
            for y in range(widths[h + 1]):
                matrix[h * W + x, h * W + y] += 1.0
    return matrix
