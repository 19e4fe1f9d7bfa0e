"""The per-user path: every user's report made one by one, without network or encryption.

Draws are keyed by (run, batch, slot), as at the services' test entry point, and encoding is the
node's own code. So a networked run with the same spec, run id and test seed has the same private
counts, batch by batch, whatever the order of arrival. It needs no transition probabilities: any
environment that a node can run can be simulated so, at a cost that grows with the users.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from riffle.common.counters import Ints
from riffle.common.descriptor import BatchDescriptor
from riffle.common.plugins import file_of, where
from riffle.common.randomness import word
from riffle.common.workflow import count
from riffle.coordinator.analyzer import add_noise
from riffle.coordinator.counts import private_counts
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    Learner,
    LearnerError,
    LearnerSummary,
    StageResult,
)
from riffle.coordinator.planning import Party, issue
from riffle.coordinator.registry import Registry, refusal
from riffle.coordinator.specs import RunSpec
from riffle.node_client.environments.environment import Environment
from riffle.node_client.environments.gymnasium_adapter import GymnasiumEnvironment
from riffle.node_client.episode import play
from riffle.node_client.report import BatchPlan, slot_randomness, slot_report

NOBODY = Party(shuffler_id="simulator", analyzer_key="00" * 32)
NEVER = 1 << 40
TOLD_EVERY = 1_000
"""Users between two calls of ``on_users``, which is told how many more are done."""


def ignore(users: int) -> None:
    """Nobody waits for the users."""


class Users:
    """The users of a run, one after another, and what became of their episodes.

    Of episodes that failed nothing but their number leaves a node; here ``failure`` says, in one
    line, why the first did. ``rewards`` counts the reward bits of all others.
    """

    def __init__(self, environment: Environment, on_users: Callable[[int], None] = ignore) -> None:
        self.episodes, self.failed, self.rewards, self._told = 0, 0, 0, 0
        self.failure: str | None = None
        self._environment = environment
        self._on_users = on_users

    def report(self, plan: BatchPlan, slot: int) -> Ints:
        """The symbols of the report of the user in a batch's slot."""
        episode, symbols = slot_report(plan, self._environment, slot, test_entry=True)
        self.episodes += 1
        if episode is not None:
            self.rewards += int(episode.rewards.sum())
        else:
            self.failed += 1
            self.failure = self.failure or self._why(plan, slot)
        if self.episodes - self._told >= TOLD_EVERY:
            self.tell()
        return symbols

    def tell(self) -> None:
        """Say how many more users are done."""
        more, self._told = self.episodes - self._told, self.episodes
        if more:
            self._on_users(more)

    @property
    def reward_mean(self) -> float | None:
        """Mean sum of an episode's reward bits, of episodes that did not fail."""
        done = self.episodes - self.failed
        return self.rewards / done if done else None

    def _why(self, plan: BatchPlan, slot: int) -> str:
        """Run a user's episode again, with the same draws, for the error that ended it."""
        known = plan.descriptor
        policy, world = (
            slot_randomness(known, slot, purpose, test_entry=True)
            for purpose in ("policy", "environment")
        )
        chosen = plan.mixture.pick(word(policy))
        try:
            play(self._environment, chosen, (known.reward_low, known.reward_high), world)
        except Exception as error:  # a user's environment may raise anything
            return where(error, file_of(_theirs(self._environment)))
        return "it did not fail when it was run again"


def _theirs(environment: Environment) -> object:
    """What somebody wrote: behind our adapter, where there is one."""
    return environment.native if isinstance(environment, GymnasiumEnvironment) else environment


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
    """A deployment's batch: its descriptor, private counts, and the stage that it ended, if any."""

    deployment: Deployment
    descriptor: BatchDescriptor
    counts: BatchCounts
    stage: StageResult | None


@dataclass(frozen=True, slots=True)
class UserRun:
    """A run that is over."""

    batches: list[SimulatedBatch]
    learner: Learner
    summary: LearnerSummary


def run_per_user(
    spec: RunSpec, run_id: str, users: Users, registry: Registry | None = None
) -> UserRun:
    """Run a spec to its end, user by user.

    Raises:
        RemoteError: ``batch-too-small`` or ``invalid-spec``, as the coordinator would.
    """
    learner = (registry or Registry()).build(spec)
    batches: list[SimulatedBatch] = []
    try:
        while (deployment := learner.next_deployment()) is not None:
            batches.append(_carried_out(spec, run_id, users, learner, deployment, len(batches)))
        return UserRun(batches, learner, learner.summary())
    except LearnerError as error:
        raise refusal(spec, error) from error


def _carried_out(
    spec: RunSpec, run_id: str, users: Users, learner: Learner, deployment: Deployment, index: int
) -> SimulatedBatch:
    issued = issue(spec, run_id, NOBODY, deployment, index=index, step=index, expires_at=NEVER)
    counts = private_counts(issued.descriptor, batch_histogram(issued.descriptor, users))
    return SimulatedBatch(deployment, issued.descriptor, counts, learner.observe(counts))


def batch_histogram(descriptor: BatchDescriptor, users: Users) -> Ints:
    """What the analyzer makes (C + 1,) of all n reports of a batch."""
    plan = BatchPlan.of(descriptor)
    reports = [users.report(plan, slot) for slot in range(descriptor.n)]
    symbols = np.concatenate(reports).reshape(-1, descriptor.symbols.count)
    histogram, _ = count(descriptor.trust, plan.layout, symbols)
    return add_noise(descriptor, histogram)
