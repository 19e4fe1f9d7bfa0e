"""The three workflows of paper 000, Fig. 2, which differ in what a report holds.

- ``shuffle`` trusts the shuffler and a share of the users. A report is L messages of one index
  each; all users add noise (`common.mechanism.shuffle_model`). Or a report is one masked vector
  (`common.mechanism.sums`).
- ``local`` trusts nobody. A report is one message with a bit for each counter, flipped at random
  (`common.mechanism.local_model`).
- ``central`` trusts the coordinator. A report is one message of raw indices; the coordinator adds
  noise to their counts (`common.mechanism.central_model`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism import central_model, local_model, shuffle_model, sums
from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.parameters import BatchNoise, Flips, Noise, Padding, Trust
from riffle.common.mechanism.randomness import Randomness

Report = npt.NDArray[np.integer[Any]]
"""A report before it is sealed: the `Symbols` of its L messages or, in `sums`, a vector (C,)."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """A plaintext's format: ``count`` unsigned big-endian integers of ``width`` bytes each."""

    count: int
    width: int

    @classmethod
    def of(cls, trust: Trust, layout: CounterLayout) -> "Symbols":
        """Returns the format of a message under a trust model."""
        return {
            "shuffle": cls(1, layout.width),
            "local": cls(local_model.report_bytes(layout.counters), 1),
            "central": cls(layout.data_slots, layout.width),
        }[trust]

    @property
    def size(self) -> int:
        """The size of the plaintext in bytes."""
        return self.count * self.width

    def read(self, plaintexts: bytes) -> Ints:
        """Returns the symbols (messages, count) of concatenated plaintexts."""
        digits = np.frombuffer(plaintexts, dtype=np.uint8).reshape(-1, self.count, self.width)
        places = 256 ** np.arange(self.width - 1, -1, -1, dtype=np.int64)
        return np.asarray(digits @ places, dtype=np.int64)


def encode(
    layout: CounterLayout,
    noise: BatchNoise,
    padding: Padding,
    episode: Episode | None,
    randomness: Randomness,
    word_bits: int | None = None,
) -> Report:
    """The user's part: returns one report. ``word_bits`` is a word's size in a summed batch."""
    match noise:
        case Noise() if word_bits:
            return sums.encode(layout, noise, word_bits, episode, randomness)
        case Noise():
            return shuffle_model.encode(layout, noise, padding, episode, randomness)
        case Flips():
            return local_model.encode(layout, noise, episode, randomness)
        case _:
            return central_model.encode(layout, episode)


def count(
    trust: Trust, layout: CounterLayout, symbols: npt.NDArray[np.integer]
) -> tuple[Ints, Ints]:
    """The analyzer's part, first step: counts the symbols (messages, symbols of each message).

    Returns a histogram (C + 1,), and the indices of messages not counted. The histogram's last
    entry is the number of dummies (``shuffle``) or of counted reports (``local``, ``central``).

    Raises ValueError if a message of ``shuffle`` names no counter. For untrusted messages use
    `common.protocol.hpke.open_histogram`.
    """
    if trust == "local":
        return local_model.count(layout, symbols)
    if trust == "central":
        return central_model.count(layout, symbols)
    counts = shuffle_model.count(layout, symbols.ravel())
    return np.append(counts, symbols.size - counts.sum()), np.zeros(0, dtype=np.int64)


def debias(noise: BatchNoise, n: int, histogram: Ints) -> npt.NDArray[np.float64]:
    """The analyzer's last step: returns the unbiased counts (C,) of a batch of n reports."""
    sums, last = histogram[:-1], int(histogram[-1])
    match noise:
        case Noise():
            return shuffle_model.debias(sums, n, noise)
        case Flips():
            return local_model.debias(sums, last, noise)
        case _:
            return central_model.debias(sums, noise)
