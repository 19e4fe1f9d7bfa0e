"""Planning under value constraints: the linear step over an implicit active set.

For rewards r_0 in a model P_0, find a deterministic policy of large V_0(pi) among those with

    V_b(pi) >= t_b  for all b,    pi_h(x) one of the allowed actions,

where every V_b is a value in a model (P_b, r_b) of its own. One backward induction serves a
multiplier lambda on the constraint j that the unconstrained optimum violates most: at every (h, x)
it takes the action of largest Q_0 + lambda Q_j, and Q_0, Q_1, ... are each continued in their own
model, so that it also returns the exact V_0(pi), V_1(pi), .... The next lambda is the slope of the
chord between the best feasible point and the infeasible one in the (V_j, V_0) plane.

- When P_0 = P_j this is Lagrangian relaxation of the linear program over occupancy measures of P_0
  with one constraint. The chords end, after finitely many steps, at its optimal multiplier, where

      D(lambda) = max_pi V_0(pi) + lambda (V_j(pi) - t_j)

  is the LP's value. The LP's optimum mixes the two ends of the last chord; only one of them is
  feasible, and that one is returned.
- When P_0 and P_j differ, the joint problem is that of a multi-model MDP: no backward induction
  solves it (its optimum depends on which model is true, hence on the history), and D bounds
  nothing. The induction is then a heuristic; what it returns is feasible, as values are exact.

Then single deviations: changing pi at one (h, x) to a changes V_b by exactly
d_b(h, x) (Q_b(h, x, a) - V_b(h, x)), so the feasible one that raises V_0 most is found at once, and
repeated. All of it is batched over objectives r_0 that share P_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.planning import BoolArray
from riffle.coordinator.learning.sdp_pe.enumeration import Model

MOST_CHORDS = 12
CONVERGED = 1e-10
LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Constrained:
    """Policies (T, H, X) within the constraints, their V_0 (T,), and the least D(lambda) (T,).

    V_0 is minus infinity where no policy within the constraints was found.
    """

    policy: PolicyArray
    value: FloatArray
    dual: FloatArray


@dataclass(frozen=True, slots=True)
class Constraints:
    """k models P (k, H, X, A, X), r (k, H, X, A) with thresholds t (k,), and allowed actions."""

    P: FloatArray
    r: FloatArray
    t: FloatArray
    actions: BoolArray
    d1: FloatArray

    @classmethod
    def of(
        cls, models: Sequence[Model], t: Sequence[float], actions: BoolArray, d1: FloatArray
    ) -> Constraints:
        """Stack models."""
        P, r = np.stack([m.P for m in models]), np.stack([m.r for m in models])
        return cls(P, r, np.array(t), actions, d1)


@dataclass(frozen=True, slots=True)
class Points:
    """T policies (T, H, X) with V_0, V_1, ..., V_k: values (k + 1, T)."""

    policy: PolicyArray
    values: FloatArray

    def put(self, where: NDArray[np.int64], other: Points, chosen: BoolArray) -> None:
        """Overwrite the points `where[chosen]` by `other[chosen]`."""
        self.policy[where[chosen]] = other.policy[chosen]
        self.values[:, where[chosen]] = other.values[:, chosen]


def maximise(
    P: FloatArray,
    r: FloatArray,
    constraints: Constraints,
    anchor: PolicyArray,
    *,
    deviations: int,
    tie: float = 0.0,
    starts: Sequence[PolicyArray] = (),
) -> Constrained:
    """Policies of large V_0 for P (H, X, A, X) and rewards r (T, H, X, A).

    The answer is never worse than `anchor` (H, X) and each of `starts` (T, H, X), as far as these
    satisfy the constraints. At most
    `deviations` rounds of single deviations follow the multipliers. `tie` is the weight of the last
    constraint's value where V_0 does not care; V_0 loses at most as much.
    """
    stack = replace(constraints, P=np.concatenate([P[None], constraints.P]))
    newest = np.full(len(r), len(constraints.t) - 1)
    free = _induce(stack, r, np.full(len(r), tie), newest)
    kept = _evaluated(stack, r, np.repeat(anchor[None], len(r), axis=0))
    kept.values[0, ~_feasible(stack, kept)] = -np.inf
    everyone = np.arange(len(r))
    for other in [*(_evaluated(stack, r, start) for start in starts), free]:
        kept.put(everyone, other, _feasible(stack, other) & (other.values[0] >= kept.values[0]))
    dual = free.values[0].copy()
    left = everyone[~_feasible(stack, free)]
    if left.size:
        _chords(stack, r, free, kept, dual, left)
        _deviate(stack, r, kept, left, deviations)
    return Constrained(kept.policy, kept.values[0], dual)


def _chords(
    stack: Constraints,
    r: FloatArray,
    free: Points,
    kept: Points,
    dual: FloatArray,
    left: NDArray[np.int64],
) -> None:
    """Move `kept` and `dual` of the problems `left` along chords; `free` is where they start."""
    outside = Points(free.policy[left], free.values[:, left])
    j = (stack.t[:, None] - outside.values[1:]).argmax(axis=0)
    for _ in range(MOST_CHORDS):
        row = np.arange(left.size)
        rise = outside.values[0] - kept.values[0, left]
        run = kept.values[1 + j, left] - outside.values[1 + j, row]
        going = (rise > CONVERGED) & (run > CONVERGED)
        left, j, rise, run = left[going], j[going], rise[going], run[going]
        outside = Points(outside.policy[going], outside.values[:, going])
        if not left.size:
            return
        multiplier = np.minimum(rise / run, LARGEST)
        found = _induce(stack, r[left], multiplier, j)
        V_j = found.values[1 + j, np.arange(left.size)]
        dual[left] = np.minimum(dual[left], found.values[0] + multiplier * (V_j - stack.t[j]))
        chord = outside.values[0] + multiplier * outside.values[1 + j, np.arange(left.size)]
        beyond = found.values[0] + multiplier * V_j > chord + CONVERGED * (1 + np.abs(chord))
        inside = _feasible(stack, found)
        kept.put(left, found, inside & (found.values[0] > kept.values[0, left]))
        outside.put(np.arange(left.size), found, ~inside)
        left, j = left[beyond], j[beyond]
        outside = Points(outside.policy[beyond], outside.values[:, beyond])


def _deviate(
    stack: Constraints, r: FloatArray, kept: Points, left: NDArray[np.int64], rounds: int
) -> None:
    """Raise V_0 of the problems `left` by feasible single deviations."""
    for _ in range(rounds):
        if not left.size:
            return
        policy = kept.policy[left]
        gain = _gains(stack, r[left], policy)
        after = kept.values[1:, left, None, None, None] + gain[1:]
        allowed = np.all(after >= stack.t[:, None, None, None, None], axis=0)
        gain_0 = np.where(allowed & stack.actions, gain[0], 0.0).reshape(left.size, -1)
        best = gain_0.argmax(axis=1)
        better = gain_0.max(axis=1) > CONVERGED
        h, x, a = np.unravel_index(best[better], stack.actions.shape)
        left, policy = left[better], policy[better]
        policy[np.arange(left.size), h, x] = a
        if left.size:
            found = _evaluated(stack, r[left], policy)
            kept.put(left, found, _feasible(stack, found))


def _feasible(stack: Constraints, points: Points) -> BoolArray:
    return np.asarray((points.values[1:] >= stack.t[:, None]).all(axis=0))


def _induce(
    stack: Constraints, r: FloatArray, multiplier: FloatArray, j: NDArray[np.int64]
) -> Points:
    """Backward induction on Q_0 + lambda Q_j, all values continued in their own models."""
    T, H, X, _ = r.shape
    policy = np.empty((T, H, X), dtype=np.int64)
    V = np.zeros((len(stack.P), T, X))
    weight, row = multiplier[:, None, None], np.arange(T)
    for h in reversed(range(H)):
        Q = _backup(stack, r, V, h)
        score = np.where(stack.actions[h], Q[0] + weight * Q[1 + j, row], -np.inf)
        policy[:, h] = score.argmax(axis=-1)
        V = np.take_along_axis(Q, policy[None, :, h, :, None], axis=-1)[..., 0]
    return Points(policy, V @ stack.d1)


def _backup(stack: Constraints, r: FloatArray, V: FloatArray, h: int) -> FloatArray:
    """Q_h (k + 1, T, X, A) of all models from V_{h+1} (k + 1, T, X)."""
    _, T, X = V.shape
    rows = stack.P[:, h].reshape(len(V), -1, X)
    Q: FloatArray = (V @ rows.transpose(0, 2, 1)).reshape(len(V), T, X, -1)
    Q[0] += r[:, h]
    Q[1:] += stack.r[:, None, h]
    return Q


def _evaluated(stack: Constraints, r: FloatArray, policy: PolicyArray) -> Points:
    """Policies (T, H, X) with their values."""
    V = np.zeros((len(stack.P), *policy[:, 0].shape))
    for h in reversed(range(policy.shape[1])):
        Q = _backup(stack, r, V, h)
        V = np.take_along_axis(Q, policy[None, :, h, :, None], axis=-1)[..., 0]
    return Points(policy.copy(), V @ stack.d1)


def _gains(stack: Constraints, r: FloatArray, policy: PolicyArray) -> FloatArray:
    """What each single deviation adds to each value: (k + 1, T, H, X, A)."""
    T, H, X, A = r.shape
    gains = np.empty((len(stack.P), T, H, X, A))
    V = np.zeros((len(stack.P), T, X))
    for h in reversed(range(H)):
        Q = _backup(stack, r, V, h)
        V = np.take_along_axis(Q, policy[None, :, h, :, None], axis=-1)[..., 0]
        gains[:, :, h] = Q - V[..., None]
    d = np.broadcast_to(stack.d1, (len(stack.P), T, X))
    for h in range(H):
        gains[:, :, h] *= d[..., None]
        chosen = d[..., None] * (policy[:, h, :, None] == np.arange(A))
        d = chosen.reshape(len(d), T, -1) @ stack.P[:, h].reshape(len(d), -1, X)
    return gains
