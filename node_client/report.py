"""What one user's slot in a batch becomes: policy draw, episode, and the L messages of the report.

This is the node's half of `common.workflow`, and the only place where a node draws anything.
Deployed nodes draw from the system's CSPRNG. A batch of the test entry point (``test_seed`` set,
and ``test_entry=True`` said by whoever calls) draws from streams keyed by (run, batch, slot,
purpose), so that its counts do not depend on who served which slot, or when. The simulator's
per-user path calls the same function.
"""

from dataclasses import dataclass
from typing import Literal

from riffle.common.counters import CounterLayout, Episode, Ints
from riffle.common.descriptor import BatchDescriptor
from riffle.common.errors import LocalError
from riffle.common.noise import BatchNoise, Padding
from riffle.common.policy import Mixture
from riffle.common.randomness import Randomness, SeededRandomness, SystemRandomness, word
from riffle.common.workflow import encode
from riffle.node_client.environments.environment import Environment
from riffle.node_client.episode import EpisodeFailed, run_episode

Purpose = Literal["policy", "environment", "noise"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A descriptor with what every slot needs, computed once a batch."""

    descriptor: BatchDescriptor
    mixture: Mixture
    layout: CounterLayout
    noise: BatchNoise
    padding: Padding

    @classmethod
    def of(cls, descriptor: BatchDescriptor) -> "BatchPlan":
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
    plan: BatchPlan, environment: Environment, slot: int, *, test_entry: bool = False
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
    except EpisodeFailed:
        episode = None
    return episode, encode(plan.layout, plan.noise, plan.padding, episode, noise_draw)


_PURPOSES: tuple[Purpose, ...] = ("policy", "environment", "noise")
