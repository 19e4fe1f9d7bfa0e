"""The central mechanism: the coordinator gets raw trajectories and adds noise to their counts.

The workflow is the central one of paper 000, Fig. 2. Users trust only the coordinator.

- A user sends the episode as it is, in one message: the indices of its increments, filled up with
  dummies to ``data_slots`` indices.
- The shuffler permutes the messages, although this protects nobody here.
- The analyzer counts, adds one draw of integer noise to every counter, and forgets the reports.

Privacy. The coordinator, and anyone with its key, sees the trajectories. All other parties can read
only the noisy counts, which are (epsilon, beta)-DP for replacing one user. The proof needs:

1. *Independent noise* on every counter.
2. *One draw a batch*, however often the batch is counted (`coordinator.store.transactions.Store`).
3. *Only the noisy counts are shown.* Even the number of dummies would reveal the true counts' sum.
"""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.parameters import CentralNoise, FairBits, Laplace
from riffle.common.mechanism.randomness import Randomness

BYTES_AT_ONCE = 1 << 22


def encode(layout: CounterLayout, episode: Episode | None) -> Ints:
    """Returns the ``data_slots`` indices of one report, with dummies last: the user's part."""
    indices = np.full(layout.data_slots, layout.dummy, dtype=np.int64)
    if episode is not None:
        data = layout.encode(episode)
        indices[: data.size] = data
    return indices


def count(layout: CounterLayout, reports: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The analyzer's part, first step: counts the reports (N, data_slots).

    Returns the raw counts followed by the number of counted reports, shape (C + 1,). Also returns
    the indices of reports that are not counted because they name a nonexistent counter.
    """
    valid = (reports <= layout.dummy).all(axis=1)
    sums = np.bincount(reports[valid].ravel(), minlength=layout.counters + 1)[: layout.counters]
    return np.append(sums, valid.sum()).astype(np.int64), np.flatnonzero(~valid)


def add_noise(histogram: Ints, noise: CentralNoise, randomness: Randomness) -> Ints:
    """The analyzer's part, second step: adds noise to the counters of a histogram (C + 1,)."""
    noisy = histogram.copy()
    noisy[:-1] += draw_noise(noise, histogram.size - 1, randomness)
    return noisy


def draw_noise(noise: CentralNoise, counters: int, randomness: Randomness) -> Ints:
    """Returns one draw of noise for each counter (counters,), from the exact distribution."""
    match noise:
        case Laplace():
            up, down = (_geometric(noise.numerator, counters, randomness) for _ in range(2))
            return up - down
        case FairBits():
            draws = (_count_ones(noise.bits, randomness) for _ in range(counters))
            return np.fromiter(draws, dtype=np.int64, count=counters)


def debias(sums: Ints, noise: CentralNoise) -> npt.NDArray[np.float64]:
    """The analyzer's part, last step: subtracts the noise's mean from the noisy counts (C,)."""
    return np.asarray(sums - noise.mean(1))


def _geometric(numerator: int, size: int, randomness: Randomness) -> Ints:
    """Returns geometric draws G (size,): Pr[G >= k] = q**k with q = numerator / 2**32.

    Each draw is the number of random words before the first word that is at least ``numerator``.
    """
    draws = np.zeros(size, dtype=np.int64)
    going = np.arange(size)
    while going.size:
        words = np.frombuffer(randomness.read(4 * going.size), dtype="<u4")
        going = going[words < numerator]
        draws[going] += 1
    return draws


def _count_ones(bits: int, randomness: Randomness) -> int:
    total = 0
    while bits > 0:
        size = min(BYTES_AT_ONCE, -(-bits // 8))
        block = int.from_bytes(randomness.read(size), "little")
        used = min(bits, 8 * size)
        total += (block & ((1 << used) - 1)).bit_count()
        bits -= used
    return total
