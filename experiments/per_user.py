"""The per-user path: every user's report made one by one, without network or encryption.

Draws are keyed by (run, batch, slot), as at the services' test entry point, and encoding is the
node's own code. So a networked run with the same spec, run id and test seed has the same private
counts, batch by batch, whatever the order of arrival. It needs no transition probabilities: any
environment that a node can run can be simulated so, at a cost that grows with the users.

Many seeds of one run, simulated user by user: ``riffle simulate --per-user``.

Seed 0 has the spec's own seeds, so that it is the run that services do of the same spec and run id;
seed s has those plus s.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.randomness import word
from riffle.common.mechanism.workflow import count
from riffle.common.process.plugins import describe_error, source_file
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.coordinator.batches.analyzer import add_noise
from riffle.coordinator.batches.counts import plain, private_counts
from riffle.coordinator.batches.issue import Party, issue
from riffle.coordinator.learners.registry import Registry, refusal
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    Learner,
    LearnerError,
    LearnerSummary,
    StageResult,
)
from riffle.coordinator.specs import RunSpec
from riffle.experiments.regret import optimal_value, policy_value, regret, switches
from riffle.experiments.study import (
    NO_FILES,
    Files,
    SeedResult,
    Study,
    anything_eliminated,
    each_seed,
    optimal_survives,
)
from riffle.node_client.environments.gymnasium import GymnasiumEnvironment
from riffle.node_client.environments.registry import Parameter, make
from riffle.node_client.environments.tabular import Environment, Modelled, TabularMDP
from riffle.node_client.episode import PreparedBatch, play, slot_randomness, slot_report

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

    def report(self, plan: PreparedBatch, slot: int) -> Ints:
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

    def _why(self, plan: PreparedBatch, slot: int) -> str:
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
            return describe_error(error, source_file(_theirs(self._environment)))
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
    plan = PreparedBatch.of(descriptor)
    reports = [users.report(plan, slot) for slot in range(descriptor.n)]
    symbols = np.concatenate(reports).reshape(-1, descriptor.symbols.count)
    histogram, _ = count(descriptor.trust, plan.layout, symbols)
    return add_noise(descriptor, histogram)


RUN_ID = "0" * 32


@dataclass(frozen=True, slots=True)
class UserSeed:
    """A seed's result, as every simulation's, and what is known as its users were run one by one.

    ``reward_mean``: see `Users`. ``batches`` have their private counts as the coordinator's answers
    have them.
    """

    result: SeedResult
    value_estimate: float
    reward_mean: float | None
    episodes_failed: int
    first_failure: str | None
    batches: list[dict[str, Any]]


def document(spec: RunSpec, seeds: list[UserSeed]) -> dict[str, Any]:
    """What a study by population says, and more; policy and batches are those of the first seed."""
    common, first = Study(spec, tuple(seed.result for seed in seeds)).document(), seeds[0]
    rewards = [seed.reward_mean for seed in seeds if seed.reward_mean is not None]
    constants = common.pop("constants")
    return {
        **common,
        "value_estimate_mean": float(np.mean([seed.value_estimate for seed in seeds])),
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "episodes_failed": sum(seed.episodes_failed for seed in seeds),
        "first_failure": next((s.first_failure for s in seeds if s.first_failure), None),
        "run_id": run_id_of(spec),
        "test_seed": spec.test_seed or 0,
        "policy": first.result.policy,
        "batches": first.batches,
        "constants": constants,
    }


def study(
    spec: RunSpec,
    environment: dict[str, Parameter],
    seeds: int,
    *,
    workers: int = 2,
    on_users: Callable[[int], None] = ignore,
    learners: Files = NO_FILES,
) -> list[UserSeed]:
    """All seeds 0..seeds-1, in ``workers`` processes; in one, ``on_users`` is told as they go."""
    alone = min(workers, seeds) <= 1
    told = on_users if alone else ignore
    one = partial(run_seed, spec, environment, learners=learners, on_users=told)
    done: list[UserSeed] = []
    for seed in each_seed(one, seeds, workers):
        if not alone:
            on_users(spec.episodes)
        done.append(seed)
    return done


def run_id_of(spec: RunSpec) -> str:
    """The run id, which keys the draws."""
    return spec.run_id or RUN_ID


def run_seed(
    spec: RunSpec,
    environment: dict[str, Parameter],
    seed: int,
    learners: Files = NO_FILES,
    on_users: Callable[[int], None] = ignore,
) -> UserSeed:
    """One seed of a spec, user by user."""
    began = time.perf_counter()
    world = make(spec.environment, **environment)
    seeds = {"seed": spec.seed + seed, "test_seed": (spec.test_seed or 0) + seed}
    seeded = spec.model_copy(update=seeds)
    users = Users(world, on_users)
    run = run_per_user(seeded, run_id_of(spec), users, Registry(files=learners))
    users.tell()
    mdp = world.mdp if isinstance(world, Modelled) else None
    return UserSeed(
        result=_result(seeded, seed, run, mdp, time.perf_counter() - began),
        value_estimate=run.summary.value_estimate,
        reward_mean=users.reward_mean,
        episodes_failed=users.failed,
        first_failure=users.failure,
        batches=[
            {
                "batch_id": batch.descriptor.batch_id,
                "n": batch.descriptor.n,
                "layer": batch.descriptor.layer,
                "counts": plain(batch.counts),
            }
            for batch in run.batches
        ],
    )


def _result(
    spec: RunSpec, seed: int, run: UserRun, mdp: TabularMDP | None, seconds: float
) -> SeedResult:
    policy, deployments = run.summary.policy, [batch.deployment for batch in run.batches]
    stages = [batch.stage for batch in run.batches if batch.stage is not None]
    sent = (batch.descriptor.n * batch.descriptor.padding.messages for batch in run.batches)
    return SeedResult(
        seed=seed,
        regret=math.nan if mdp is None else regret(mdp, deployments).total,
        optimal_value=math.nan if mdp is None else optimal_value(mdp),
        policy_value=math.nan if mdp is None else policy_value(mdp, policy),
        policy_switches=switches(deployments),
        messages=sum(sent),
        seconds=seconds,
        policy=policy.tolist(),
        constants=dict(run.summary.constants) | {"families": spec.families, "delta": spec.delta},
        optimal_survives=None if mdp is None else optimal_survives(run.learner, mdp),
        eliminated=anything_eliminated(run.learner, stages),
    )
