"""The counters of a batch, and the encoding of an episode as increments of counters.

At step h an episode in state x takes action a, reaches x' and receives a reward bit r. The counter
families of paper 000, section III-A (N_h(x, a, x'), N_h(x, a), R_h(x, a)) are counted in one of
three ways:

- ``paper``: transitions, visits and rewards, each with noise of its own.
- ``lean``: transitions and rewards; visits are sums over x'.
- ``joint``: one symbol (x, a, x', r) per step; all other counts are sums over symbols.

A batch of scope ``all`` (``layer=None``) counts every step, and the rewards. A batch of one layer
(``layer=h``) counts that step's transitions (in ``paper`` also visits) and no rewards.

Counters are in the order (family, h, x, a, x'), row-major; in ``joint`` (h, x, a, x', r). The
dummy is the index after the last counter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Families = Literal["paper", "lean", "joint"]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """X states, A actions, H steps. Raises ValueError if one is below 1."""

    X: int
    A: int
    H: int

    def __post_init__(self) -> None:
        for name, value in (("states", self.X), ("actions", self.A), ("horizon", self.H)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Episode:
    """A user's episode: states (H+1,), actions (H,), reward bits (H,)."""

    states: Ints
    actions: Ints
    rewards: Ints

    def __repr__(self) -> str:
        return "Episode(private)"


@dataclass(frozen=True, slots=True)
class CounterLayout:
    """The counters of a batch in order. Raises ValueError if ``layer`` is not in the horizon."""

    sizes: Sizes
    families: Families
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.layer is not None and not 0 <= self.layer < self.sizes.H:
            raise ValueError(f"layer {self.layer} is not in 0..{self.sizes.H - 1}")

    @property
    def layers(self) -> int:
        """Number of steps in scope."""
        return self.sizes.H if self.layer is None else 1

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each family's block of counters, in the order of the counters."""
        return _shapes(self)

    @property
    def counters(self) -> int:
        """C, the number of counters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def dummy(self) -> int:
        """Index of the dummy message."""
        return self.counters

    @property
    def width(self) -> int:
        """Bytes that hold any index, the dummy's included."""
        return max(1, (self.dummy.bit_length() + 7) // 8)

    @property
    def cells(self) -> int:
        """Largest number of cells that move up by one, and also down, when one user is replaced.

        Every family has one symbol per step, so two episodes differ in at most one cell up and one
        down for each family and step in scope. Privacy rests on this number (`account`).
        """
        return len(self.shapes) * self.layers

    @property
    def data_slots(self) -> int:
        """The most data messages that a report can have: one for each family and step in scope."""
        return self.cells

    def encode(self, episode: Episode) -> Ints:
        """Returns the indices of an episode's increments, shape (at most ``data_slots``,).

        In ``paper`` and ``lean`` a reward of 0 has no message; padding hides this. Raises
        ValueError if the episode does not have this layout's sizes.
        """
        self._check(episode)
        steps = np.arange(self.sizes.H) if self.layer is None else np.array([self.layer])
        rows = np.arange(steps.size)
        x, a, r = episode.states[steps], episode.actions[steps], episode.rewards[steps]
        y = episode.states[steps + 1]
        parts: list[Ints] = []
        offset = 0
        for family, shape in self.shapes.items():
            coordinates = {
                "joint": (rows, x, a, y, r),
                "transitions": (rows, x, a, y),
                "visits": (rows, x, a),
                "rewards": (rows[r == 1], x[r == 1], a[r == 1]),
            }[family]
            parts.append(offset + np.ravel_multi_index(coordinates, shape).astype(np.int64))
            offset += math.prod(shape)
        return np.concatenate(parts)

    def split(self, counts: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """Returns counts (C,) as one array for each family, shaped as in ``shapes``."""
        blocks: dict[str, npt.NDArray[np.float64]] = {}
        offset = 0
        for family, shape in self.shapes.items():
            size = math.prod(shape)
            blocks[family] = counts[offset : offset + size].reshape(shape)
            offset += size
        return blocks

    def _check(self, episode: Episode) -> None:
        X, A, H = self.sizes.X, self.sizes.A, self.sizes.H
        shapes = (episode.states.shape, episode.actions.shape, episode.rewards.shape)
        if shapes != ((H + 1,), (H,), (H,)):
            raise ValueError(f"an episode of horizon {H} has H+1 states, H actions, H rewards")
        for name, values, bound in (
            ("state", episode.states, X),
            ("action", episode.actions, A),
            ("reward bit", episode.rewards, 2),
        ):
            if values.min() < 0 or values.max() >= bound:
                raise ValueError(f"a {name} of the episode is outside 0..{bound - 1}")


@lru_cache(maxsize=1024)
def _shapes(layout: CounterLayout) -> Mapping[str, tuple[int, ...]]:
    X, A, hs = layout.sizes.X, layout.sizes.A, layout.layers
    scope_all = layout.layer is None
    if layout.families == "joint":
        return {"joint": (hs, X, A, X, 2)} if scope_all else {"transitions": (hs, X, A, X)}
    shapes: dict[str, tuple[int, ...]] = {"transitions": (hs, X, A, X)}
    if layout.families == "paper":
        shapes["visits"] = (hs, X, A)
    if scope_all:
        shapes["rewards"] = (hs, X, A)
    return shapes
