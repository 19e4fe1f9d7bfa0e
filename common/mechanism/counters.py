"""The counters of a batch, and the encoding of an episode as increments of counters.

At step h an episode in state x takes action a, reaches x' and receives a reward bit r. The counter
families of paper 000, section III-A (N_h(x, a, x'), N_h(x, a), R_h(x, a)) are counted in one of
three ways:

- ``paper``: transitions, visits and rewards, each with noise of its own.
- ``lean``: transitions and rewards; visits are sums over x'.
- ``joint``: one symbol (x, a, x', r) per step; all other counts are sums over symbols.

A batch with ``layer=None`` counts every step, with rewards. A batch with ``layer=h`` counts only
step h, without rewards.

Counters are in the order (family, h, x, a, x'), row-major; in ``joint`` (h, x, a, x', r). The
dummy, which counts nothing, is the index after the last counter.

The environment's owner may declare a support: the possible transitions. Transitions outside the
support then have no counters. The support is public and must never come from people's episodes. The
report of an episode outside the support has noise only, so the guarantee holds even if the
declaration is false.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

Families = Literal["paper", "lean", "joint"]
Ints = npt.NDArray[np.int64]
OUTSIDE = "a transition is outside the declared support"
MAX_COUNTERS = 1 << 24
"""The most counters that a batch may have."""
Successors = tuple[tuple[tuple[int, ...], ...], ...]
"""For every state and action (X, A), the states that may follow, in ascending order."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """X states, A actions, H steps. Raises ValueError if a number is below 1."""

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


@dataclass(frozen=True)
class Support:
    """The possible states at step 0, and the possible successors of each state and action.

    ``next`` has one entry for each of the H steps, or a single entry for all steps. A transition
    from x is possible at step h only if the steps before can lead to x.
    """

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "strict": True,
        "revalidate_instances": "always",
    }

    start: tuple[int, ...]
    next: tuple[Successors, ...]


@lru_cache(maxsize=4)
def possible_cells(support: Support, X: int, A: int, H: int) -> Ints:
    """Returns the possible (h, x, a, x') as sorted indices into an array (H, X, A, X).

    Raises ValueError if the declaration is malformed, does not fit the sizes, or has over
    `MAX_COUNTERS` transitions.
    """
    if len(support.next) not in (1, H):
        raise ValueError(f"support: next has {len(support.next)} steps; it must have 1 or {H}")
    tables = [_table(successors, X, A) for successors in support.next]
    if sum(table.size for table in tables) * H // len(tables) > MAX_COUNTERS:
        raise ValueError(f"support: more than {MAX_COUNTERS} transitions over {H} steps")
    states = _states(support.start, X)
    if states.size == 0 or (np.diff(states) <= 0).any():
        raise ValueError("support: start must list states once, in ascending order")
    steps = []
    for h in range(H):
        table = tables[h % len(tables)]
        cells = table[np.isin(table // (X * A), states)]
        if np.unique(cells // X).size < states.size * A:
            raise ValueError(f"support: step {h} has a state and action without a successor")
        steps.append(cells + h * X * A * X)
        states = np.unique(cells % X)
    every = np.concatenate(steps)
    every.flags.writeable = False
    return every


def _table(successors: Successors, X: int, A: int) -> Ints:
    """Returns one step's transitions as sorted indices into an array (X, A, X)."""
    if len(successors) != X or any(len(row) != A for row in successors):
        raise ValueError(f"support: next must have {X} states with {A} actions each")
    rows = list(chain.from_iterable(successors))
    pairs = np.repeat(np.arange(X * A), [len(row) for row in rows])
    table = pairs * X + _states(tuple(chain.from_iterable(rows)), X)
    if (np.diff(table) <= 0).any():
        raise ValueError("support: next must list states once, in ascending order")
    return table


def _states(listed: tuple[int, ...], X: int) -> Ints:
    if listed and not 0 <= min(listed) <= max(listed) < X:
        raise ValueError(f"support: a state is outside 0..{X - 1}")
    return np.array(listed, dtype=np.int64)


@dataclass(frozen=True)
class CounterLayout:
    """The counters of a batch in order.

    Raises ValueError if ``layer`` is not a step, or as `possible_cells` does.
    """

    sizes: Sizes
    families: Families
    layer: int | None = None
    support: Support | None = None

    def __post_init__(self) -> None:
        if self.layer is not None and not 0 <= self.layer < self.sizes.H:
            raise ValueError(f"layer {self.layer} is not in 0..{self.sizes.H - 1}")
        _ = self._places

    @property
    def layers(self) -> int:
        """The number of steps in scope: H, or 1 if ``layer`` names a step."""
        return self.sizes.H if self.layer is None else 1

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Each family's array shape, in the order of the counters. A support changes no shape."""
        X, A, hs = self.sizes.X, self.sizes.A, self.layers
        if self.families == "joint" and self.layer is None:
            return {"joint": (hs, X, A, X, 2)}
        shapes: dict[str, tuple[int, ...]] = {"transitions": (hs, X, A, X)}
        if self.families == "paper":
            shapes["visits"] = (hs, X, A)
        if self.layer is None:
            shapes["rewards"] = (hs, X, A)
        return shapes

    @cached_property
    def counters(self) -> int:
        """The number of counters, C."""
        return sum(self._counters_of(family) for family in self.shapes)

    @property
    def possible(self) -> npt.NDArray[np.bool_]:
        """Returns whether each transition has a counter, as an array (layers, X, A, X)."""
        shape = (self.layers, self.sizes.X, self.sizes.A, self.sizes.X)
        if self._places is None:
            return np.broadcast_to(np.True_, shape)
        mask = np.zeros(shape, dtype=np.bool_)
        mask.ravel()[self._in_scope] = True
        return mask

    @property
    def dummy(self) -> int:
        """The index that a dummy message holds: the number of counters."""
        return self.counters

    @property
    def width(self) -> int:
        """The number of bytes that can hold any index, including the dummy's."""
        return max(1, (self.dummy.bit_length() + 7) // 8)

    @property
    def cells(self) -> int:
        """The most counters that rise by one if one user is replaced. Equally many may fall by one.

        An episode increments at most one counter for each family and counted step. The accountant
        relies on this number (`common.accounting.account`).
        """
        return len(self.shapes) * self.layers

    @property
    def data_slots(self) -> int:
        """The most data messages that a report can have: one for each family and step in scope."""
        return self.cells

    def encode(self, episode: Episode) -> Ints:
        """Returns the indices of an episode's increments, shape (at most ``data_slots``,).

        With the families ``paper`` and ``lean``, a reward of 0 has no message; padding hides this.
        Raises ValueError as `check` does.
        """
        self.check(episode)
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
            index = np.ravel_multi_index(coordinates, shape).astype(np.int64)
            if self._places is not None:
                index = np.searchsorted(self._places[family], index)
            parts.append(offset + index)
            offset += self._counters_of(family)
        return np.concatenate(parts)

    def split(self, counts: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """Returns counts (C,) as one array for each family, shaped as in ``shapes``.

        Entries without a counter are 0.
        """
        blocks: dict[str, npt.NDArray[np.float64]] = {}
        offset = 0
        for family, shape in self.shapes.items():
            size = self._counters_of(family)
            block = counts[offset : offset + size]
            if self._places is not None:
                block, present = np.zeros(math.prod(shape)), block
                block[self._places[family]] = present
            blocks[family] = block.reshape(shape)
            offset += size
        return blocks

    def join(self, blocks: Mapping[str, Ints]) -> Ints:
        """Returns counters (C,) from one array for each family, shaped as in ``shapes``.

        Raises ValueError if an entry without a counter is not 0.
        """
        whole = [blocks[family].ravel() for family in self.shapes]
        if self._places is None:
            return np.concatenate(whole)
        counts = np.concatenate(
            [block[self._places[family]] for family, block in zip(self.shapes, whole, strict=True)]
        )
        if counts.sum() != sum(block.sum() for block in whole):
            raise ValueError(OUTSIDE)
        return counts

    def check(self, episode: Episode) -> None:
        """Raises ValueError if an episode does not fit the sizes or is outside the support."""
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
        if self.support is not None:
            coordinates = (np.arange(H), episode.states[:-1], episode.actions, episode.states[1:])
            cells = np.ravel_multi_index(coordinates, (H, X, A, X))
            places = np.minimum(np.searchsorted(self._cells, cells), self._cells.size - 1)
            if (self._cells[places] != cells).any():
                raise ValueError(OUTSIDE)

    @cached_property
    def _cells(self) -> Ints:
        """The possible transitions of all steps, even for a batch of one layer."""
        if self.support is None:
            return np.zeros(0, dtype=np.int64)
        return possible_cells(self.support, self.sizes.X, self.sizes.A, self.sizes.H)

    @property
    def _in_scope(self) -> Ints:
        """The possible transitions at counted steps, as indices into an array (layers, X, A, X)."""
        size = self.sizes.X**2 * self.sizes.A
        start = (self.layer or 0) * size
        first, last = np.searchsorted(self._cells, (start, start + self.layers * size))
        return self._cells[first:last] - start

    @cached_property
    def _places(self) -> Mapping[str, Ints] | None:
        """The sorted indices of each family's counters in its array; None if `support` is None."""
        if self.support is None:
            return None
        cells = self._in_scope
        pairs = np.unique(cells // self.sizes.X)
        bits = (2 * cells[:, None] + np.arange(2)).ravel()
        places = {"joint": bits, "transitions": cells, "visits": pairs, "rewards": pairs}
        return {family: places[family] for family in self.shapes}

    def _counters_of(self, family: str) -> int:
        return math.prod(self.shapes[family]) if self._places is None else self._places[family].size
