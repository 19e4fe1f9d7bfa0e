"""All roles of a mechanism in turn, without network or encryption."""

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism import central_model, local_model, shuffle_model
from riffle.common.mechanism.counters import CounterLayout, Episode
from riffle.common.mechanism.parameters import CentralNoise, Flips, Noise, Padding
from riffle.common.mechanism.randomness import Randomness
from riffle.common.mechanism.sums import KEY_BYTES, Words

Floats = npt.NDArray[np.float64]
Episodes = list[Episode | None]


def shuffle_counts(
    layout: CounterLayout,
    noise: Noise,
    padding: Padding,
    episodes: Episodes,
    randomness: Randomness,
) -> Floats:
    """Unbiased counts (C,) of the shuffle mechanism."""
    reports = [
        shuffle_model.encode(layout, noise, padding, episode, randomness) for episode in episodes
    ]
    messages = np.concatenate(reports)
    shuffled = messages[shuffle_model.permutation(messages.size, randomness)]
    return shuffle_model.debias(shuffle_model.count(layout, shuffled), len(episodes), noise)


def local_counts(
    layout: CounterLayout, flips: Flips, episodes: Episodes, randomness: Randomness
) -> Floats:
    """Unbiased counts (C,) of the local mechanism."""
    reports = [local_model.encode(layout, flips, episode, randomness) for episode in episodes]
    histogram, _ = local_model.count(layout, np.stack(reports))
    return local_model.debias(histogram[:-1], int(histogram[-1]), flips)


def central_counts(
    layout: CounterLayout, noise: CentralNoise, episodes: Episodes, randomness: Randomness
) -> Floats:
    """Unbiased counts (C,) of the central mechanism."""
    reports = np.stack([central_model.encode(layout, episode) for episode in episodes])
    histogram, _ = central_model.count(layout, reports)
    noisy = central_model.add_noise(histogram, noise, randomness)
    return central_model.debias(noisy[:-1], noise)


def release(total: Words, keys: bytes, order: npt.NDArray[np.integer]) -> bytes:
    """What the shuffler hands over of a batch of sums: the sum, then its keys E in this order."""
    permuted = np.frombuffer(keys, dtype=f"V{KEY_BYTES}")[order]
    return b"".join((total.tobytes(), permuted.tobytes()))
