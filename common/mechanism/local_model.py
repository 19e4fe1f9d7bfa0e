"""The local mechanism: randomised response on a report's bits, with each role's part.

The workflow is the local one of paper 000, Fig. 2, and corresponds to paper 004's Local Privatizer.
Users trust nobody.

- A user writes the episode as C bits, one per counter, and flips each bit independently with
  probability f. One message carries all C bits.
- The shuffler permutes the messages, although this protects nobody here.
- The analyzer adds the n reports' bits and corrects for the flips. If a counter's bit is 1 in S of
  n reports, (S - n f) / (1 - 2 f) is an unbiased count.

Privacy. The *report itself* is (epsilon, beta)-DP for replacing its user, whatever other parties
do. Replacing the user changes at most ``cells`` bits from 0 to 1, and at most ``cells`` from 1 to 0
(losses: `common.accounting.binomial.step_losses`). The proof needs:

1. *Independent flips.* They are independent of each other and of the data.
2. *Fixed length.* Every report has C bits.
"""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.parameters import Flips
from riffle.common.mechanism.randomness import Randomness


def report_bytes(counters: int) -> int:
    """Returns the number of bytes that hold one bit per counter."""
    return -(-counters // 8)


def encode(
    layout: CounterLayout, flips: Flips, episode: Episode | None, randomness: Randomness
) -> Ints:
    """The user's part: returns the bytes of one report, with the first counter in the highest bit.

    If the environment failed, ``episode`` is None, and all bits are 0 before the flips. The
    guarantee covers this report, too.
    """
    bits = np.zeros(layout.counters, dtype=bool)
    if episode is not None:
        bits[layout.encode(episode)] = True
    # A uniform 32-bit word is below f 2^32 with probability f exactly.
    words = np.frombuffer(randomness.read(4 * bits.size), dtype="<u4")
    return np.packbits(bits ^ (words < flips.numerator)).astype(np.int64)


def count(layout: CounterLayout, reports: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The analyzer's first step: counts the 1-bits of N reports (N, bytes).

    Returns each counter's number of 1s followed by the number of counted reports, shape (C + 1,).
    Also returns the indices of reports that are not counted: they have a 1 past the last counter.
    """
    C = layout.counters
    bits = np.unpackbits(reports.astype(np.uint8), axis=1)
    valid = ~bits[:, C:].any(axis=1)
    sums = bits[valid, :C].sum(axis=0, dtype=np.int64)
    return np.append(sums, valid.sum()), np.flatnonzero(~valid)


def debias(sums: Ints, reports: int, flips: Flips) -> npt.NDArray[np.float64]:
    """The analyzer's part, second step: returns unbiased counts (C,) from the numbers of 1s."""
    return np.asarray((sums - flips.mean(reports)) / (1.0 - 2.0 * flips.f))
