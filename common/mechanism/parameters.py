"""Parameters of a batch: the noise of each trust model, the padding of a report, the guarantee.

**Shuffle** (`Noise`). Each user adds `bits` independent Bernoulli(p) bits to every counter, as in
the Shuffle Privatizer of paper 000, section V. A bit that is 1 becomes one message, the index of
its counter; a bit that is 0 is not sent. If all users together draw N bits for a counter, this
counter's noise is Binomial(N, p). p is an integer over a power of two, so every node draws from
exactly the same distribution.

**Padding** fixes the number of messages of a report. A varying number would tell everyone who sees
the upload something about the user's data. Data and noise have separate slots. Only noise is ever
dropped, and whether this happens does not depend on the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

Trust = Literal["shuffle", "local", "central"]
"""The parties that users trust: with ``shuffle``, the shuffler and a share of the users; with
``local``, none; with ``central``, the coordinator."""

Aggregation = Literal["messages", "sums"]
"""How counts reach the analyzer: as permuted messages, or as one masked sum (module `sums`)."""

DEFAULT_AGGREGATIONS: tuple[Aggregation, ...] = ("messages",)
"""Aggregations that an owner or a shuffler accepts by default; `sums` has to be allowed by name."""

MAX_P_LOG2 = 32
MAX_BITS = 2**53
MAX_REPORTS = 2**53
MAX_DRAWS = 1 << 28
"""The most noise bits of one report, over all counters; drawing this many takes seconds."""


@dataclass(frozen=True, slots=True)
class Noise:
    """A user's noise: `bits` bits per counter, each 1 with probability p = p_numerator / 2**p_log2.

    Raises ValueError unless 1 <= bits <= 2**53, 0 < p < 1 and 1 <= p_log2 <= 32.
    """

    term: ClassVar[float] = 1.0  # Bernstein's b (`BatchNoise`): a bit is at most one
    bits: int
    p_numerator: int
    p_log2: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"noise bits a counter must be 1 to 2**53, got {self.bits}")
        if not 1 <= self.p_log2 <= MAX_P_LOG2:
            raise ValueError(f"p_log2 must be 1 to {MAX_P_LOG2}, got {self.p_log2}")
        if not 0 < self.p_numerator < 2**self.p_log2:
            got = f"{self.p_numerator}/2**{self.p_log2}"
            raise ValueError(f"p must lie strictly between 0 and 1, got {got}")

    @property
    def p(self) -> float:
        """The probability of a 1, exact in a double because p_log2 <= 32."""
        return math.ldexp(self.p_numerator, -self.p_log2)

    def mean(self, n: int) -> float:
        """Returns a counter's expected noise if all n reports are honest: n * bits * p."""
        return n * self.bits * self.p

    def variance(self, n: int) -> float:
        """Returns a counter's noise variance if all n users are honest: n * bits * p * (1 - p)."""
        return n * self.bits * self.p * (1.0 - self.p)


@dataclass(frozen=True, slots=True)
class Flips:
    """Randomised response of a user: each bit is flipped with probability f = numerator / 2**32.

    Raises ValueError unless 0 < numerator < 2**31.
    """

    numerator: int

    def __post_init__(self) -> None:
        if not 0 < self.numerator < 2 ** (MAX_P_LOG2 - 1):
            raise ValueError(f"bits flip with f between 0 and 1/2, got {self.numerator}/2**32")

    @property
    def f(self) -> float:
        """The probability of a flip, exact in a double."""
        return math.ldexp(self.numerator, -MAX_P_LOG2)

    @property
    def term(self) -> float:
        """Bernstein's b (`BatchNoise`): the largest distance of a debiased bit from its mean."""
        return (1.0 - self.f) / (1.0 - 2.0 * self.f)

    def mean(self, n: int) -> float:
        """Returns the expected number of 1s among n bits that were 0 before the flips: n f."""
        return n * self.f

    def variance(self, n: int) -> float:
        """Returns a debiased count's variance with any data: n f (1 - f) / (1 - 2 f)**2."""
        return n * self.f * (1.0 - self.f) / (1.0 - 2.0 * self.f) ** 2


