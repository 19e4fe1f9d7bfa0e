"""The least noise that gives an (epsilon, beta), and the padding that goes with it.

Ciphertexts are what a batch costs, and one 1-bit is one ciphertext, so `exact` looks for the fewest
expected 1-bits: over p = 2^-j, j = 1..10, with the bits a user that its N takes, and where whole
bits a user waste more than WASTE of the ones, over p = k / 2^32 with the bits that the best 2^-j
takes (one bit a user in large batches). Small p cost half the messages of fair bits at the same
variance; at large epsilon fair bits win, because a counter at zero gives the user away.

beta is split: OVERFLOW_SHARE goes to noise without a slot, the rest to composition. At H = 6,
epsilon = 1, n = 4096 halving the overflow share adds about one slot of 100, while what composition
lacks at 1/100 costs 0.06 % of epsilon, a tenth of a percent of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from riffle.common.accounting.account import Account, account, check_batch
from riffle.common.accounting.gaussian import check_guarantee
from riffle.common.accounting.overflow import fewest_slots
from riffle.common.accounting.paper import paper_noise, paper_tau
from riffle.common.accounting.search import CalibrationError, needed_bits, needed_numerator
from riffle.common.counters import Sizes
from riffle.common.noise import MAX_DRAWS, MAX_P_LOG2, BatchNoise, Noise, Padding, honest_reports

N_co = TypeVar("N_co", bound=BatchNoise, covariant=True)

CalibrationName = Literal["exact", "paper"]

OVERFLOW_SHARE = 0.01
"""Share of beta that padding may take."""

MARGIN = 1e-6
"""Noise aims at epsilon (1 - MARGIN), so that no other machine's rounding refuses it."""

LARGEST_LOG2 = 10
"""Dyadic p are searched from 1/2 down to 2^-10."""

WASTE = 1e-3
"""Share of the 1-bits above which p off the dyadic grid is tried."""

LARGEST_BATCH = 10**12


@dataclass(frozen=True, slots=True)
class Calibration(Generic[N_co]):
    """Noise and padding of every report, and the guarantee that they give."""

    noise: N_co
    padding: Padding
    account: Account


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked of a batch; `tau` is the papers' tau, or None for exact calibration."""

    n: int
    dishonest_fraction: float
    cells: int
    counters: int
    data_slots: int
    epsilon: float
    beta: float
    tau: int | None

    @property
    def target(self) -> float:
        return self.epsilon * (1.0 - MARGIN)

    @property
    def beta_composition(self) -> float:
        return self.beta * (1.0 - OVERFLOW_SHARE)


def calibrate(
    *,
    n: int,
    dishonest_fraction: float,
    cells: int,
    counters: int,
    data_slots: int,
    epsilon: float,
    beta: float,
    calibration: CalibrationName = "exact",
    max_messages: int | None = None,
    sizes: Sizes | None = None,
) -> Calibration[Noise]:
    """Noise and padding for a batch of n reports; `sizes` is needed for "paper" alone.

    "exact" gives (epsilon, beta)-DP with the fewest expected 1-bits. "paper" gives the papers'
    noise, whatever its exact guarantee (`account.epsilon_upper`) turns out to be.

    Raises ValueError for impossible arguments, and CalibrationError when a report would need more
    than max_messages messages or MAX_DRAWS noise bits, or epsilon is too small to be accounted for.
    """
    check_guarantee(epsilon, beta)
    check_batch(cells, counters, beta)
    tau = _tau(calibration, epsilon, beta, sizes)
    request = _Request(n, dishonest_fraction, cells, counters, data_slots, epsilon, beta, tau)
    noise, padding = _plan(request)
    if max_messages is not None and padding.messages > max_messages:
        raise _too_long(request, padding, max_messages)
    if not _drawable(request, noise):
        raise _too_slow(request, noise.bits * counters)
    return Calibration(noise, padding, _achieved(request, noise, padding))


def _tau(calibration: str, epsilon: float, beta: float, sizes: Sizes | None) -> int | None:
    if calibration == "exact":
        return None
    if calibration != "paper":
        raise ValueError(f"calibration must be 'exact' or 'paper', got {calibration!r}")
    if sizes is None:
        raise ValueError("calibration 'paper' needs sizes: its tau depends on X, A and H")
    return paper_tau(epsilon, beta, sizes)


