"""The local mechanism whole: randomised response on a report's bits, every role's half.

The local workflow of `000`, Fig. 2, and of the Local Privatizer of `004`: nobody is trusted.

- A user writes the episode as C bits, one a counter, flips each with probability f on its own, and
  sends all of them in one message.
- The shuffler's permutation protects nobody here and is made all the same: one way for all.
- The analyzer adds the n reports bit by bit and undoes the flips' mean: with S 1-bits of n on a
  counter, (S - n f) / (1 - 2 f) is unbiased with variance n f (1 - f) / (1 - 2 f)**2.

Privacy. The *report itself* is (epsilon, beta)-DP for replacing its user, against everyone, the
shuffler and the analyzer together included, whatever all others do. Two episodes differ in at most
``cells`` bits one way and ``cells`` bits the other; each such bit has the losses log((1 - f) / f)
and its negative (`common.accounting.binomial.step_losses`), and bits that agree have none. The
proof needs that flips are independent of each other and of the data, and a report's length fixed: C
bits.

Why flips and not the Laplace noise of `004`: `common.accounting.calibrate`.
"""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.noise import Flips
from riffle.common.mechanism.randomness import Randomness


def report_bytes(counters: int) -> int:
    """Bytes that hold a bit for each of so many counters."""
    return -(-counters // 8)


def encode(
    layout: CounterLayout, flips: Flips, episode: Episode | None, randomness: Randomness
) -> Ints:
    """A user's half: the bytes of one report, first counter in the highest bit.

    ``episode`` is None when the environment failed: all bits are 0 before they are flipped, which
    is as far from every episode as two episodes may be from each other, and no farther.
    """
    bits = np.zeros(layout.counters, dtype=bool)
    if episode is not None:
        bits[layout.encode(episode)] = True
    # A uniform 32-bit word is below f 2^32 with probability f exactly.
    words = np.frombuffer(randomness.read(4 * bits.size), dtype="<u4")
    return np.packbits(bits ^ (words < flips.numerator)).astype(np.int64)


def count(layout: CounterLayout, reports: npt.NDArray[np.integer]) -> tuple[Ints, int]:
    """The analyzer's half: 1-bits a counter and, last, reports counted: (C + 1,); and the failed.

    ``reports`` has shape (N, bytes). A report with a bit past the last counter is not counted.
    """
    C = layout.counters
    bits = np.unpackbits(reports.astype(np.uint8), axis=1)
    good = bits[~bits[:, C:].any(axis=1), :C]
    sums = good.sum(axis=0, dtype=np.int64)
    return np.append(sums, len(good)), len(bits) - len(good)


def debias(sums: Ints, reports: int, flips: Flips) -> npt.NDArray[np.float64]:
    """Unbiased counts (C,) from the 1-bits of so many reports."""
    return np.asarray((sums - flips.mean(reports)) / (1.0 - 2.0 * flips.f))


def run(
    layout: CounterLayout, flips: Flips, episodes: list[Episode | None], randomness: Randomness
) -> npt.NDArray[np.float64]:
    """All roles in one place, without network or encryption: unbiased counts (C,)."""
    reports = np.stack([encode(layout, flips, episode, randomness) for episode in episodes])
    histogram, _ = count(layout, reports)
    return debias(histogram[:-1], int(histogram[-1]), flips)
