"""The declared support: which transitions an environment can make at all.

An environment's owner declares it, and it is public like the numbers of states and actions.
Counters of other transitions could only hold noise, so batches with a declared support have none
(`common.mechanism.counters`).

The declaration must never come from people's episodes, because it is published without noise.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import ClassVar

import numpy as np
import numpy.typing as npt

MAX_COUNTERS = 1 << 24
"""Most counters of a batch."""
Successors = tuple[tuple[tuple[int, ...], ...], ...]
"""For every state and action (X, A), the states that may follow, in ascending order."""


@dataclass(frozen=True)
class Support:
    """The possible states at step 0 and, for each step or for all steps, the possible successors.

    ``next`` has one entry for each of the H steps, or a single entry that holds for all of them. A
    transition from x is possible at step h only if the steps before can lead to x.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    start: tuple[int, ...]
    next: tuple[Successors, ...]


@lru_cache(maxsize=4)
def possible_cells(support: Support, X: int, A: int, H: int) -> npt.NDArray[np.int64]:
    """Returns the possible (h, x, a, x') as sorted indices into an array (H, X, A, X).

    Raises ValueError if the declaration does not fit the sizes, lists states twice or not in order,
    gives no successor for a state and action that can occur, or has over `MAX_COUNTERS`
    transitions.
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


def _table(successors: Successors, X: int, A: int) -> npt.NDArray[np.int64]:
    """Returns one step's transitions as sorted indices into an array (X, A, X)."""
    if len(successors) != X or any(len(row) != A for row in successors):
        raise ValueError(f"support: next must have {X} states with {A} actions each")
    rows = list(chain.from_iterable(successors))
    pairs = np.repeat(np.arange(X * A), [len(row) for row in rows])
    table = pairs * X + _states(tuple(chain.from_iterable(rows)), X)
    if (np.diff(table) <= 0).any():
        raise ValueError("support: next must list states once, in ascending order")
    return table


def _states(listed: tuple[int, ...], X: int) -> npt.NDArray[np.int64]:
    if listed and not 0 <= min(listed) <= max(listed) < X:
        raise ValueError(f"support: a state is outside 0..{X - 1}")
    return np.array(listed, dtype=np.int64)
