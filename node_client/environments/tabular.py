"""Finite-horizon tabular MDPs: P_h(x' | x, a), Bernoulli reward means r_h(x, a), start d1.

RiverSwim as this literature uses it (Osband, Russo, Van Roy 2013; `000`, Fig. 5): a swimmer starts
at the left end. "Left" (action 0) always succeeds. "Right" (action 1) moves right with .35, stays
with .6 and slips left with .05; at the left end it moves right with .6 and stays with .4; at the
right end it stays with .6 and slips with .4. Reward .005 for "left" at the left end, 1 for "right"
at the right end. For X=4, H=6 the optimal value is 0.475791, always-left has 0.03.

`TabularEnvironment` runs any such MDP one user at a time. A step's reward is the mean r_h(x, a);
the node draws the reward bit.

The interface of a node's environment, and of one whose MDP is known exactly.

An environment has X states, A actions and a horizon H. It reports real rewards in a range that it
declares; the node maps the range to [0, 1] and draws a bit with that mean (`node_client.episode`).
An environment that can end early declares one absorbing state of its own, the last of its X
states; the node goes there, with zero reward, for the rest of the horizon.

All chance comes from the randomness given, so that one environment serves deployed nodes (the
system's CSPRNG), the test entry point and the simulator (a keyed stream).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.randomness import Randomness, categorical

Floats = npt.NDArray[np.float64]

LEFT, RIGHT = 0, 1
STAY_LEFT_END, MOVE_LEFT_END = 0.4, 0.6
SLIP, STAY, MOVE = 0.05, 0.6, 0.35
STAY_RIGHT_END, SLIP_RIGHT_END = 0.6, 0.4
REWARD_LEFT, REWARD_RIGHT = 0.005, 1.0


@dataclass(frozen=True, slots=True)
class TabularMDP:
    """P (H, X, A, X), reward means r (H, X, A) in [0, 1], start distribution d1 (X,).

    Raises:
        ValueError: shapes disagree, or a distribution does not sum to one.
    """

    P: Floats
    r: Floats
    d1: Floats

    def __post_init__(self) -> None:
        H, X, A, Y = self.P.shape
        if Y != X or self.r.shape != (H, X, A) or self.d1.shape != (X,):
            raise ValueError("an MDP has P (H, X, A, X), r (H, X, A) and d1 (X,)")
        sums_to_one = np.allclose(self.P.sum(-1), 1) and np.isclose(self.d1.sum(), 1)
        if not sums_to_one or self.P.min() < 0 or self.d1.min() < 0:
            raise ValueError("every P_h(. | x, a) and d1 must be a distribution")
        if self.r.min() < 0 or self.r.max() > 1:
            raise ValueError("reward means must lie in [0, 1]")

    @property
    def sizes(self) -> Sizes:
        """X, A, H."""
        H, X, A, _ = self.P.shape
        return Sizes(X=X, A=A, H=H)


def stationary(P: Floats, r: Floats, d1: Floats, H: int) -> TabularMDP:
    """The MDP whose every step has P (X, A, X) and r (X, A).

    Raises:
        ValueError: as `TabularMDP`, or the horizon is below one.
    """
    if H < 1:
        raise ValueError(f"horizon is {H}; it must be at least 1")
    return TabularMDP(np.repeat(P[None], H, axis=0), np.repeat(r[None], H, axis=0), d1)


def riverswim(X: int = 4, H: int = 6) -> TabularMDP:
    """RiverSwim with X states in a row and horizon H.

    Raises:
        ValueError: X is below two.
    """
    if X < 2:
        raise ValueError(f"RiverSwim needs at least 2 states, not {X}")
    P = np.zeros((X, 2, X))
    P[np.arange(X), LEFT, np.maximum(np.arange(X) - 1, 0)] = 1.0
    P[0, RIGHT, [0, 1]] = STAY_LEFT_END, MOVE_LEFT_END
    for x in range(1, X - 1):
        P[x, RIGHT, [x - 1, x, x + 1]] = SLIP, STAY, MOVE
    P[X - 1, RIGHT, [X - 2, X - 1]] = SLIP_RIGHT_END, STAY_RIGHT_END
    r = np.zeros((X, 2))
    r[0, LEFT], r[X - 1, RIGHT] = REWARD_LEFT, REWARD_RIGHT
    d1 = np.zeros(X)
    d1[0] = 1.0
    return stationary(P, r, d1, H)


class TabularEnvironment:
    """Episodes of a `TabularMDP`; no early end; rewards are its means, in [0, 1]."""

    reward_range = (0.0, 1.0)
    absorbing = None

    def __init__(self, mdp: TabularMDP) -> None:
        self.mdp = mdp
        self.sizes = mdp.sizes
        self._start = np.cumsum(mdp.d1)
        self._next = np.cumsum(mdp.P, axis=-1)
        self._h = 0
        self._x = 0

    def reset(self, randomness: Randomness) -> int:
        """x ~ d1."""
        self._h, self._x = 0, categorical(randomness, self._start)
        return self._x

    def step(self, action: int, randomness: Randomness) -> tuple[int, float, bool]:
        """x' ~ P_h(. | x, a) and the mean reward r_h(x, a)."""
        h, x = self._h, self._x
        self._h, self._x = h + 1, categorical(randomness, self._next[h, x, action])
        return self._x, float(self.mdp.r[h, x, action]), False


Step = tuple[int, float, bool]


class Environment(Protocol):
    """One user's world at a time: `reset` begins another user's episode.

    Calls come one after another, but not always from the same thread.
    """

    @property
    def sizes(self) -> Sizes:
        """X (with the absorbing state, if there is one), A, H."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """Least and greatest reward a step can give."""

    @property
    def absorbing(self) -> int | None:
        """The state after an early end, X - 1; None when episodes never end early."""

    def reset(self, randomness: Randomness) -> int:
        """Begin an episode: its first state."""

    def step(self, action: int, randomness: Randomness) -> Step:
        """Act: next state, reward, and whether the episode ended early."""


@runtime_checkable
class Modelled(Protocol):
    """An environment whose population-level MDP is known: simulators and exact values use it."""

    @property
    def mdp(self) -> TabularMDP:
        """P, r, d1 of a user drawn at random from the population."""