def _plan(request: _Request) -> tuple[Noise, Padding]:
    honest = honest_reports(request.n, request.dishonest_fraction)
    noise = paper_noise(request.n, request.tau) if request.tau else _exact(request, honest)
    slots = fewest_slots(
        request.n,
        noise.bits * request.counters,
        noise.p,
        request.epsilon,
        OVERFLOW_SHARE * request.beta,
    )
    return noise, Padding(request.data_slots, slots)


def _exact(request: _Request, honest: int) -> Noise:
    """Noise with the fewest expected 1-bits; of equals, the one with the fewest bits to draw."""
    needed = {
        j: needed_bits(2.0**-j, request.cells, request.target, request.beta_composition)
        for j in range(1, LARGEST_LOG2 + 1)
    }
    dyadic = [Noise(-(-N // honest), 1, j) for j, N in needed.items()]
    # Small p takes more bits for the same ones; what no node may draw is no candidate.
    best = min([noise for noise in dyadic if _drawable(request, noise)] or dyadic, key=_ones)
    fewest, N = min((N * 2.0**-j, N) for j, N in needed.items())
    if honest * best.bits * best.p <= fewest * (1.0 + WASTE):
        return best
    bits = -(-N // honest)
    # The ones needed at the nearest 2^-j are nearly those needed at the p that is sought.
    nearest = min(needed, key=lambda j: abs(math.log2(fewest / (honest * bits)) + j))
    guess = needed[nearest] * 2.0**-nearest / (honest * bits)
    k = needed_numerator(
        honest * bits, request.cells, request.target, request.beta_composition, guess
    )
    finer = [] if k is None else [Noise(bits, k, MAX_P_LOG2)]
    return min([best, *(noise for noise in finer if _drawable(request, noise))], key=_ones)


def _drawable(request: _Request, noise: Noise) -> bool:
    return noise.bits * request.counters <= MAX_DRAWS


def _ones(noise: Noise) -> tuple[float, int]:
    return noise.bits * noise.p, noise.bits


def _achieved(request: _Request, noise: Noise, padding: Padding) -> Account:
    """The account of what is about to be promised; exact calibration must meet it."""
    achieved = account(
        noise,
        padding,
        n=request.n,
        dishonest_fraction=request.dishonest_fraction,
        cells=request.cells,
        counters=request.counters,
        beta=request.beta,
    )
    if request.tau is None and not achieved.meets(request.epsilon, request.beta):
        raise CalibrationError(
            f"the noise found gives epsilon={achieved.epsilon_upper:.9g} at beta={request.beta:g}, "
            f"not the {request.epsilon:.9g} asked for; please report these arguments as a bug"
        )
    return achieved


def _too_long(request: _Request, padding: Padding, max_messages: int) -> CalibrationError:
    fewest = _smallest_batch(request, max_messages)
    way_out = (
        f"the smallest n that works is {fewest}"
        if fewest
        else f"no n up to {LARGEST_BATCH:g} works: allow more messages"
    )
    return CalibrationError(
        f"a report in a batch of n={request.n} needs {padding.messages} messages, more than the "
        f"{max_messages} allowed; at epsilon={request.epsilon:g}, beta={request.beta:g} {way_out}",
        fewest and fewest / request.n,
    )


def _too_slow(request: _Request, draws: int) -> CalibrationError:
    enough = -(-request.n * draws // MAX_DRAWS)
    return CalibrationError(
        f"a report in a batch of n={request.n} takes {draws} noise bits, more than the {MAX_DRAWS} "
        f"that a node draws; the bits fall like 1/n: make n at least about {enough}",
        enough / request.n,
    )


def _smallest_batch(request: _Request, max_messages: int) -> int | None:
    """Smallest n whose reports need at most max_messages messages; None above 10^12.

    A report's length falls with n except for jumps of a slot or so where a whole bit a user is
    saved; the answer works, and no smaller n that bisection tried does.
    """
    low, high = request.n, 2 * request.n
    while not _fits(request, high, max_messages):
        if high > LARGEST_BATCH:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits(request, middle, max_messages)
        low, high = (low, middle) if fits else (middle, high)
    return high


def _fits(request: _Request, n: int, max_messages: int) -> bool:
    return _plan(replace(request, n=n))[1].messages <= max_messages
