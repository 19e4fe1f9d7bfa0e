"""Two sources of randomness: the operating system's CSPRNG, and seeded streams.

All noise bits, reward bits and policy draws that protect people come from `SystemRandomness`.
`SeededRandomness` is for experiments and tests, and a deployed node refuses it.

`draw_counts` draws exact Binomial(bits, p) noise for many counters from few random bytes, by
inversion. Let F(j) = Pr[at most j ones] among ``bits`` Bernoulli(p) bits, p = k / 2^l. Let U be
uniform in [0, 1), an endless string of random bits. The number of j with F(j) <= U has exactly the
binomial law. The first 16 bits of U usually decide this number; if not, `draw_counts` reads further
bits. F(j) times 2^(l * bits) is an integer, so all comparisons are exact. These integers grow with
``bits``, so noise is drawn in blocks of at most `BLOCK` bits.
"""

import hashlib
import os
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import comb
from typing import Protocol

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.parameters import Noise

BLOCK = 256
DRAWS_AT_ONCE = 1 << 20
FIRST_BITS, MORE_BITS = 16, 64
OPEN = 0xFFFF
"""Marks values of U's first bits that do not decide the number of ones."""


class ByteSource(Protocol):
    """A source of uniformly random bytes, such as a keystream."""

    def read(self, size: int) -> bytes:
        """Returns the next ``size`` bytes."""


@dataclass(frozen=True, slots=True)
class SystemRandomness:
    """The system's CSPRNG. The object has no state, so threads may share it without a lock."""

    def read(self, size: int) -> bytes:
        """Returns ``size`` uniformly random bytes."""
        return os.urandom(size)


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """A reproducible stream for experiments: PCG64 from a SeedSequence.

    `keyed` makes a stream. Its key says what the draws are for, such as (run, batch, slot,
    purpose). Streams with different keys are independent.
    """

    generator: np.random.Generator = field(repr=False)

    @classmethod
    def keyed(cls, seed: int, *key: str | int) -> "SeededRandomness":
        """Returns the stream of ``key`` under ``seed``; SHA-256 of the key selects the stream."""
        return cls(generator_for(seed, *key))

    def read(self, size: int) -> bytes:
        """Returns the next ``size`` pseudo-random bytes of this stream."""
        return self.generator.bytes(size)


Randomness = SystemRandomness | SeededRandomness


def generator_for(seed: int, *key: str | int) -> np.random.Generator:
    """Returns the NumPy generator of ``seed`` for one purpose, which ``key`` names.

    Raises ValueError if seed < 0.
    """
    if seed < 0:
        raise ValueError(f"a seed must not be negative, got {seed}")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_spawn_key(key)))


def word(randomness: Randomness) -> int:
    """Returns one uniform 32-bit word."""
    return int.from_bytes(randomness.read(4), "little")


def bernoulli(randomness: Randomness, mean: float) -> int:
    """Returns 1 with probability ``mean`` in [0, 1], exact to 2**-53, and otherwise 0."""
    draw = int.from_bytes(randomness.read(8), "little") >> 11
    return int(draw < mean * (1 << 53))


def categorical(randomness: Randomness, cumulative: npt.NDArray[np.float64]) -> int:
    """Returns a random i in 0..X-1 with Pr[at most i] = ``cumulative[i]``, exact to 2**-53."""
    draw = (int.from_bytes(randomness.read(8), "little") >> 11) / (1 << 53)
    return min(int(cumulative.searchsorted(draw, side="right")), cumulative.size - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Law:
    """A binomial law, with F, U and ``bits`` as in the module's docstring. ``cumulative[j]`` is
    F(j) 2^scale for j < ``bits``. ``ones[u]`` is the number of ones if U's first 16 bits are u. If
    u does not decide the number, ``ones[u]`` is `OPEN`."""

    cumulative: tuple[int, ...]
    scale: int
    ones: npt.NDArray[np.uint16]

    def settle(self, first: int, randomness: ByteSource) -> int:
        """Returns the number of ones. Reads more bits of the uniform U until they decide it."""
        low, high, known, drawn = 0, 1, first, FIRST_BITS
        while low != high:
            word = int.from_bytes(randomness.read(MORE_BITS // 8), "little")
            known, drawn = known << MORE_BITS | word, drawn + MORE_BITS
            low = bisect_right(self.cumulative, (known << self.scale) >> drawn)
            high = bisect_right(self.cumulative, (((known + 1) << self.scale) - 1) >> drawn)
        return low


def draw_counts(counters: int, noise: Noise, randomness: ByteSource) -> Ints:
    """Returns each counter's noise (counters,): the number of ones among its Bernoulli(p) bits."""
    blocks, rest = divmod(noise.bits, BLOCK)
    block, at_once = replace(noise, bits=BLOCK), max(1, DRAWS_AT_ONCE // counters)
    counts = np.zeros(counters, dtype=np.int64)
    for start in range(0, blocks, at_once):
        shape = min(at_once, blocks - start), counters
        counts += _draw(block, shape, randomness).sum(axis=0, dtype=np.int64)
    if rest:
        counts += _draw(replace(noise, bits=rest), (1, counters), randomness)[0]
    return counts


def _draw(noise: Noise, shape: tuple[int, int], randomness: ByteSource) -> npt.NDArray[np.uint16]:
    law, size = _law(noise), shape[0] * shape[1]
    first = np.frombuffer(randomness.read(size * FIRST_BITS // 8), dtype="<u2")
    ones: npt.NDArray[np.uint16] = law.ones[first]
    for place in np.flatnonzero(ones == OPEN):
        ones[place] = law.settle(int(first[place]), randomness)
    return ones.reshape(shape)


@lru_cache(maxsize=64)
def _law(noise: Noise) -> _Law:
    B, k, zero = noise.bits, noise.p_numerator, (1 << noise.p_log2) - noise.p_numerator
    scale, total, cumulative = noise.p_log2 * B, 0, list[int]()
    for j in range(B):
        total += comb(B, j) * k**j * zero ** (B - j)
        cumulative.append(total)
    # F(j) 2^16, rounded down and up. U's first bits u decide unless an F(j) 2^16 is in (u, u + 1).
    down = [(F << FIRST_BITS) >> scale for F in cumulative]
    up = [-((-F << FIRST_BITS) >> scale) for F in cumulative]
    u = np.arange(1 << FIRST_BITS)
    least, most = np.searchsorted(up, u, side="right"), np.searchsorted(down, u, side="right")
    return _Law(tuple(cumulative), scale, np.where(least == most, least, OPEN).astype(np.uint16))


def _spawn_key(key: tuple[str | int, ...]) -> tuple[int, ...]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4))
