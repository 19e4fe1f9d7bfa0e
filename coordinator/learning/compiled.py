"""The decorator of loops that numba compiles; plain Python runs the same text where it is absent.

numba's cache on disk sees a change of the file that a function stands in, and no change of another
file. So a compiled function calls compiled functions and reads constants of its own file only.
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
    """Compiles for this machine, with IEEE arithmetic and without reordering; cached on disk."""
    try:
        from numba import njit  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return function
    return cast(Function, njit(cache=True, error_model="numpy")(function))
