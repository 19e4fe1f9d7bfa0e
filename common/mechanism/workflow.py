"""The three workflows of `000`, Fig. 2, where they differ: what a message is, and what it counts.

- ``shuffle`` trusts the shuffle and a share of the users. A report is L messages of one index;
  noise comes from all users together (`common.mechanism.shuffle`).
- ``local`` trusts nobody. A report is one message of C flipped bits (`common.mechanism.local`).
- ``central`` trusts the coordinator. A report is one message of raw indices; the coordinator adds
  noise to their counts (`common.mechanism.central`).

Everything else is one way for all three: descriptor, leases, seals, shuffle, counts, ledger.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism import central, local, shuffle
from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.noise import BatchNoise, Flips, Noise, Padding, Trust
from riffle.common.mechanism.randomness import Randomness


@dataclass(frozen=True, slots=True)
class Symbols:
    """A message's plaintext: ``count`` unsigned big-endian integers of ``width`` bytes each."""

    count: int
    width: int

    @classmethod
    def of(cls, trust: Trust, layout: CounterLayout) -> "Symbols":
        """What a message holds under this trust model."""
        return {
            "shuffle": cls(1, layout.width),
            "local": cls(local.report_bytes(layout.counters), 1),
            "central": cls(layout.data_slots, layout.width),
        }[trust]

    @property
    def size(self) -> int:
        """Bytes of the plaintext."""
        return self.count * self.width

    def read(self, plaintexts: bytes) -> Ints:
        """Symbols (messages, count) of plaintexts end to end."""
        digits = np.frombuffer(plaintexts, dtype=np.uint8).reshape(-1, self.count, self.width)
        places = 256 ** np.arange(self.width - 1, -1, -1, dtype=np.int64)
        return np.asarray(digits @ places, dtype=np.int64)


def encode(
    layout: CounterLayout,
    noise: BatchNoise,
    padding: Padding,
    episode: Episode | None,
    randomness: Randomness,
) -> Ints:
    """A user's half: the symbols (L * count,) of one report, message by message."""
    match noise:
        case Noise():
            return shuffle.encode(layout, noise, padding, episode, randomness)
        case Flips():
            return local.encode(layout, noise, episode, randomness)
        case _:
            return central.encode(layout, episode)


def count(
    trust: Trust, layout: CounterLayout, symbols: npt.NDArray[np.integer]
) -> tuple[Ints, int]:
    """The analyzer's half: histogram (C + 1,) and messages that did not make sense.

    ``symbols`` has shape (messages, count). The histogram's last entry is the number of dummies
    (``shuffle``) or of the reports that were counted (``local``, ``central``).

    Raises:
        ValueError: a message of ``shuffle`` names no counter (`common.protocol.hpke.open_histogram`
            is what counts those of strangers).
    """
    if trust == "local":
        return local.count(layout, symbols)
    if trust == "central":
        return central.count(layout, symbols)
    counts = shuffle.count(layout, symbols.ravel())
    return np.append(counts, symbols.size - counts.sum()), 0


def debias(noise: BatchNoise, n: int, histogram: Ints) -> npt.NDArray[np.float64]:
    """The analyzer's half, last step: unbiased counts (C,) of a batch of n reports."""
    sums, last = histogram[:-1], int(histogram[-1])
    match noise:
        case Noise():
            return shuffle.debias(sums, n, noise)
        case Flips():
            return local.debias(sums, last, noise)
        case _:
            return central.debias(sums, noise)
