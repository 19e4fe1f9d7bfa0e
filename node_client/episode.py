"""One user's episode: H steps of the drawn policy in the node's environment.

Rewards of the declared range [low, high] become the mean (R - low) / (high - low) in [0, 1], and
one Bernoulli bit with that mean: a report holds bits, and E[bit] is the scaled reward. After an
early end the user stays in the environment's absorbing state with zero reward bits until step H.

Whatever goes wrong raises `EpisodeError`, which carries nothing of the episode, on purpose: it
may be logged by whoever catches it.

What one user's slot in a batch becomes: policy draw, episode, and the L messages of the report.

This is the node's half of `common.mechanism.workflow`, and the only place where a node draws
anything. Deployed nodes draw from the system's CSPRNG. A batch of the test entry point
(``test_seed`` set, and ``test_entry=True`` said by whoever calls) draws from streams keyed by (run,
batch, slot, purpose), so that its counts do not depend on who served which slot, or when. The
simulator's per-user path calls the same function.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints
from riffle.common.mechanism.noise import BatchNoise, Padding
from riffle.common.mechanism.policy import Mixture, Policies
from riffle.common.mechanism.randomness import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    bernoulli,
    word,
)
from riffle.common.mechanism.workflow import encode
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.tabular import Environment


class EpisodeError(Exception):
    """The environment raised, or gave what it may not give. Says nothing of the episode."""


def run_episode(
    environment: Environment,
    policy: Policies,
    reward_range: tuple[float, float],
    randomness: Randomness,
) -> Episode:
    """Run policy (H, X) for one user.

    Raises:
        EpisodeError: the environment failed; no cause is attached, since a cause could hold data.
    """
    try:
        return play(environment, policy, reward_range, randomness)
    except Exception:  # a user's environment may raise anything
        failed = EpisodeError("the environment failed")
    raise failed


def reward_mean(reward: float, reward_range: tuple[float, float]) -> float:
    """A reward as a mean in [0, 1].

    Raises:
        ValueError: it is not in the declared range.
    """
    low, high = reward_range
    mean = (reward - low) / (high - low)
    if not (math.isfinite(mean) and 0 <= mean <= 1):
        raise ValueError("a reward is outside the declared range")
    return mean


def play(
    environment: Environment,
    policy: Policies,
    reward_range: tuple[float, float],
    randomness: Randomness,
) -> Episode:
    """The same, with errors that may hold the user's data: not for nodes, only for simulations."""
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
        states[h + 1] = _checked(_absorbing(environment) if over else state, X)
    return Episode(states, actions, rewards)


def _checked(state: int, X: int) -> int:
    if not 0 <= state < X:
        raise ValueError("a state is outside the declared states")
    return state


def _absorbing(environment: Environment) -> int:
    if environment.absorbing is None:
        raise ValueError("an episode ended early in an environment that declared it never would")
    return environment.absorbing


Purpose = Literal["policy", "environment", "noise"]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A descriptor with what every slot needs, computed once a batch."""

    descriptor: BatchDescriptor
    mixture: Mixture
    layout: CounterLayout
    noise: BatchNoise
    padding: Padding

    @classmethod
    def of(cls, descriptor: BatchDescriptor) -> "PreparedBatch":
        """The plan of a descriptor."""
        return cls(
            descriptor=descriptor,
            mixture=descriptor.mixture,
            layout=descriptor.layout,
            noise=descriptor.to_noise(),
            padding=descriptor.padding,
        )


def slot_randomness(
    descriptor: BatchDescriptor, slot: int, purpose: Purpose, *, test_entry: bool
) -> Randomness:
    """The randomness of one draw: the CSPRNG's unless the batch is a test, and tests are allowed.

    Every draw of a report comes from here; the privacy proof needs that no seeded stream does
    unless the ledger says epsilon = infinity, which it does for every batch with a ``test_seed``.

    Raises:
        LocalError: ``test-entry-refused``: the batch is seeded and ``test_entry`` is false.
    """
    if descriptor.test_seed is None:
        return SystemRandomness()
    if not test_entry:
        raise LocalError(
            "test-entry-refused", "this batch is seeded; a deployed node never runs it"
        )
    key = (descriptor.run_id, descriptor.batch_id, slot, purpose)
    return SeededRandomness.keyed(descriptor.test_seed, *key)


def slot_report(
    plan: PreparedBatch, environment: Environment, slot: int, *, test_entry: bool = False
) -> tuple[Episode | None, Ints]:
    """One user's episode (None when the environment failed) and the report's symbols (L count,).

    A failed episode still sends noise and padding: the other users' guarantee counts on it.

    Raises:
        LocalError: ``test-entry-refused``, see `slot_randomness`.
    """
    policy_draw, environment_draw, noise_draw = (
        slot_randomness(plan.descriptor, slot, purpose, test_entry=test_entry)
        for purpose in _PURPOSES
    )
    policy = plan.mixture.pick(word(policy_draw))
    reward_range = (plan.descriptor.reward_low, plan.descriptor.reward_high)
    episode: Episode | None
    try:
        episode = run_episode(environment, policy, reward_range, environment_draw)
    except EpisodeError:
        episode = None
    return episode, encode(plan.layout, plan.noise, plan.padding, episode, noise_draw)


_PURPOSES: tuple[Purpose, ...] = ("policy", "environment", "noise")