@dataclass(frozen=True, slots=True)
class Laplace:
    """Discrete Laplace noise of a batch: Pr[Z = z] is proportional to q**|z|.

    The ratio q is numerator / 2**32. Raises ValueError unless 0 < numerator < 2**32.
    """

    numerator: int

    def __post_init__(self) -> None:
        if not 0 < self.numerator < 2**MAX_P_LOG2:
            raise ValueError(f"q must lie strictly between 0 and 1, got {self.numerator}/2**32")

    @property
    def q(self) -> float:
        """The ratio Pr[Z = z + 1] / Pr[Z = z] for z >= 0, exact in a double."""
        return math.ldexp(self.numerator, -MAX_P_LOG2)

    @property
    def term(self) -> float:
        """The b of Bernstein's bound (`BatchNoise`): 3 c with c = 1 / (1 - q).

        A draw Z of variance V has log E exp(x Z) <= V x**2 / (2 - 2 c x). The bound follows.
        """
        return 3.0 / (1.0 - self.q)

    def mean(self, n: int) -> float:
        """Returns 0, whatever n is."""
        return 0.0

    def variance(self, n: int) -> float:
        """Returns the noise's variance, 2 q / (1 - q)**2, for a batch of any size n."""
        return 2.0 * self.q / (1.0 - self.q) ** 2


@dataclass(frozen=True, slots=True)
class FairBits:
    """Binomial(bits, 1/2) noise of a batch. Raises ValueError unless 1 <= bits <= 2**53."""

    term: ClassVar[float] = 1.0  # Bernstein's b (`BatchNoise`): a bit is at most one
    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"fair bits a counter must be 1 to 2**53, got {self.bits}")

    def mean(self, n: int) -> float:
        """Returns bits / 2, whatever n is."""
        return self.bits / 2.0

    def variance(self, n: int) -> float:
        """Returns bits / 4, whatever n is."""
        return self.bits / 4.0


CentralNoise = Laplace | FairBits
BatchNoise = Noise | Flips | CentralNoise
"""Noise of a batch. Let V be its variance and b its ``term``. A counter's noise is off its mean by
more than s with probability at most 2 exp(-s**2 / (2 V + 2 b s / 3)) (Bernstein). The same bound
holds for a sum of independent counters if V is the sum of their variances."""


@dataclass(frozen=True, slots=True)
class Padding:
    """A report's slots: `data_slots` for data and `noise_slots` for noise, both at least 0."""

    data_slots: int
    noise_slots: int

    def __post_init__(self) -> None:
        if self.data_slots < 0 or self.noise_slots < 0:
            got = f"data_slots={self.data_slots}, noise_slots={self.noise_slots}"
            raise ValueError(f"padding slots must not be negative, got {got}")

    @property
    def messages(self) -> int:
        """The number L of messages of every report: data_slots + noise_slots."""
        return self.data_slots + self.noise_slots


@dataclass(frozen=True, slots=True)
class Guarantee:
    """(epsilon, beta)-DP for each user if at most `dishonest_fraction` of reports are dishonest."""

    epsilon: float
    beta: float
    dishonest_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not self.epsilon >= 0.0:
            raise ValueError(f"epsilon must not be negative, got {self.epsilon}")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}")
        check_fraction(self.dishonest_fraction)


def check_fraction(dishonest_fraction: float) -> None:
    """Raises ValueError unless 0 <= dishonest_fraction < 1."""
    if not 0.0 <= dishonest_fraction < 1.0:
        raise ValueError(f"dishonest_fraction must lie in [0, 1), got {dishonest_fraction}")


def honest_reports(n: int, dishonest_fraction: float) -> int:
    """Returns how many of n reports count as honest: n - floor(dishonest_fraction * n).

    The fraction is read as its shortest decimal, and the product is exact, so all roles agree. For
    example, 0.3 of 10 is 3, although the double 0.3 is below 3/10.
    """
    if n < 1:
        raise ValueError(f"a batch needs n >= 1 reports, got {n}")
    if n > MAX_REPORTS:
        raise ValueError("a batch has at most 2**53 reports")
    check_fraction(dishonest_fraction)
    return n - math.floor(Fraction(str(dishonest_fraction)) * n)
