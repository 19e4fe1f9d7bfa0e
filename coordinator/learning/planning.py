"""Backward induction and occupancy measures on (absorbing) tabular MDPs.

For a deterministic policy pi, steps h = 0..H-1 and V_H = 0,

    V_h(x) = r_h(x, pi_h(x)) + sum_x' P_h(x' | x, pi_h(x)) V_{h+1}(x'),
    d_0 = d1,    d_{h+1}(x') = sum_{x} d_h(x) P_h(x' | x, pi_h(x)).

P has shape (H, X, A, X) and may be sub-stochastic: the mass missing from a row goes to the
absorbing state x-dagger of 000, section III-B, whose value is zero, so it needs no row of its own.
r has shape (H, X, A). Leading batch dimensions are allowed where a docstring says `...`.

The absorbing MDP of 000, section III-B, estimated from private counts.

Tuples (h, x, a, x') in W lead to x-dagger, where every reward is zero:

    P~(x' | x, a) = N(x, a, x') / N(x, a)  off W,   0 on W,   the rest of the row to x-dagger,
    r~(x, a)      = clip(R(x, a) / N(x, a), 0, 1),  0 at x-dagger.

`Estimate Transition` and `Estimate Rewards` are not written out in the document; this is them. As
x-dagger has value zero, P~ is kept as a sub-stochastic array (H, X, A, X) without a row for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from riffle.coordinator.learning.learner import FloatArray, PolicyArray


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy (..., H, X) and its value from the start distribution, shape (...)."""

    policy: PolicyArray
    value: FloatArray


def plan(P: FloatArray, r: FloatArray, d1: FloatArray) -> Plan:
    """Optimal policy of P (..., H, X, A, X), r (..., H, X, A); the first action wins ties."""
    H, X = r.shape[-3], r.shape[-2]
    policy = np.empty((*r.shape[:-3], H, X), dtype=np.int64)
    V = np.zeros((*r.shape[:-3], X))
    for h in reversed(range(H)):
        Q = r[..., h, :, :] + (P[..., h, :, :, :] @ V[..., None, :, None])[..., 0]
        policy[..., h, :] = Q.argmax(axis=-1)
        V = Q.max(axis=-1)
    return Plan(policy, np.asarray(V @ d1))


def value(P: FloatArray, r: FloatArray, d1: FloatArray, policy: PolicyArray) -> FloatArray:
    """Value of policies (..., H, X) under P, r shaped as in `plan`; leading shapes broadcast."""
    H, _, A = r.shape[-3:]
    chosen = policy[..., None] == np.arange(A)
    rewards = (r * chosen).sum(axis=-1)
    rows = (P * chosen[..., None]).sum(axis=-2)
    V = rewards[..., H - 1, :]
    for h in reversed(range(H - 1)):
        V = rewards[..., h, :] + (rows[..., h, :, :] @ V[..., None])[..., 0]
    return np.asarray(V @ d1)


def occupancy(P: FloatArray, d1: FloatArray, policy: PolicyArray) -> FloatArray:
    """Visitation d_h(x, a) of policies (..., H, X) under P (H, X, A, X): shape (..., H, X, A)."""
    H, X, A, _ = P.shape
    chosen = policy[..., None] == np.arange(A)
    d = np.empty((*policy.shape[:-2], H, X, A))
    state = np.broadcast_to(d1, (*policy.shape[:-2], X))
    for h in range(H):
        d[..., h, :, :] = state[..., None] * chosen[..., h, :, :]
        state = d[..., h, :, :].reshape(*state.shape[:-1], X * A) @ P[h].reshape(X * A, X)
    return d


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
