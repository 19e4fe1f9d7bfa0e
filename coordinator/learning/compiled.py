"""Compiles loops with numba. Without numba, plain Python runs the same code.

numba's cache on disk notices changes only in the file that holds a function. So a compiled function
uses only compiled functions and constants of its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles a function for this machine, without reordering its arithmetic; caches on disk."""
    try:
        from numba import njit  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return function
    return cast(Function, njit(cache=True, error_model="numpy")(function))
