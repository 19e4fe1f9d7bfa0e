"""The shuffle mechanism whole: binary summation over many counters, every role's half.

Roles and what they do (`000`, section V, corrected where `spec.md` says so):

- A user encodes an episode as counter indices, draws ``bits`` Bernoulli(p) bits for every counter,
  turns every 1-bit into one message (its counter's index), and pads with dummies to L messages.
- The shuffler permutes the messages of all n users.
- The analyzer counts messages per counter and subtracts the noise's mean n * bits * p.

Privacy. Against whoever sees the permuted multiset of messages the mechanism is (epsilon, beta)-DP
for replacing one user, with the numbers `common.accounting.account` gives. The proof needs:

1. *Bits, not sums.* A message says one bit of one counter. The multiset of messages is then a
   function of the C noisy counts; a message carrying a number would show who added bit and noise.
2. *Independent binomial noise.* Each counter has Binomial(N, p) noise, N = bits * honest reports.
3. *Fixed length.* L does not depend on data: ``data_slots`` are reserved for data, so only noise is
   ever dropped, an event whose probability depends on noise alone and is charged to beta.
4. The number of dummies is nL minus the sum of the counts, so it reveals nothing more.
"""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.noise import Noise, Padding
from riffle.common.mechanism.randomness import ByteSource, Randomness

DRAWS_AT_ONCE = 1 << 20
KEYS_AT_ONCE = 1 << 16


def noise_messages(counters: int, noise: Noise, randomness: Randomness) -> Ints:
    """One user's noise: an index for every 1-bit among ``bits`` Bernoulli(p) bits a counter.

    A bit is 1 when a uniform 32-bit word is below the threshold p 2^32, which is exact because p is
    an integer over a power of two. Only the word's first byte is drawn for every bit, and the other
    three where that byte ties with the threshold's: they decide nothing elsewhere.
    """
    threshold = noise.p_numerator << (32 - noise.p_log2)
    first, rest = threshold >> 24, threshold & 0xFFFFFF
    total = counters * noise.bits
    ones: list[Ints] = []
    for start in range(0, total, DRAWS_AT_ONCE):
        drawn = np.frombuffer(randomness.read(min(DRAWS_AT_ONCE, total - start)), dtype=np.uint8)
        near = np.flatnonzero(drawn <= first)
        one = drawn[near] < first
        ties = np.flatnonzero(~one)
        words = np.frombuffer(randomness.read(4 * ties.size), dtype="<u4") >> 8
        one[ties] = words < rest
        # Bit number start + i belongs to counter (start + i) // bits: `bits` draws a counter.
        ones.append((near[one] + start) // noise.bits)
    return np.concatenate(ones).astype(np.int64) if ones else np.empty(0, dtype=np.int64)


def pad(data: Ints, noise_ones: Ints, padding: Padding, dummy: int, randomness: Randomness) -> Ints:
    """Exactly L messages from data, noise and dummies.

    Data is never dropped: it has slots of its own. When noise overflows its slots, a uniformly
    random subset of it stays. The accountant charges that event to beta as a whole, so which
    noise is dropped is free; a uniform choice keeps the counters' biases equal.
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
    """A user's half: the L messages (L,) of one report.

    ``episode`` is None when the environment failed: the report still carries noise and padding,
    since the other users' guarantee counts on its noise.
    """
    data = np.empty(0, dtype=np.int64) if episode is None else layout.encode(episode)
    ones = noise_messages(layout.counters, noise, randomness)
    return pad(data, ones, padding, layout.dummy, randomness)


def permutation(size: int, randomness: ByteSource) -> Ints:
    """The shuffler's half: a uniform permutation (size,), by sorting 128-bit random keys.

    Two of 2**24 keys are equal with probability below 2**-81, which is what a tie could bias. What
    is sorted are the first bits of each, with its index in place of the others; the few that are
    equal in these bits are then sorted by their whole keys.
    """
    keys = _keys(size, randomness)
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


def _keys(size: int, randomness: ByteSource) -> npt.NDArray[np.uint64]:
    """Random keys (size, 2), read in pieces that stay in a processor's cache."""
    keys = np.empty((size, 2), dtype="<u8")
    for start in range(0, size, KEYS_AT_ONCE):
        piece = keys[start : start + KEYS_AT_ONCE]
        piece[:] = np.frombuffer(randomness.read(piece.nbytes), dtype="<u8").reshape(-1, 2)
    return keys


def count(layout: CounterLayout, messages: npt.NDArray[np.integer]) -> Ints:
    """The analyzer's half, first step: messages a counter (C,), dummies dropped.

    Raises:
        ValueError: a message is neither a counter nor the dummy.
    """
    if messages.size and (messages.min() < 0 or messages.max() > layout.dummy):
        raise ValueError(f"a message is outside 0..{layout.dummy}")
    return np.bincount(messages, minlength=layout.counters + 1)[: layout.counters]


def debias(counts: Ints, n: int, noise: Noise) -> npt.NDArray[np.float64]:
    """The analyzer's half, second step: counts (C,) less the noise's mean n * bits * p."""
    return np.asarray(counts - noise.mean(n))


def run(
    layout: CounterLayout,
    noise: Noise,
    padding: Padding,
    episodes: list[Episode | None],
    randomness: Randomness,
) -> npt.NDArray[np.float64]:
    """All roles in one place, without network or encryption: unbiased counts (C,)."""
    reports = [encode(layout, noise, padding, episode, randomness) for episode in episodes]
    messages = np.concatenate(reports)
    shuffled = messages[permutation(messages.size, randomness)]
    return debias(count(layout, shuffled), len(episodes), noise)
