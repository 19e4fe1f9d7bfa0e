"""Random histories of one person, composed by Riffle and by an independent composer.

The composer below has nothing in common with `common.accounting`: it rounds every loss up (or down)
to a grid, multiplies transforms without a tilt, and adds (or subtracts) a bound on their error.
RIFFLE_HISTORIES says how many histories are drawn.
"""

import math
import os
import random
from collections import Counter
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import gammaln

from riffle.common.accounting import BatchEvent, repeated_user_guarantee
from riffle.common.mechanism.parameters import Noise, Padding

HISTORIES = int(os.environ.get("RIFFLE_HISTORIES", "40"))
GRID, M, BETA = 5e-5, 1 << 19, 1e-5
CUT, ROUNDING = 1e-13, 1e-12
"""Mass cut from a binomial's tails; a bound on the error of a cell's mass after all transforms."""

Spectrum = NDArray[np.complex128]


def losses(N: int, p: float, up: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Losses and masses of one move, where both outcomes are possible."""
    z = np.arange(N + 1)
    log_mass = gammaln(N + 1) - gammaln(z + 1) - gammaln(N - z + 1)
    mass = np.exp(log_mass + z * math.log(p) + (N - z) * math.log1p(-p))
    # Up: z against z + 1 of the shifted one. Down: the reverse.
    ratio = np.log((z[:-1] + 1) / (N - z[:-1])) + math.log1p(-p) - math.log(p)
    return (ratio, mass[:-1]) if up else (-ratio, mass[1:])


@lru_cache(maxsize=256)
def spectrum(N: int, p: float, above: bool) -> tuple[Spectrum, float]:
    """Transform of one move up and one down, and the mass without a finite loss."""
    product, infinite = np.ones(M // 2 + 1, dtype=np.complex128), 0.0
    for up in (True, False):
        loss, mass = losses(N, p, up)
        kept = mass > CUT / (N + 1)
        index = (np.ceil if above else np.floor)(loss[kept] / GRID).astype(np.int64)
        product = product * fft.rfft(np.bincount(index % M, mass[kept], M))
        infinite += 1.0 - float(mass[kept].sum())
    return product, infinite if above else 0.0


def bound(history: Counter[tuple[int, float, int]], overflow: float, above: bool) -> float:
    """Epsilon at BETA: an upper bound with ``above``, else a lower bound."""
    product, infinite, sign = np.ones(M // 2 + 1, dtype=np.complex128), 0.0, 1 if above else -1
    for (N, p, cells), times in history.items():
        one, lost = spectrum(N, p, above)
        product, infinite = product * one ** (cells * times), infinite + cells * times * lost
    mass = np.maximum(fft.irfft(product, M) + sign * ROUNDING, 0.0)[: M // 2]
    loss = GRID * np.arange(M // 2)

    def delta(epsilon: float) -> float:
        i = int(np.searchsorted(loss, epsilon, side="right"))
        spent = float(np.sum(mass[i:] * -np.expm1(epsilon - loss[i:])))
        return spent + infinite + (1.0 + math.exp(epsilon)) * overflow

    # Overflow makes delta rise again at large epsilon, so the first crossing is bracketed.
    steps = np.arange(0.0, 10.01, 0.125)
    below = [float(step) for step in steps if delta(step) <= BETA]
    if not below:
        return math.inf
    low, high = max(0.0, below[0] - 0.125), below[0]
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if delta(middle) > BETA else (low, middle)
    return high if above else low


def world(draw: random.Random) -> list[BatchEvent]:
    """Batches of several runs: their noise, size, dishonest fraction and counters differ."""
    events = []
    for _ in range(40):
        log2, cells, n = (
            draw.choice([1, 2, 4, 6]),
            draw.choice([2, 4, 6, 18]),
            draw.randint(60, 900),
        )
        p = 2.0**-log2
        wanted = cells * draw.uniform(20.0, 90.0)  # variance that gives epsilon of order 1
        bits = max(1, round(wanted / (n * p * (1.0 - p))))
        noise = Noise(bits, 1, log2)
        slots = round(300 * bits * p) + draw.choice([60, 90, 120]) + 12 * round(bits**0.5 * 3)
        gamma = draw.choice([0.0, 0.05, 0.1])
        events.append(BatchEvent(noise, Padding(6, slots), n, gamma, cells, 300))
    return events


def moves_of(event: BatchEvent) -> tuple[int, float, int]:
    assert isinstance(event.noise, Noise)
    return event.honest * event.noise.bits, event.noise.p, event.cells


def test_composed_epsilon_is_within_one_percent_of_independent_bounds() -> None:
    draw = random.Random(20)
    events = world(draw)
    worst, finite = 0.0, 0
    for _ in range(HISTORIES):
        history = [draw.choice(events) for _ in range(draw.randint(1, 6))]
        composed = repeated_user_guarantee(history, BETA).epsilon
        moves = Counter(map(moves_of, history))
        overflow = math.fsum(event.overflow for event in history)
        low, high = (bound(moves, overflow, above) for above in (False, True))
        if math.inf in (low, high):
            assert composed > 9.0 or low < composed
            continue
        finite += 1
        assert low <= composed <= high, (history, low, composed, high)
        worst = max(worst, composed / low - 1.0)
    assert finite > 0.8 * HISTORIES
    assert worst < 0.01
    print(f"{finite} of {HISTORIES} histories are finite; above the lower bound: {worst:.2%}")
