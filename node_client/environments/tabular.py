"""The interface of a node's environments, and finite-horizon tabular MDPs that implement it.

An environment has X states, A actions and a horizon H, and declares the range of its real rewards;
the node maps the range to [0, 1] and draws a bit with that mean (`node_client.episode`). An
environment that can end early declares one absorbing state, the last of its X states; the node
stays there, with zero reward, for the rest of the horizon.

An environment draws only from the given randomness. So the same one serves deployed nodes (the
system's CSPRNG), the test entry point and the simulator (keyed streams).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import Sizes, Successors, Support
from riffle.common.mechanism.randomness import Randomness, categorical

Floats = npt.NDArray[np.float64]
Step = tuple[int, float, bool]


class Environment(Protocol):
    """The environment of one user at a time; `reset` begins the next user's episode.

    Calls never overlap, but they may come from different threads.
    """

    @property
    def sizes(self) -> Sizes:
        """X (including the absorbing state, if there is one), A and H."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """Least and greatest reward of a step."""

    @property
    def absorbing(self) -> int | None:
        """The state after an early end, X - 1; None if episodes never end early."""

    def reset(self, randomness: Randomness) -> int:
        """Begins an episode and returns its first state."""

    def step(self, action: int, randomness: Randomness) -> Step:
        """Takes an action; returns next state, reward, and whether the episode ended early."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What an environment's owner declares: possible transitions, and that all steps are alike.

    It is published, so nobody may derive it from people's episodes. None: nothing is declared.
    """

    support: Support | None = None
    homogeneous: bool | None = None


@runtime_checkable
class Declared(Protocol):
    """An environment that declares its structure; a `Modelled` one need not."""

    @property
    def declaration(self) -> Declaration:
        """The declaration, which holds for the whole population, not for one user."""


@dataclass(frozen=True, slots=True)
class TabularMDP:
    """P (H, X, A, X), reward means r (H, X, A) in [0, 1], start distribution d1 (X,).

    P[h, x, a, y] is P_h(y | x, a). Raises ValueError if shapes disagree, a distribution does not
    sum to one, or a mean is outside [0, 1].
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
        """X, A and H."""
        H, X, A, _ = self.P.shape
        return Sizes(X=X, A=A, H=H)

    @property
    def declaration(self) -> Declaration:
        """The transitions of positive probability, and whether P and r are equal at all steps."""
        possible = self.P > 0
        alike = bool((self.P[0] == self.P).all() and (self.r == self.r[0]).all())
        steps = possible[:1] if (possible == possible[0]).all() else possible
        start = tuple(np.flatnonzero(self.d1).tolist())
        return Declaration(Support(start, tuple(_successors(step) for step in steps)), alike)


def _successors(possible: npt.NDArray[np.bool_]) -> Successors:
    return tuple(
        tuple(tuple(np.flatnonzero(row).tolist()) for row in actions) for actions in possible
    )


@runtime_checkable
class Modelled(Protocol):
    """An environment with a known MDP; exact values and population-level simulation need one."""

    @property
    def mdp(self) -> TabularMDP:
        """P, r and d1 of a user drawn at random from the population."""


class TabularEnvironment:
    """Runs episodes of a `TabularMDP`, without early ends. The reward of a step is its mean.

    ``action_names`` are for people who read a policy.
    """

    reward_range = (0.0, 1.0)
    absorbing = None

    def __init__(self, mdp: TabularMDP, action_names: Sequence[str] = ()) -> None:
        self.mdp = mdp
        self.action_names = tuple(action_names)
        self.sizes = mdp.sizes
        self._start = np.cumsum(mdp.d1)
        self._next = np.cumsum(mdp.P, axis=-1)
        self._h = 0
        self._x = 0

    def reset(self, randomness: Randomness) -> int:
        """Draws x ~ d1."""
        self._h, self._x = 0, categorical(randomness, self._start)
        return self._x

    def step(self, action: int, randomness: Randomness) -> Step:
        """Draws x' ~ P_h(. | x, a); returns it with the mean reward r_h(x, a)."""
        h, x = self._h, self._x
        self._h, self._x = h + 1, categorical(randomness, self._next[h, x, action])
        return self._x, float(self.mdp.r[h, x, action]), False


def stationary(P: Floats, r: Floats, d1: Floats, H: int) -> TabularMDP:
    """Returns the MDP with P (X, A, X) and r (X, A) at every step.

    Raises ValueError as `TabularMDP` does, or if the horizon H is below one.
    """
    if H < 1:
        raise ValueError(f"horizon is {H}; it must be at least 1")
    return TabularMDP(np.repeat(P[None], H, axis=0), np.repeat(r[None], H, axis=0), d1)


LEFT, RIGHT = 0, 1
STAY_LEFT_END, MOVE_LEFT_END = 0.4, 0.6
SLIP, STAY, MOVE = 0.05, 0.6, 0.35
STAY_RIGHT_END, SLIP_RIGHT_END = 0.6, 0.4
REWARD_LEFT, REWARD_RIGHT = 0.005, 1.0


def riverswim(X: int = 4, H: int = 6) -> TabularMDP:
    """Returns RiverSwim with X states in a row and horizon H (Osband et al. 2013; 000, Fig. 5).

    A swimmer starts at the left end. "Left" always succeeds. "Right" moves right, stays or slips
    left with probability .35, .6 and .05. At the left end it moves right with .6; at the right end
    it slips left with .4. "Left" at the left end earns .005; "right" at the right end earns 1. For
    X=4, H=6 the optimal value is 0.475791, and always-left earns 0.03. Raises ValueError if X is
    below two.
    """
    if X < 2:
        raise ValueError(f"RiverSwim needs at least 2 states, not {X}")
    P, r = np.zeros((X, 2, X)), np.zeros((X, 2))
    P[np.arange(X), LEFT, np.maximum(np.arange(X) - 1, 0)] = 1.0
    P[0, RIGHT, [0, 1]] = STAY_LEFT_END, MOVE_LEFT_END
    for x in range(1, X - 1):
        P[x, RIGHT, [x - 1, x, x + 1]] = SLIP, STAY, MOVE
    P[X - 1, RIGHT, [X - 2, X - 1]] = SLIP_RIGHT_END, STAY_RIGHT_END
    r[0, LEFT], r[X - 1, RIGHT] = REWARD_LEFT, REWARD_RIGHT
    return stationary(P, r, np.eye(X)[0], H)
