"""The central mechanism whole: raw trajectories to the coordinator, which adds noise to the counts.

The central workflow of `000`, Fig. 2: everybody trusts the coordinator, and nobody else.

- A user sends the episode as it is, in one message: the indices of its ``data_slots`` increments,
  dummies where there are fewer.
- The shuffler's permutation protects nobody here and is made all the same: one way for all.
- The analyzer counts, adds one draw of integer noise to every counter, and forgets the rest.

Privacy. Against everyone but the coordinator and whoever holds its key, who see the trajectories:
the noisy counts are (epsilon, beta)-DP for replacing one user. At most ``cells`` counters move up
by one and ``cells`` down, each with the losses of its noise (`common.accounting.binomial`),
composed exactly. The proof needs independent noise on every counter, *one* draw of it for a batch,
however often the batch is counted (`coordinator.batches.analyzer` says how), and that nothing else
of the counts is shown: not the dummies either, whose number would tell the sum.

Draws are exact and of integers only. Discrete Laplace noise is the difference of two geometric
variables, each the number of uniform 32-bit words below q 2^32 before the first that is not; so the
ratio q of the law is that integer over 2^32, and no logarithm or exponential is ever rounded.
Binomial(N, 1/2) noise is the number of ones among N random bits.
"""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.noise import CentralNoise, FairBits, Laplace
from riffle.common.mechanism.randomness import Randomness

BYTES_AT_ONCE = 1 << 22


def encode(layout: CounterLayout, episode: Episode | None) -> Ints:
    """A user's half: the ``data_slots`` indices of one report, dummies last."""
    indices = np.full(layout.data_slots, layout.dummy, dtype=np.int64)
    if episode is not None:
        data = layout.encode(episode)
        indices[: data.size] = data
    return indices


def count(layout: CounterLayout, reports: npt.NDArray[np.integer]) -> tuple[Ints, int]:
    """The analyzer's half, first step: raw counts and, last, reports counted; and the failed.

    ``reports`` has shape (N, data_slots). A report that names a counter that is not there is not
    counted at all.
    """
    good = reports[(reports <= layout.dummy).all(axis=1)]
    sums = np.bincount(good.ravel(), minlength=layout.counters + 1)[: layout.counters]
    return np.append(sums, len(good)).astype(np.int64), len(reports) - len(good)


def add_noise(histogram: Ints, noise: CentralNoise, randomness: Randomness) -> Ints:
    """The analyzer's half, second step: noise on every counter, not on the number of reports."""
    noisy = histogram.copy()
    noisy[:-1] += draw(noise, histogram.size - 1, randomness)
    return noisy


def draw(noise: CentralNoise, counters: int, randomness: Randomness) -> Ints:
    """One draw a counter (counters,)."""
    match noise:
        case Laplace():
            up, down = (_geometric(noise.numerator, counters, randomness) for _ in range(2))
            return up - down
        case FairBits():
            draws = (_ones(noise.bits, randomness) for _ in range(counters))
            return np.fromiter(draws, dtype=np.int64, count=counters)


def debias(sums: Ints, noise: CentralNoise) -> npt.NDArray[np.float64]:
    """Unbiased counts (C,): less the noise's mean."""
    return np.asarray(sums - noise.mean(1))


def run(
    layout: CounterLayout,
    noise: CentralNoise,
    episodes: list[Episode | None],
    randomness: Randomness,
) -> npt.NDArray[np.float64]:
    """All roles in one place, without network or encryption: unbiased counts (C,)."""
    histogram, _ = count(layout, np.stack([encode(layout, episode) for episode in episodes]))
    return debias(add_noise(histogram, noise, randomness)[:-1], noise)


def _geometric(numerator: int, size: int, randomness: Randomness) -> Ints:
    """Words below ``numerator`` before the first that is not: Pr[G >= k] = q**k. Shape (size,)."""
    drawn = np.zeros(size, dtype=np.int64)
    going = np.arange(size)
    while going.size:
        words = np.frombuffer(randomness.read(4 * going.size), dtype="<u4")
        going = going[words < numerator]
        drawn[going] += 1
    return drawn


def _ones(bits: int, randomness: Randomness) -> int:
    """1-bits among so many random bits."""
    total = 0
    while bits > 0:
        size = min(BYTES_AT_ONCE, -(-bits // 8))
        block = int.from_bytes(randomness.read(size), "little")
        kept = min(bits, 8 * size)
        total += (block & ((1 << kept) - 1)).bit_count()
        bits -= kept
    return total
