"""Loop-free layered MDPs (004, section 2.1), as padded arrays.

States are split into layers X_0, ..., X_H of sizes (X_0, ..., X_H) with X_0 = X_H = 1, and
transitions lead from one layer to the next. A state is (h, x) with x < X_h. With W = max X_h,

    states (H, W), pairs (H, W, A), cells (H, W, A, W)

say which entries of arrays of these shapes exist: every array of this package is padded to one of
them, and padding is zero unless a docstring says otherwise. The paper's X counts every state of
every layer; pairs (x, a) end at layer H - 1, since nothing is done in x_H.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from riffle.coordinator.learning.learner import FloatArray

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Layers:
    """Sizes of the layers, first and last of them 1, and the number of actions.

    Raises ValueError when there are fewer than two layers, a size is below one, or the first or
    last layer is no singleton.
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
        """Steps of an episode."""
        return len(self.widths) - 1

    @property
    def W(self) -> int:
        """Size of the largest layer, to which arrays are padded."""
        return max(self.widths)

    @property
    def X(self) -> int:
        """Number of states, x_H included."""
        return sum(self.widths)

    @cached_property
    def successors(self) -> FloatArray:
        """X_{h+1} for every step, shape (H, 1, 1)."""
        return np.array(self.widths[1:], dtype=np.float64)[:, None, None]

    @cached_property
    def states(self) -> BoolArray:
        """Which (h, x) exist, h < H: (H, W)."""
        return np.arange(self.W) < np.array(self.widths[:-1])[:, None]

    @cached_property
    def pairs(self) -> BoolArray:
        """Which (h, x, a) exist: (H, W, A)."""
        return np.repeat(self.states[:, :, None], self.A, axis=2)

    @cached_property
    def cells(self) -> BoolArray:
        """Which (h, x, a, x') exist: (H, W, A, W)."""
        after = np.arange(self.W) < np.array(self.widths[1:])[:, None]
        return self.pairs[..., None] & after[:, None, None, :]

    @property
    def pair_count(self) -> int:
        """Number of pairs (x, a): the X A of the loss noise."""
        return int(self.pairs.sum())

    @property
    def cell_count(self) -> int:
        """Number of tuples (x, a, x')."""
        return int(self.cells.sum())
