"""The interface of a node's environment, and of one whose MDP is known exactly.

An environment has X states, A actions and a horizon H. It reports real rewards in a range that it
declares; the node maps the range to [0, 1] and draws a bit with that mean (`node_client.episode`).
An environment that can end early declares one absorbing state of its own, the last of its X
states; the node goes there, with zero reward, for the rest of the horizon.

All chance comes from the randomness given, so that one environment serves deployed nodes (the
system's CSPRNG), the test entry point and the simulator (a keyed stream).
"""

from typing import Protocol, runtime_checkable

from riffle.common.counters import Sizes
from riffle.common.randomness import Randomness
from riffle.node_client.environments.tabular import TabularMDP

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
