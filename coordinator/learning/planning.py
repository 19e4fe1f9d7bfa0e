"""Planning on tabular MDPs with finite horizon: backward induction and occupancy measures.

For a deterministic policy pi, steps h = 0..H-1 and V_H = 0,

    V_h(x) = r_h(x, pi_h(x)) + sum_x' P_h(x' | x, pi_h(x)) V_{h+1}(x'),
    d_0 = d1,    d_{h+1}(x') = sum_x d_h(x) P_h(x' | x, pi_h(x)).

P has shape (H, X, A, X) and r has shape (H, X, A). Rows of P may sum to less than one. The rest of
a row goes to x-dagger, the absorbing state of paper 000 (section III-B). The value of x-dagger is
zero. `...` stands for leading dimensions of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from riffle.coordinator.learning.learner import FloatArray, PolicyArray


class Model(NamedTuple):
    """Transitions P (H, X, A, X), possibly sub-stochastic, and rewards r (H, X, A)."""

    P: FloatArray
    r: FloatArray


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy (..., H, X) and its value from the start distribution, shape (...)."""

    policy: PolicyArray
    value: FloatArray


def plan(P: FloatArray, r: FloatArray, d1: FloatArray) -> Plan:
    """Returns the optimal policy for P (..., H, X, A, X) and r (..., H, X, A).

    The first action wins ties.
    """
    H, X = r.shape[-3], r.shape[-2]
    policy = np.empty((*r.shape[:-3], H, X), dtype=np.int64)
    V = np.zeros((*r.shape[:-3], X))
    for h in reversed(range(H)):
        Q = r[..., h, :, :] + (P[..., h, :, :, :] @ V[..., None, :, None])[..., 0]
        policy[..., h, :] = Q.argmax(axis=-1)
        V = Q.max(axis=-1)
    return Plan(policy, np.asarray(V @ d1))


def value(P: FloatArray, r: FloatArray, d1: FloatArray, policy: PolicyArray) -> FloatArray:
    """Returns the values of `policy` (..., H, X) under P (..., H, X, A, X) and r (..., H, X, A)."""
    H, _, A = r.shape[-3:]
    taken = policy[..., None] == np.arange(A)
    rewards = (r * taken).sum(axis=-1)
    rows = (P * taken[..., None]).sum(axis=-2)
    V = rewards[..., H - 1, :]
    for h in reversed(range(H - 1)):
        V = rewards[..., h, :] + (rows[..., h, :, :] @ V[..., None])[..., 0]
    return np.asarray(V @ d1)


def occupancy(P: FloatArray, d1: FloatArray, policy: PolicyArray) -> FloatArray:
    """Returns d_h(x, a) (..., H, X, A), the probabilities of visits under policies (..., H, X)."""
    H, X, A, _ = P.shape
    taken = policy[..., None] == np.arange(A)
    d = np.empty((*policy.shape[:-2], H, X, A))
    state = np.broadcast_to(d1, (*policy.shape[:-2], X))
    for h in range(H):
        d[..., h, :, :] = state[..., None] * taken[..., h, :, :]
        state = d[..., h, :, :].reshape(*state.shape[:-1], X * A) @ P[h].reshape(X * A, X)
    return d


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles a function if numba is installed. Keeps the order of arithmetic; caches on disk.

    numba compiles a cached function again only if the function's own file has changed. So a
    compiled function may use only compiled functions and constants of its own file.
    """
    try:
        from numba import njit  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return function
    return cast(Function, njit(cache=True, error_model="numpy")(function))
