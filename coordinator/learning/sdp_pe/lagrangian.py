"""Planning under constraints on values, for an active set kept as inequalities (`active`).

For rewards r_0 in a model P_0, find a deterministic policy of large V_0(pi) among those with

    V_b(pi) >= t_b  for all b,    pi_h(x) one of the allowed actions,

where every V_b is a value in its own model (P_b, r_b). Let j be the constraint that the
unconstrained optimum violates most, and lambda its multiplier. A backward induction takes the
action of largest Q_0 + lambda Q_j at every (h, x). The next lambda is the slope of the chord
between the best feasible and the last infeasible point in the (V_j, V_0) plane.

- If P_0 = P_j, this is Lagrangian relaxation of the linear program over occupancy measures of P_0
  with one constraint. After finitely many steps, the chords end at the optimal multiplier, where

      D(lambda) = max_pi V_0(pi) + lambda (V_j(pi) - t_j)

  is the linear program's value.
- If P_0 and P_j differ, the induction is a heuristic and D bounds nothing. Backward induction
  cannot solve this problem, because the best action depends on the history.

Policies are returned only if their exact values satisfy the constraints. After its last multiplier,
the search changes single actions. If pi takes another action a at (h, x), V_b changes by exactly
d_b(h, x) (Q_b(h, x, a) - V_b(h, x)). Here d_b(h, x) is the probability of x at step h. All
computations treat T objectives r_0 with one P_0 at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from riffle.coordinator.learning.learner import BoolArray, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model

MOST_CHORDS = 12
CONVERGED = 1e-10
LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Solution:
    """For each of T objectives: a policy within the constraints, its value, and the dual optimum.

    The value is minus infinity if no policy within the constraints was found.
    """

    policy: PolicyArray
    value: FloatArray
    dual: FloatArray


@dataclass(frozen=True, slots=True)
class Constraints:
    """Policies must take allowed `actions`, and must have a value of at least t[b] in model b.

    The k models have transitions P (k, H, X, A, X) and rewards r (k, H, X, A). t is (k,).
    """

    P: FloatArray
    r: FloatArray
    t: FloatArray
    actions: BoolArray
    d1: FloatArray

    @classmethod
    def of(
        cls, models: Sequence[Model], t: Sequence[float], actions: BoolArray, d1: FloatArray
    ) -> Constraints:
        """Returns the constraints of these models, stacked."""
        P, r = np.stack([m.P for m in models]), np.stack([m.r for m in models])
        return cls(P, r, np.array(t), actions, d1)


@dataclass(frozen=True, slots=True)
class Points:
    """T policies (T, H, X). `values` (k + 1, T) has the objective V_0 and k constrained values."""

    policy: PolicyArray
    values: FloatArray

    def put(self, where: NDArray[np.int64], other: Points, chosen: BoolArray) -> None:
        """For every i in the mask `chosen`, copies point i of `other` to the place `where[i]`."""
        self.policy[where[chosen]] = other.policy[chosen]
        self.values[:, where[chosen]] = other.values[:, chosen]

    def take(self, chosen: NDArray[np.int64] | BoolArray) -> Points:
        """Returns a copy of the points that `chosen` selects, as indices or as a mask."""
        return Points(self.policy[chosen], self.values[:, chosen])


def maximise(
    P: FloatArray,
    r: FloatArray,
    constraints: Constraints,
    anchor: PolicyArray,
    *,
    deviations: int,
    tie: float = 0.0,
    starts: Sequence[PolicyArray] = (),
) -> Solution:
    """Returns a policy of large value V_0 in P (H, X, A, X) for each of T rewards r (T, H, X, A).

    If `anchor` (H, X) satisfies the constraints, every result is at least as good as `anchor`.
    `starts` has arrays (T, H, X) of policies. Result t is also at least as good as policy t of each
    array, if that policy satisfies the constraints. The search tries Lagrange multipliers, then at
    most `deviations` rounds of single deviations. To break ties of V_0, the unconstrained search
    maximises V_0 + `tie` V_k, where V_k is the last constraint's value.
    """
    stack = replace(constraints, P=np.concatenate([P[None], constraints.P]))
    newest = np.full(len(r), len(constraints.t) - 1)
    free = _induce(stack, r, np.full(len(r), tie), newest)
    best = _evaluate(stack, r, np.repeat(anchor[None], len(r), axis=0))
    best.values[0, ~_feasible(stack, best)] = -np.inf
    everything = np.arange(len(r))
    for other in [*(_evaluate(stack, r, start) for start in starts), free]:
        better = other.values[0] >= best.values[0]
        best.put(everything, other, _feasible(stack, other) & better)
    dual = free.values[0].copy()
    unsolved = everything[~_feasible(stack, free)]
    if unsolved.size:
        _follow_chords(stack, r, free, best, dual, unsolved)
        _deviate(stack, r, best, unsolved, deviations)
    return Solution(best.policy, best.values[0], dual)


def _follow_chords(
    stack: Constraints,
    r: FloatArray,
    free: Points,
    best: Points,
    dual: FloatArray,
    unsolved: NDArray[np.int64],
) -> None:
    """Improves `best` and `dual` of the `unsolved` objectives by a search over multipliers."""
    outside = free.take(unsolved)
    j = (stack.t[:, None] - outside.values[1:]).argmax(axis=0)
    for _ in range(MOST_CHORDS):
        rise = outside.values[0] - best.values[0, unsolved]
        run = best.values[1 + j, unsolved] - outside.values[1 + j, np.arange(unsolved.size)]
        going = (rise > CONVERGED) & (run > CONVERGED)
        unsolved, j, rise, run = unsolved[going], j[going], rise[going], run[going]
        outside = outside.take(going)
        if not unsolved.size:
            return
        row, multiplier = np.arange(unsolved.size), np.minimum(rise / run, LARGEST)
        point = _induce(stack, r[unsolved], multiplier, j)
        V_j = point.values[1 + j, row]
        bound = point.values[0] + multiplier * (V_j - stack.t[j])
        dual[unsolved] = np.minimum(dual[unsolved], bound)
        chord = outside.values[0] + multiplier * outside.values[1 + j, row]
        beyond = point.values[0] + multiplier * V_j > chord + CONVERGED * (1 + np.abs(chord))
        inside = _feasible(stack, point)
        best.put(unsolved, point, inside & (point.values[0] > best.values[0, unsolved]))
        outside.put(row, point, ~inside)
        unsolved, j, outside = unsolved[beyond], j[beyond], outside.take(beyond)


def _deviate(
    stack: Constraints, r: FloatArray, best: Points, unsolved: NDArray[np.int64], rounds: int
) -> None:
    """Raises the objectives V_0 of `unsolved` problems by feasible changes of single actions."""
    for _ in range(rounds):
        if not unsolved.size:
            return
        policy = best.policy[unsolved]
        gain = _gains(stack, r[unsolved], policy)
        after = best.values[1:, unsolved, None, None, None] + gain[1:]
        allowed = np.all(after >= stack.t[:, None, None, None, None], axis=0)
        gain_0 = np.where(allowed & stack.actions, gain[0], 0.0).reshape(unsolved.size, -1)
        better = gain_0.max(axis=1) > CONVERGED
        h, x, a = np.unravel_index(gain_0.argmax(axis=1)[better], stack.actions.shape)
        unsolved, policy = unsolved[better], policy[better]
        policy[np.arange(unsolved.size), h, x] = a
        if unsolved.size:
            points = _evaluate(stack, r[unsolved], policy)
            best.put(unsolved, points, _feasible(stack, points))


def _feasible(stack: Constraints, points: Points) -> BoolArray:
    return np.asarray((points.values[1:] >= stack.t[:, None]).all(axis=0))


def _induce(
    stack: Constraints, r: FloatArray, multiplier: FloatArray, j: NDArray[np.int64]
) -> Points:
    """Returns policies greedy in the objective's Q_0 plus `multiplier` times constraint j's Q_j."""
    T, H, X, _ = r.shape
    policy = np.empty((T, H, X), dtype=np.int64)
    V = np.zeros((len(stack.P), T, X))
    weight, row = multiplier[:, None, None], np.arange(T)
    for h in reversed(range(H)):
        Q = _backup(stack, r, V, h)
        score = np.where(stack.actions[h], Q[0] + weight * Q[1 + j, row], -np.inf)
        policy[:, h] = score.argmax(axis=-1)
        V = _take(Q, policy[:, h])
    return Points(policy, V @ stack.d1)


def _backup(stack: Constraints, r: FloatArray, V: FloatArray, h: int) -> FloatArray:
    """Returns Q_h (k + 1, T, X, A) from V_{h+1} (k + 1, T, X): T objectives in k + 1 models."""
    _, T, X = V.shape
    rows = stack.P[:, h].reshape(len(V), -1, X)
    Q: FloatArray = (V @ rows.transpose(0, 2, 1)).reshape(len(V), T, X, -1)
    Q[0] += r[:, h]
    Q[1:] += stack.r[:, None, h]
    return Q


def _take(Q: FloatArray, actions: PolicyArray) -> FloatArray:
    """Returns Q (models, T, X, A) at `actions` (T, X) of T policies, in shape (models, T, X)."""
    return np.take_along_axis(Q, actions[None, ..., None], axis=-1)[..., 0]


def _evaluate(stack: Constraints, r: FloatArray, policy: PolicyArray) -> Points:
    """Returns T policies (T, H, X) with their values, in the objective and in each constraint."""
    V = np.zeros((len(stack.P), *policy[:, 0].shape))
    for h in reversed(range(policy.shape[1])):
        V = _take(_backup(stack, r, V, h), policy[:, h])
    return Points(policy.copy(), V @ stack.d1)


def _gains(stack: Constraints, r: FloatArray, policy: PolicyArray) -> FloatArray:
    """Returns how V_0..V_k of T policies change if they take a at (h, x): (k + 1, T, H, X, A)."""
    T, H, X, A = r.shape
    gains = np.empty((len(stack.P), T, H, X, A))
    V = np.zeros((len(stack.P), T, X))
    for h in reversed(range(H)):
        Q = _backup(stack, r, V, h)
        V = _take(Q, policy[:, h])
        gains[:, :, h] = Q - V[..., None]
    d = np.broadcast_to(stack.d1, (len(stack.P), T, X))
    for h in range(H):
        gains[:, :, h] *= d[..., None]
        taken = d[..., None] * (policy[:, h, :, None] == np.arange(A))
        d = taken.reshape(len(d), T, -1) @ stack.P[:, h].reshape(len(d), -1, X)
    return gains
