"""Two sources of randomness that no function can mistake for one another.

`SystemRandomness` reads the operating system's CSPRNG. All randomness that protects people
(noise bits, reward bits, policy draws, the shuffler's permutation) comes from it.
`SeededRandomness` is for experiments and for the test entry point: a SeedSequence keyed by what
the draw is for (run, batch, slot, purpose), never by arrival order. A deployed node refuses it.
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


class ByteSource(Protocol):
    """Anything that yields uniformly random bytes, such as a keystream."""

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes."""


@dataclass(frozen=True, slots=True)
class SystemRandomness:
    """The system's CSPRNG. Has no state of its own, so it can be shared and needs no lock."""

    def read(self, size: int) -> bytes:
        """``size`` uniformly random bytes."""
        return os.urandom(size)


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """A reproducible stream for experiments: PCG64 from a SeedSequence.

    Build it with `keyed`; two streams with different keys are independent.
    """

    generator: np.random.Generator = field(repr=False)

    @classmethod
    def keyed(cls, seed: int, *key: str | int) -> "SeededRandomness":
        """The stream of ``key`` under ``seed``; strings enter through their SHA-256."""
        return cls(generator_for(seed, *key))

    def read(self, size: int) -> bytes:
        """``size`` pseudo-random bytes, the next of this stream."""
        return self.generator.bytes(size)


Randomness = SystemRandomness | SeededRandomness


def generator_for(seed: int, *key: str | int) -> np.random.Generator:
    """NumPy generator of a simulation's draw, keyed by what the draw is for.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"a seed must not be negative, got {seed}")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_spawn_key(key)))


def word(randomness: Randomness) -> int:
    """One uniform 32-bit word."""
    return int.from_bytes(randomness.read(4), "little")


def bernoulli(randomness: Randomness, mean: float) -> int:
    """One bit with probability ``mean`` in [0, 1], to 2**-53."""
    draw = int.from_bytes(randomness.read(8), "little") >> 11
    return int(draw < mean * (1 << 53))


def categorical(randomness: Randomness, cumulative: npt.NDArray[np.float64]) -> int:
    """Index drawn by cumulative probabilities (X,), to 2**-53."""
    draw = (int.from_bytes(randomness.read(8), "little") >> 11) / (1 << 53)
    return min(int(cumulative.searchsorted(draw, side="right")), cumulative.size - 1)


def _spawn_key(key: tuple[str | int, ...]) -> tuple[int, ...]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4))
