"""What the compiled loops take, and how they are compiled.

numba's cache on disk sees changes of the file a function stands in, and of its arguments' types.
So no arithmetic belongs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


class World(NamedTuple):
    """The true MDP, its V*, and running sums of d1 and of the rows of P."""

    P: Floats
    r: Floats
    d1: Floats
    optimum: float
    start: Floats
    following: Floats


class Exploration(NamedTuple):
    """A bonus: its kind, the constants of `ucbvi.Bonus`, and the kind's logarithm."""

    kind: int
    bonus_scale: float
    noise_scale: float
    least_visits: float
    iota: float


class Privacy(NamedTuple):
    """A Privatizer; one draw of its noise has `scale` and `variance`; log_term > 0 asks for E."""

    local: bool
    separate_visits: bool
    kind: int
    scale: float
    variance: float
    log_term: float


class Work(NamedTuple):
    """Scratch: V (X,), and for H X A pairs side by side: counts (X, pairs), the others (pairs,).

    Arrays of their own, not rows of one: the compiler must see that they do not overlap.
    """

    V: Floats
    counts: Floats
    total: Floats
    first: Floats
    second: Floats
    third: Floats

    @classmethod
    def of(cls, X: int, pairs: int) -> Work:
        """Zeros."""
        return cls(np.zeros(X), np.zeros((X, pairs)), *(np.zeros(pairs) for _ in range(4)))


def compiled(function: Function) -> Function:
    """Compile for this machine; IEEE arithmetic, no reordering; kept on disk between runs."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))
