"""The least noise for batches of the local and of the central workflow (000, Fig. 2).

Local. Every user flips every bit of the own report with probability f (randomised response). The
alternative of 004, discrete Laplace noise on each counter, has at ratio q = f / (1 - f) exactly the
same losses, so it gives the same (epsilon, beta), and the variance 2 q / (1 - q)**2 a user where
flips have f (1 - f) / (1 - 2 f)**2 = q / (1 - q)**2: one half, since a user's counter is a bit and
a bit is all that flips need to hide. So flips are always chosen. (Flipping ones and zeros with
different probabilities would save 6 % at epsilon = 1 and one pair of cells, more at larger epsilon,
at the price of a variance that depends on the data.)

Central. Of discrete Laplace noise and of Binomial(N, 1/2) noise the one of less variance is chosen.
Laplace wins while few cells move (epsilon is then spent without beta), the binomial, which is the
Gaussian mechanism's discrete form with exact accounting and exact draws, for many: at epsilon = 1,
beta = 1e-5 variances are 7.8 and 28.8 for one pair of cells, 276 and 167 for six.
"""

import math
from functools import lru_cache

from riffle.common.accounting import bounds
from riffle.common.accounting.account import moves_of
from riffle.common.accounting.bounds import Steps
from riffle.common.accounting.calibrate import MARGIN
from riffle.common.accounting.gaussian import check_guarantee
from riffle.common.accounting.search import COARSE, FINE, CalibrationError, needed_bits, smallest
from riffle.common.noise import MAX_DRAWS, MAX_P_LOG2, CentralNoise, FairBits, Flips, Laplace

SCALE: int = 2**MAX_P_LOG2
UNIT, LARGEST_SCALE = 2**16, 2**20
"""Scales b are searched in units of 2^-16, up to 2^20."""


def calibrate_local(*, cells: int, epsilon: float, beta: float) -> Flips:
    """Fewest flips that make a report (epsilon, beta)-DP against everyone who reads it.

    Raises:
        CalibrationError: epsilon is too small.
    """
    check_guarantee(epsilon, beta)
    return _fewest_flips(cells, epsilon, beta)


def calibrate_central(*, cells: int, counters: int, epsilon: float, beta: float) -> CentralNoise:
    """Noise of least variance on every counter that makes them (epsilon, beta)-DP.

    Raises:
        CalibrationError: it takes more than MAX_DRAWS draws.
    """
    check_guarantee(epsilon, beta)
    candidates: list[CentralNoise] = []
    laplace = Laplace(_least_ratio(cells, epsilon, beta))
    # A draw takes 1 / (1 - q) words on either side of zero.
    if 2 * counters <= MAX_DRAWS * (1.0 - laplace.q):
        candidates.append(laplace)
    bits = needed_bits(0.5, cells, epsilon * (1.0 - MARGIN), beta)
    if bits * counters <= MAX_DRAWS:
        candidates.append(FairBits(bits))
    if not candidates:
        raise CalibrationError(
            f"epsilon={epsilon:.6g} takes {bits} bits of noise on each of {counters} counters, "
            f"more than the {MAX_DRAWS} that are drawn; ask for more epsilon"
        )
    return min(candidates, key=lambda noise: noise.variance(1))


@lru_cache(maxsize=4096)
def _fewest_flips(cells: int, epsilon: float, beta: float) -> Flips:
    least = _least_ratio(cells, epsilon, beta)
    # f = q / (1 + q), rounded up to the next multiple of 2^-32: more flips hide no less.
    flips = Flips(min(-(-least * SCALE // (SCALE + least)), SCALE // 2 - 1))
    # The bound at beta below `bounds.SMALLEST_DELTA` is loose, not alike for the nearest ratios.
    while bounds.epsilon([moves_of(flips, 1, cells)], beta) > epsilon:
        flips = Flips(flips.numerator + max(1, (SCALE // 2 - flips.numerator) >> COARSE))
    return flips


@lru_cache(maxsize=4096)
def _least_ratio(cells: int, epsilon: float, beta: float) -> int:
    """Smallest q 2^32 found at which `cells` pairs of steps are (epsilon, beta)-DP.

    Searched over the scale b = x / UNIT, q = exp(-1 / b), of which epsilon is nearly a power.
    """
    found = smallest(
        lambda x: bounds.epsilon([Steps(_numerator(x) / SCALE, cells)], beta),
        epsilon * (1.0 - MARGIN),
        math.ceil(min(2 * cells / epsilon, LARGEST_SCALE) * UNIT),
        LARGEST_SCALE * UNIT,
        FINE,
    )
    if found is None:
        raise CalibrationError(
            f"epsilon={epsilon:.6g} with {cells} cells takes noise of a scale above "
            f"{LARGEST_SCALE}, more than is drawn; ask for more epsilon"
        )
    return _numerator(found)


def _numerator(x: int) -> int:
    numerator = math.ceil(math.exp(-UNIT / x) * SCALE)
    return min(max(1, numerator), SCALE - 1)
