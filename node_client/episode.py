"""Turns a slot in a batch into one user's report, before it is sealed.

All random draws for a report are made here, except the draws for its seals. An environment's error
is discarded, because it may hold the user's data.
"""

import math
from typing import Literal

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Episode
from riffle.common.mechanism.policy import Policies
from riffle.common.mechanism.randomness import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    bernoulli,
    word,
)
from riffle.common.mechanism.workflow import Report, encode
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.tabular import Environment

Purpose = Literal["policy", "environment", "noise"]
RewardRange = tuple[float, float]


def slot_report(
    batch: BatchDescriptor, environment: Environment | None, slot: int, *, test_entry: bool = False
) -> tuple[Episode | None, Report]:
    """Returns a user's episode and the unsealed report.

    If there is no environment, or the episode fails, the episode is None. The report then holds
    only noise and padding. Other users' guarantees need this noise. Raises the errors of
    `slot_randomness`.
    """
    chosen = word(slot_randomness(batch, slot, "policy", test_entry=test_entry))
    episode, policy = None, batch.mixture.pick(chosen)
    if environment is not None:
        draws = slot_randomness(batch, slot, "environment", test_entry=test_entry)
        episode = run_episode(environment, policy, batch.reward_range, draws, batch.layout)
    return episode, encode_episode(batch, episode, slot, test_entry=test_entry)


def encode_episode(
    batch: BatchDescriptor, episode: Episode | None, slot: int, *, test_entry: bool = False
) -> Report:
    """Returns an episode's report. Raises the errors of `slot_randomness`."""
    draws = slot_randomness(batch, slot, "noise", test_entry=test_entry)
    layout, noise, padding = batch.layout, batch.batch_noise, batch.padding
    return encode(layout, noise, padding, episode, draws, batch.word_bits)


def slot_randomness(
    descriptor: BatchDescriptor, slot: int, purpose: Purpose, *, test_entry: bool
) -> Randomness:
    """Returns the source of a draw: the system's CSPRNG or, for a seeded batch, a keyed stream.

    A seeded batch protects nobody: its epsilon is infinity in the ledger. Raises LocalError
    ``test-entry-refused`` if the batch is seeded and ``test_entry`` is false.
    """
    if descriptor.test_seed is None:
        return SystemRandomness()
    if not test_entry:
        raise LocalError(
            "test-entry-refused", "this batch is seeded; a deployed node never runs it"
        )
    key = (descriptor.run_id, descriptor.batch_id, slot, purpose)
    return SeededRandomness.keyed(descriptor.test_seed, *key)


def run_episode(
    environment: Environment,
    policy: Policies,
    reward_range: RewardRange,
    randomness: Randomness,
    layout: CounterLayout | None = None,
) -> Episode | None:
    """Runs a policy (H, X) for one user.

    Returns None if the environment fails, or if the episode is outside the layout's declared
    support.
    """
    try:
        return play(environment, policy, reward_range, randomness, layout)
    except Exception:  # an external environment may raise anything
        return None


def play(
    environment: Environment,
    policy: Policies,
    reward_range: RewardRange,
    randomness: Randomness,
    layout: CounterLayout | None = None,
) -> Episode:
    """Runs a policy as `run_episode` does, but raises errors.

    Only simulations may call `play`, because errors may hold user data.
    """
    H, X = policy.shape
    states = np.empty(H + 1, dtype=np.int64)
    actions = np.empty(H, dtype=np.int64)
    rewards = np.zeros(H, dtype=np.int64)
    states[0] = _checked(environment.reset(randomness), X)
    over = False
    for h in range(H):
        actions[h] = policy[h, states[h]]
        if over:
            states[h + 1] = states[h]
            continue
        state, reward, over = environment.step(int(actions[h]), randomness)
        rewards[h] = bernoulli(randomness, reward_mean(reward, reward_range))
        states[h + 1] = _checked(environment.absorbing if over else state, X)
    episode = Episode(states, actions, rewards)
    if layout is not None:
        layout.check(episode)
    return episode


def reward_mean(reward: float, reward_range: RewardRange) -> float:
    """Scales a reward to a mean in [0, 1]. Raises ValueError if it is outside `reward_range`."""
    low, high = reward_range
    mean = (reward - low) / (high - low)
    if not (math.isfinite(mean) and 0 <= mean <= 1):
        raise ValueError(
            f"a reward of {reward:g} is outside the declared range [{low:g}, {high:g}]; its "
            "environment's reward_low and reward_high, or reward_range, must hold every reward"
        )
    return mean


def _checked(state: int | None, X: int) -> int:
    if state is None:
        raise ValueError("an episode ended early in an environment that declared it never would")
    if not 0 <= state < X:
        raise ValueError("a state is outside the declared states")
    return state
