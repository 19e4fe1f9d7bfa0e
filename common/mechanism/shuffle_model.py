"""The shuffle mechanism: binary summation over many counters, with each role's part.

Roles (paper 000, section V, with corrections):

- A user encodes an episode as counter indices, one message each. For every counter the user draws
  ``bits`` Bernoulli(p) bits. Each bit that is 1 becomes one more message, the counter's index.
  Dummies fill the report up to L messages.
- The shuffler permutes the messages of all n users.
- The analyzer counts the messages of each counter and subtracts the noise's mean n * bits * p.

Privacy. Against everyone who sees the permuted multiset of messages, the mechanism is (epsilon,
beta)-DP for replacing one user (`common.accounting.account`). The proof needs four facts:

1. *Bits, not sums.* A message is one bit of one counter, so the multiset of messages is a function
   of the noisy counts of the C counters.
2. *Independent binomial noise.* Each counter has Binomial(N, p) noise, N = bits * honest reports.
3. *Fixed length.* L does not depend on data. ``data_slots`` of the messages are reserved for
   data, so a report drops only noise. beta pays for the probability of a drop.
4. *No information in dummies.* The number of dummies is nL minus the sum of the noisy counts.
"""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.parameters import Noise, Padding
from riffle.common.mechanism.randomness import ByteSource, Randomness, draw_counts

KEYS_AT_ONCE = 1 << 16


def draw_noise(counters: int, noise: Noise, randomness: Randomness) -> Ints:
    """Returns one user's noise: for every noise bit that is 1, the index of the bit's counter.

    The indices are in ascending order.
    """
    return np.repeat(np.arange(counters), draw_counts(counters, noise, randomness))


def pad(data: Ints, noise_ones: Ints, padding: Padding, dummy: int, randomness: Randomness) -> Ints:
    """Returns exactly L messages: data, noise and dummies. Raises ValueError if data has no room.

    If noise exceeds its slots, a uniformly random subset of the noise stays, so that all counters
    get the same bias.
    """
    if data.size > padding.data_slots:
        raise ValueError(f"{data.size} data messages exceed {padding.data_slots} data slots")
    if noise_ones.size > padding.noise_slots:
        keys = np.frombuffer(randomness.read(8 * noise_ones.size), dtype="<u8")
        noise_ones = noise_ones[np.argsort(keys, kind="stable")[: padding.noise_slots]]
    messages = np.full(padding.messages, dummy, dtype=np.int64)
    messages[: data.size] = data
    messages[data.size : data.size + noise_ones.size] = noise_ones
    return messages


def encode(
    layout: CounterLayout,
    noise: Noise,
    padding: Padding,
    episode: Episode | None,
    randomness: Randomness,
) -> Ints:
    """The user's part: returns the L messages (L,) of one report.

    If the environment failed, ``episode`` is None. The report still carries noise, on which the
    guarantees of other users rely.
    """
    data = np.empty(0, dtype=np.int64) if episode is None else layout.encode(episode)
    ones = draw_noise(layout.counters, noise, randomness)
    return pad(data, ones, padding, layout.dummy, randomness)


def permutation(size: int, randomness: ByteSource) -> Ints:
    """Returns the shuffler's uniform permutation (size,), from sorting random keys of 128 bits.

    Only equal keys bias the permutation. Among 2**24 keys, two are equal with probability below
    2**-81. The sorted words have 64 bits: a key's first bits, then the key's index. The few keys
    with equal first bits are then sorted by all 128 bits.
    """
    keys = _random_keys(size, randomness)
    index = np.uint64((1 << (size - 1).bit_length()) - 1)
    packed = keys[:, 0] & ~index
    packed |= np.arange(size, dtype=np.uint64)
    packed.sort()
    order = packed & index
    packed ^= order
    same = packed[1:] == packed[:-1]
    if same.any():
        tied = np.append(same, False) | np.append(False, same)
        among = order[tied]
        order[tied] = among[np.lexsort((keys[among, 1], keys[among, 0]))]
    return order.view(np.int64)


def _random_keys(size: int, randomness: ByteSource) -> npt.NDArray[np.uint64]:
    """Returns random keys (size, 2), read in pieces that fit a processor's cache."""
    keys = np.empty((size, 2), dtype="<u8")
    for start in range(0, size, KEYS_AT_ONCE):
        piece = keys[start : start + KEYS_AT_ONCE]
        piece[:] = np.frombuffer(randomness.read(piece.nbytes), dtype="<u8").reshape(-1, 2)
    return keys


def count(layout: CounterLayout, messages: npt.NDArray[np.integer]) -> Ints:
    """The analyzer's first step: returns each counter's number of messages (C,), without dummies.

    Raises ValueError if a message is neither a counter's index nor the dummy.
    """
    if messages.size and (messages.min() < 0 or messages.max() > layout.dummy):
        raise ValueError(f"a message is outside 0..{layout.dummy}")
    return np.bincount(messages, minlength=layout.counters + 1)[: layout.counters]


def debias(counts: Ints, n: int, noise: Noise) -> npt.NDArray[np.float64]:
    """The analyzer's part, second step: returns counts (C,) minus the noise's mean n * bits * p."""
    return np.asarray(counts - noise.mean(n))
