"""Two sources of randomness, with two types that no function can confuse.

`SystemRandomness` reads the operating system's CSPRNG. All randomness that protects people (noise
bits, reward bits, policy draws, the shuffler's permutation) comes from it. `SeededRandomness` is
for experiments and for the test entry point. A stream's key is the (run, batch, slot, purpose) of a
draw, never its order of arrival. A deployed node refuses a seeded stream.
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt


class ByteSource(Protocol):
    """A source of uniformly random bytes, such as a keystream."""

    def read(self, size: int) -> bytes:
        """Returns the next ``size`` bytes."""


@dataclass(frozen=True, slots=True)
class SystemRandomness:
    """The system's CSPRNG. It has no state of its own, so threads may share it without a lock."""

    def read(self, size: int) -> bytes:
        """Returns ``size`` uniformly random bytes."""
        return os.urandom(size)


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """A reproducible stream for experiments: PCG64 from a SeedSequence.

    `keyed` makes a stream. Streams with different keys are independent.
    """

    generator: np.random.Generator = field(repr=False)

    @classmethod
    def keyed(cls, seed: int, *key: str | int) -> "SeededRandomness":
        """Returns the stream of ``key`` under ``seed``; the key enters through its SHA-256."""
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
    """Returns 1 with probability ``mean`` in [0, 1] (exact to 2**-53), else 0."""
    draw = int.from_bytes(randomness.read(8), "little") >> 11
    return int(draw < mean * (1 << 53))


def categorical(randomness: Randomness, cumulative: npt.NDArray[np.float64]) -> int:
    """Returns an index drawn by cumulative probabilities (X,), exact to 2**-53."""
    draw = (int.from_bytes(randomness.read(8), "little") >> 11) / (1 << 53)
    return min(int(cumulative.searchsorted(draw, side="right")), cumulative.size - 1)


def _spawn_key(key: tuple[str | int, ...]) -> tuple[int, ...]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4))
