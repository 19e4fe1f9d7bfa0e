"""Loop-free layered MDPs (paper 004, section 2.1) and their occupancy measures, as padded arrays.

States are split into layers 0, ..., H. Layer h has X_h states, X_0 = X_H = 1, and transitions lead
from each layer to the next. A state is (h, x) with x < X_h. Let W = max X_h. Three boolean arrays

    states (H, W), pairs (H, W, A), cells (H, W, A, W)

say which entries exist in a padded array of the same shape. Unless a docstring says something else,
arrays of this package have one of these shapes, and padding is zero. The paper's X is the number of
states in all layers. No action is taken in x_H, the only state of layer H.

Occupancy measures (004, section 2.1.1),

    q^{P,pi}(x, a, x') = Pr[x_h = x, a_h = a, x_{h+1} = x' | P, pi],   h the layer of x,

are the q >= 0 such that (i) every layer sums to 1 and (ii) inflow = outflow at every inner state. A
q induces P^q(x'|x,a) = q(x,a,x') / q(x,a) and pi^q(a|x) = q(x,a) / q(x) (004, Eq. 2.3). Here q(x,a)
and q(x) are sums over the arguments left out. With losses l, an episode's expected loss is <q, l>.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from riffle.coordinator.learning.learner import BoolArray, FloatArray, PolicyArray


@dataclass(frozen=True)
class Layers:
    """The sizes of the layers, and the number of actions. The first and the last size are 1.

    Raises ValueError if a number is wrong, or if there are fewer than two layers.
    """

    widths: tuple[int, ...]
    A: int

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1 or self.A < 1:
            raise ValueError(f"need two or more layers of one or more states, got {self.widths}")
        if self.widths[0] != 1 or self.widths[-1] != 1:
            raise ValueError(f"first and last layer must be singletons, got {self.widths}")

    @property
    def H(self) -> int:
        """The number of steps of an episode."""
        return len(self.widths) - 1

    @property
    def W(self) -> int:
        """The size of the largest layer, to which arrays are padded."""
        return max(self.widths)

    @property
    def X(self) -> int:
        """The number of states, x_H included."""
        return sum(self.widths)

    @cached_property
    def successors(self) -> FloatArray:
        """The size X_{h+1} of the layer after each step, shape (H, 1, 1)."""
        return np.array(self.widths[1:], dtype=np.float64)[:, None, None]

    @cached_property
    def states(self) -> BoolArray:
        """Returns whether each state (h, x) with h < H exists, shape (H, W)."""
        return np.arange(self.W) < np.array(self.widths[:-1])[:, None]

    @cached_property
    def pairs(self) -> BoolArray:
        """Marks the (h, x, a) that exist, in an array (H, W, A) padded to W states."""
        return np.repeat(self.states[:, :, None], self.A, axis=2)

    @cached_property
    def cells(self) -> BoolArray:
        """Marks the (h, x, a, x') that exist, in an array (H, W, A, W) padded to W states."""
        after = np.arange(self.W) < np.array(self.widths[1:])[:, None]
        return self.pairs[..., None] & after[:, None, None, :]

    @property
    def pair_count(self) -> int:
        """The number of pairs (x, a), which is also the number of losses."""
        return int(self.pairs.sum())

    @property
    def cell_count(self) -> int:
        """The number of tuples (x, a, x')."""
        return int(self.cells.sum())


def unroll(P: FloatArray, d1: FloatArray) -> tuple[Layers, FloatArray, list[PolicyArray]]:
    """Unrolls a finite-horizon MDP in time: a layer holds the states that are possible at a step.

    The MDP has transitions P (H, X, A, X) and the start distribution d1 (X,). If d1 is positive at
    several states, an extra first layer has one state. From this state, every action leads to a
    state drawn from d1. Returns the layers, their transitions, and the MDP's states in the layer of
    each step.
    """
    reached = [np.flatnonzero(d1)]
    for rows in P[:-1]:
        reached.append(np.flatnonzero(rows[reached[-1]].any(axis=(0, 1))))
    lead = int(len(reached[0]) > 1)
    layers = Layers((1,) * lead + tuple(map(len, reached)) + (1,), P.shape[2])
    unrolled = np.zeros(layers.cells.shape)
    if lead:
        unrolled[0, 0, :, : len(reached[0])] = d1[reached[0]]
    for h, here in enumerate(reached[:-1]):
        after = reached[h + 1]
        unrolled[h + lead, : len(here), :, : len(after)] = P[h][here][:, :, after]
    unrolled[-1, : len(reached[-1]), :, 0] = 1.0
    return layers, unrolled, reached


def uniform_occupancy(layers: Layers) -> FloatArray:
    """Returns q_1 of 004's Algorithms 1 and 3: 1 / (X_h A X_{h+1}) on every cell (h, x, a, x')."""
    cells = layers.cells
    return np.asarray(cells / cells.sum(axis=(1, 2, 3), keepdims=True))


def uniform_policy(layers: Layers) -> FloatArray:
    """Returns the policy pi (H, W, A) with pi(a|x) = 1 / A at every state."""
    return np.asarray(layers.pairs / layers.A)


def state_action(P: FloatArray, policy: FloatArray) -> FloatArray:
    """Returns the visit probability of each (h, x, a) in the shape of `policy` (..., H, W, A)."""
    q = np.empty(policy.shape)
    state = np.zeros((*policy.shape[:-3], policy.shape[-2]))
    state[..., 0] = 1.0
    for h, rows in enumerate(P):
        q[..., h, :, :] = state[..., None] * policy[..., h, :, :]
        state = q[..., h, :, :].reshape(*state.shape[:-1], -1) @ rows.reshape(-1, rows.shape[-1])
    return q


def occupancy(P: FloatArray, policy: FloatArray) -> FloatArray:
    """Returns a policy's occupancy measure q^{P,pi}(x, a, x') (H, W, A, W); W is `Layers.W`."""
    return state_action(P, policy)[..., None] * P


def induced_policy(layers: Layers, q: FloatArray) -> FloatArray:
    """Returns the policy (H, W, A) that q induces. It is uniform at states that q never visits."""
    pairs = q.sum(axis=-1)
    visits = pairs.sum(axis=-1, keepdims=True)
    ratio = np.divide(pairs, visits, out=np.full_like(pairs, 1 / layers.A), where=visits > 0)
    return np.asarray(ratio * layers.pairs)


def induced_transitions(layers: Layers, q: FloatArray) -> FloatArray:
    """Returns transitions (H, W, A, W) from an occupancy measure q; uniform at unvisited pairs."""
    pairs = q.sum(axis=-1, keepdims=True)
    unknown = np.broadcast_to(1 / layers.successors[..., None], q.shape)
    ratio = np.divide(q, pairs, out=unknown.copy(), where=pairs > 0)
    return np.asarray(ratio * layers.cells)


def violation(layers: Layers, q: FloatArray) -> float:
    """Returns the largest amount by which q violates a condition of occupancy measures."""
    inflow, outflow = q.sum(axis=(1, 2)), q.sum(axis=(2, 3))
    flow = np.abs(inflow[:-1] - outflow[1:]).max(initial=0.0)
    mass = np.abs(q.sum(axis=(1, 2, 3)) - 1).max()
    return float(max(flow, mass, -q.min(), np.abs(q[~layers.cells]).max(initial=0.0)))


def best_policy(layers: Layers, P: FloatArray, loss: FloatArray) -> tuple[PolicyArray, float]:
    """Returns the deterministic policy (H, `layers.W`) of least expected loss, and that loss."""
    policy = np.zeros((layers.H, layers.W), dtype=np.int64)
    V = np.zeros(layers.W)
    for h in reversed(range(layers.H)):
        Q = loss[h] + P[h] @ V
        policy[h] = Q.argmin(axis=-1)
        V = Q.min(axis=-1) * layers.states[h]
    return policy, float(V[0])
