"""Tilted convolution by discrete Fourier transforms, with a bound on its rounding errors.

Higham, Accuracy and Stability of Numerical Algorithms (2nd ed.), Theorem 24.2: the computed
transform of length M has a 2-norm error of at most log2(M) eta / (1 - log2(M) eta) times its norm,
eta = mu + gamma_4 (sqrt(2) + mu), mu the error of the twiddle factors. With mu <= u that is below
8 u log2(M); the same bound serves the inverse transform. Carried through powers and products of
spectra and through the inverse, it gives one number that no cell's error exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from riffle.common.accounting.grid import GridLosses, binned
from riffle.common.accounting.losses import UNIT_ROUNDOFF, FloatArray
from riffle.common.accounting.tilt import log_mgf, tilted

ComplexArray = NDArray[np.complex128]

GridPart = tuple[GridLosses, int]
"""Grid losses of one move, and how many such moves there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Convolved:
    """Composition on M cells: probability mass[i] exp(log_scale - tilt loss[i]) at loss[i].

    Every mass is known to within `error`.
    """

    loss: FloatArray
    mass: FloatArray
    tilt: float
    log_scale: float
    error: float


def convolve(parts: Sequence[GridPart], tilt: float, first: int, M: int) -> Convolved:
    """Circular convolution of the tilted parts on the M grid losses from first * delta on."""
    spectrum: ComplexArray = np.ones(M // 2 + 1, dtype=np.complex128)
    error: FloatArray = np.zeros(M // 2 + 1)
    for part, count in parts:
        spectrum, error = _times(spectrum, error, _tilted(part, tilt, M), count)
    mass = np.roll(fft.irfft(spectrum, M), -(first % M))
    back = _transform_error(M) * math.sqrt(2.0 * float(np.sum(np.abs(spectrum) ** 2)) / M)
    return Convolved(
        loss=np.arange(first, first + M).astype(np.float64) * parts[0][0].delta,
        mass=mass.astype(np.float64),
        tilt=tilt,
        log_scale=sum(count * log_mgf(part.mass, part.loss, tilt) for part, count in parts),
        # Half of the spectrum is kept; the inverse averages over all of it.
        error=2.0 * float(error.sum()) / M + back,
    )


def _tilted(part: GridLosses, tilt: float, M: int) -> FloatArray:
    """mass exp(tilt loss), folded onto M cells and normalised to one."""
    weight, _ = tilted(part.mass, tilt * part.loss)
    return binned(part.index % M, weight / weight.sum(), M)


def _times(
    spectrum: ComplexArray, error: FloatArray, mass: FloatArray, count: int
) -> tuple[ComplexArray, FloatArray]:
    """The spectrum times the mass's transform to the power count, and the new error bound."""
    M = len(mass)
    factor = fft.rfft(mass).astype(np.complex128)
    # A coefficient's error is at most the 2-norm of all coefficients' errors.
    one = _transform_error(M) * math.sqrt(M * float(np.sum(mass * mass)))
    size = np.abs(factor) + one
    power = size ** (count - 1)
    powered = count * one * power + (8 * count + 1024) * UNIT_ROUNDOFF * power * size
    total = np.abs(spectrum) * powered + error * (power * size + powered)
    return spectrum * factor**count, total


def _transform_error(M: int) -> float:
    return 8.0 * UNIT_ROUNDOFF * math.log2(M)
