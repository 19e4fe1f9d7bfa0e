"""Calibration: the least noise that gives an (epsilon, beta) guarantee, and padding for it.

**Shuffle, exact.** A batch costs one ciphertext per noise bit that is 1 (1-bit), so `exact` looks
for the fewest expected 1-bits. Each noise bit is 1 with probability p. The search tries p = 2^-j
for j = 1..10 and rounds up to whole bits per user. If rounding adds more than the fraction WASTE,
the search also tries p = k / 2^32. A small p has about half the 1-bits of p = 1/2 at
the same variance. At large epsilon, p = 1/2 is better nevertheless.

**Shuffle, paper.** Paper 000 (section V, proof of Lemma 10) has epsilon' = epsilon / (3 H), beta' =
beta / (H X A) and tau = 96 log(2 / beta') / epsilon'^2. If n <= tau, each user adds ceil(tau / n)
fair bits to every counter. If n > tau, each user adds one bit with p = tau / (2 n). The papers
split epsilon as if replacing one user changed one counter in each layer and family. In fact two
counters change. But the constant 96 is so large that the exact guarantee is far below epsilon.

**Shuffle, conference.** Paper 003, section V, has the same noise with beta' = beta.

**Local** (paper 000, Fig. 2). Every user flips each bit of their own report with probability f
(randomised response). Paper 004 has discrete Laplace noise instead. With q = f / (1 - f), that
noise has the same losses as flips, but twice the variance.

**Central** (paper 000, Fig. 2). The noise is discrete Laplace or Binomial(N, 1/2), whichever has
the smaller variance. Laplace noise wins if one user changes few counters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, Literal, TypeVar, get_args

from riffle.common.accounting import loss_curve
from riffle.common.accounting.account import Account, BatchEvent, account, check_batch, moves_of
from riffle.common.accounting.binomial import LARGEST_EPSILON, fewest_slots
from riffle.common.accounting.least_noise import (
    COARSE,
    FINE,
    CalibrationError,
    check_guarantee,
    needed_bits,
    needed_numerator,
    smallest,
)
from riffle.common.accounting.loss_curve import Steps
from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.parameters import (
    MAX_BITS,
    MAX_DRAWS,
    MAX_P_LOG2,
    Aggregation,
    BatchNoise,
    CentralNoise,
    FairBits,
    Flips,
    Guarantee,
    Laplace,
    Noise,
    Padding,
    honest_reports,
)
from riffle.common.mechanism.sums import word_bits

N_co = TypeVar("N_co", bound=BatchNoise, covariant=True)

CalibrationName = Literal["exact", "paper", "conference"]

OVERFLOW_SHARE = 0.01
"""The share of beta that padding may spend."""

MARGIN = 1e-6
"""Noise is calibrated to epsilon * (1 - MARGIN), so machines that round differently accept it."""

LARGEST_LOG2 = 10
"""The smallest dyadic p to be tried is 2^-10."""

WASTE = 1e-3
"""If rounding up adds a larger share of 1-bits, a p that is not a power of two is tried too."""

LARGEST_BATCH = 10**12

SCALE: int = 2**MAX_P_LOG2
UNIT, LARGEST_SCALE = 2**16, 2**20
"""Laplace scales b are searched in units of 2^-16, up to 2^20."""


@dataclass(frozen=True, slots=True)
class Calibration(Generic[N_co]):
    """A batch's noise, padding and guarantee; with the aggregation `sums`, the bits of a word."""

    noise: N_co
    padding: Padding
    account: Account
    word_bits: int | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for a batch's noise. `tau` sets the papers' noise; None means `exact` noise."""

    layout: CounterLayout
    n: int
    required: Guarantee
    tau: int | None

    def is_drawable(self, noise: Noise) -> bool:
        return noise.bits * self.layout.counters <= MAX_DRAWS


def calibrate(
    layout: CounterLayout,
    n: int,
    required: Guarantee,
    calibration: CalibrationName = "exact",
    max_messages: int | None = None,
    aggregation: Aggregation = "messages",
) -> Calibration[Noise]:
    """Returns noise and padding for a batch of n reports in the shuffle model.

    "exact" gives the required guarantee with the fewest expected noise bits that are 1. "paper"
    gives the noise of paper 000, and "conference" the noise of paper 003. For both, the result's
    `account.epsilon_upper` is the epsilon that the noise guarantees. The aggregation "sums" has no
    padding, so it ignores `max_messages`.

    Raises CalibrationError if a report would be too large, if epsilon is too small for the
    accountant, or if a sum would not fit its word ("sums"). Raises ValueError for other faults.
    """
    epsilon, beta = required.epsilon, required.beta
    check_guarantee(epsilon, beta)
    check_batch(layout.cells, layout.counters, beta)
    if calibration not in (known := get_args(CalibrationName)):
        raise ValueError(f"calibration must be one of {', '.join(known)}; got {calibration!r}")
    split = calibration == "paper"
    tau = None if calibration == "exact" else paper_tau(epsilon, beta, layout.sizes, split=split)
    request = _Request(layout, n, required, tau)
    noise, padding = _plan(request)
    bits = None
    if aggregation == "sums":
        padding, bits = Padding(1, 0), _word_bits(n, noise)
    elif max_messages is not None and padding.messages > max_messages:
        raise _too_long(request, padding, max_messages)
    if not request.is_drawable(noise):
        draws = noise.bits * layout.counters
        enough = -(-n * draws // MAX_DRAWS)
        raise CalibrationError(
            f"a report in a batch of n={n} takes {draws} noise bits, more than the {MAX_DRAWS} "
            f"that a node draws; the bits fall like 1/n: make n at least about {enough}",
            enough / n,
        )
    fraction = required.dishonest_fraction
    event = BatchEvent(noise, padding, n, fraction, layout.cells, layout.counters, bits)
    result = account(event, beta)
    if tau is None and not result.epsilon_upper <= epsilon:
        raise CalibrationError(
            f"the noise gives epsilon={result.epsilon_upper:.9g} at beta={beta:g}, "
            f"not the requested {epsilon:.9g}; please report these arguments as a bug"
        )
    return Calibration(noise, padding, result, bits)


def _word_bits(n: int, noise: Noise) -> int:
    try:
        return word_bits(n, noise)
    except ValueError as error:
        raise CalibrationError(str(error)) from error


def _plan(request: _Request) -> tuple[Noise, Padding]:
    layout, n, required = request.layout, request.n, request.required
    honest = honest_reports(n, required.dishonest_fraction)
    noise = paper_noise(n, request.tau) if request.tau else _exact(request, honest)
    trials, overflow = noise.bits * layout.counters, OVERFLOW_SHARE * required.beta
    slots = fewest_slots(n, trials, noise.p, required.epsilon, overflow)
    return noise, Padding(layout.data_slots, slots)


def _exact(request: _Request, honest: int) -> Noise:
    """Returns the noise with the fewest expected 1-bits; ties go to the fewest bits to draw."""
    epsilon, beta = request.required.epsilon, request.required.beta
    demand = request.layout.cells, epsilon * (1.0 - MARGIN), beta * (1.0 - OVERFLOW_SHARE)
    needed = {j: needed_bits(2.0**-j, *demand) for j in range(1, LARGEST_LOG2 + 1)}
    dyadic = [Noise(-(-N // honest), 1, j) for j, N in needed.items()]
    # A small p needs more bits for the same number of ones, perhaps more than a node may draw.
    best = min(list(filter(request.is_drawable, dyadic)) or dyadic, key=_ones)
    fewest, N = min((N * 2.0**-j, N) for j, N in needed.items())
    if honest * best.bits * best.p <= fewest * (1.0 + WASTE):
        return best
    bits = -(-N // honest)
    # The p to be found gives about the same number of 1-bits as the nearest 2^-j.
    nearest = min(needed, key=lambda j: abs(math.log2(fewest / (honest * bits)) + j))
    guess = needed[nearest] * 2.0**-nearest / (honest * bits)
    k = needed_numerator(honest * bits, *demand, guess)
    finer = [] if k is None else [Noise(bits, k, MAX_P_LOG2)]
    return min([best, *filter(request.is_drawable, finer)], key=_ones)


def _ones(noise: Noise) -> tuple[float, int]:
    return noise.bits * noise.p, noise.bits


def _too_long(request: _Request, padding: Padding, max_messages: int) -> CalibrationError:
    required, fewest = request.required, _smallest_batch(request, max_messages)
    way_out = (
        f"the smallest n that works is {fewest}"
        if fewest
        else f"no n up to {LARGEST_BATCH:g} works: allow more messages"
    )
    return CalibrationError(
        f"a report in a batch of n={request.n} needs {padding.messages} messages, more than "
        f"the {max_messages} allowed; at epsilon={required.epsilon:g}, beta={required.beta:g} "
        + way_out,
        fewest and fewest / request.n,
    )


def _smallest_batch(request: _Request, max_messages: int) -> int | None:
    """Returns the smallest n with at most max_messages messages a report; None if above 10^12.

    Small jumps in the length of a report may make the answer slightly too large.
    """

    def fits(n: int) -> bool:
        return _plan(replace(request, n=n))[1].messages <= max_messages

    low, high = request.n, 2 * request.n
    while not fits(high):
        if high > LARGEST_BATCH:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def paper_tau(epsilon: float, beta: float, sizes: Sizes, *, split: bool = True) -> int:
    """Returns the papers' tau, rounded up: twice the expected number of 1s on a counter.

    With ``split``, beta is split over all (h, x, a), as in paper 000; paper 003 does not split it.

    Raises CalibrationError if tau is above 2^53, which is more than a report could draw.
    """
    per_counter = min(epsilon / (3 * sizes.H), LARGEST_EPSILON)  # its square must fit a double
    parts = sizes.H * sizes.X * sizes.A if split else 1
    log = math.log(2.0 * parts) - math.log(beta)
    if 96.0 * log >= MAX_BITS * per_counter**2:
        raise CalibrationError(
            f"epsilon={epsilon:.6g} at beta={beta:g} takes the papers' tau above 2^53, more than "
            "is drawn; ask for more epsilon"
        )
    return math.ceil(96.0 * log / per_counter**2)


def paper_noise(n: int, tau: int) -> Noise:
    """Returns the noise of one of n users for a tau of `paper_tau`. p is rounded up to k / 2^32."""
    if n <= tau:
        return Noise(bits=-(-tau // n), p_numerator=1, p_log2=1)
    numerator = -(-(tau << MAX_P_LOG2) // (2 * n))
    return Noise(bits=1, p_numerator=numerator, p_log2=MAX_P_LOG2)


@lru_cache(maxsize=4096)
def calibrate_local(cells: int, epsilon: float, beta: float) -> Flips:
    """Returns the flips of least probability f that make a single report (epsilon, beta)-DP.

    Raises CalibrationError if epsilon is too small.
    """
    check_guarantee(epsilon, beta)
    least = _least_ratio(cells, epsilon, beta)
    # f = q / (1 + q), rounded up to a multiple of 2^-32: a larger f gives no less privacy.
    flips = Flips(min(-(-least * SCALE // (SCALE + least)), SCALE // 2 - 1))
    # For beta below `loss_curve.SMALLEST_DELTA`, the bound is loose, and tiny changes of f move it.
    while loss_curve.epsilon([moves_of(flips, 1, cells)], beta) > epsilon:
        flips = Flips(flips.numerator + max(1, (SCALE // 2 - flips.numerator) >> COARSE))
    return flips


def calibrate_central(cells: int, counters: int, epsilon: float, beta: float) -> CentralNoise:
    """Returns the noise of least variance that makes all counters (epsilon, beta)-DP.

    Raises CalibrationError if the noise needs more than MAX_DRAWS draws.
    """
    check_guarantee(epsilon, beta)
    candidates: list[CentralNoise] = []
    laplace = Laplace(_least_ratio(cells, epsilon, beta))
    # A draw has two geometric variables. Each takes 1 / (1 - q) random words on average.
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
def _least_ratio(cells: int, epsilon: float, beta: float) -> int:
    """Returns q 2^32 for the least q at which ``Steps(q, cells)`` are (epsilon, beta)-DP.

    The search is over the scale b, where q = exp(-1 / b), because epsilon is almost a power of b.
    """
    scale = smallest(
        lambda x: loss_curve.epsilon([Steps(_numerator(x) / SCALE, cells)], beta),
        epsilon * (1.0 - MARGIN),
        math.ceil(min(2 * cells / epsilon, LARGEST_SCALE) * UNIT),
        LARGEST_SCALE * UNIT,
        FINE,
    )
    if scale is None:
        raise CalibrationError(
            f"epsilon={epsilon:.6g} with {cells} cells takes noise of a scale above "
            f"{LARGEST_SCALE}, more than is drawn; ask for more epsilon"
        )
    return _numerator(scale)


def _numerator(x: int) -> int:
    numerator = math.ceil(math.exp(-UNIT / x) * SCALE)
    return min(max(1, numerator), SCALE - 1)
