"""Simulates a run user by user, without network or encryption: ``riffle simulate --per-user``.

The node's own code makes each report. Draws are keyed by (run, batch, slot), as in a seeded run
on a network. A network run with the same spec, run id and test seed has the same private counts.
Seed s adds s to the spec's ``seed`` and ``test_seed``. Any environment of a node can be simulated.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.randomness import word
from riffle.common.mechanism.workflow import Report, count
from riffle.common.process.plugins import describe_error, source_file
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.batches.analyzer import add_noise
from riffle.coordinator.batches.counts import private_counts
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.learners.registry import Registry, refusal
from riffle.coordinator.learning.learner import BatchCounts, Deployment, LearnerError
from riffle.coordinator.specs import RunSpec
from riffle.experiments.presets import Preset
from riffle.experiments.regret import SeedResult
from riffle.experiments.simulator import Run, run_batches
from riffle.experiments.study import result_of
from riffle.node_client.environments.gymnasium import GymnasiumEnvironment
from riffle.node_client.environments.tabular import Environment, Modelled
from riffle.node_client.episode import play, slot_randomness, slot_report

NEVER = 1 << 40
SIMULATOR = Issuer("simulator", lambda: "00" * 32, lambda: NEVER)
Batch = tuple[BatchDescriptor, BatchCounts]
PROGRESS_EVERY = 1_000
"""``on_users`` is called after this many users, with their number."""


class Users:
    """The users of a run, one after another, and the outcomes of their episodes.

    ``failure`` is the error of the first failed episode, in one line. ``rewards`` sums the reward
    bits of episodes that did not fail.
    """

    def __init__(
        self, environment: Environment, on_users: Callable[[int], None] = lambda _: None
    ) -> None:
        self.episodes, self.failed, self.rewards, self._notified = 0, 0, 0, 0
        self.failure: str | None = None
        self._environment = environment
        self._on_users = on_users

    def report(self, batch: BatchDescriptor, slot: int) -> Report:
        """Returns the unsealed report of the user in a given slot of a batch."""
        episode, symbols = slot_report(batch, self._environment, slot, test_entry=True)
        self.episodes += 1
        if episode is not None:
            self.rewards += int(episode.rewards.sum())
        else:
            self.failed += 1
            self.failure = self.failure or self._failure_of(batch, slot)
        if self.episodes - self._notified >= PROGRESS_EVERY:
            self.notify()
        return symbols

    def notify(self) -> None:
        """Calls ``on_users`` with the number of users done since the last call."""
        more, self._notified = self.episodes - self._notified, self.episodes
        if more:
            self._on_users(more)

    @property
    def reward_mean(self) -> float | None:
        """The mean sum of an episode's reward bits, without failed episodes; None if all failed."""
        done = self.episodes - self.failed
        return self.rewards / done if done else None

    def _failure_of(self, batch: BatchDescriptor, slot: int) -> str:
        """Runs a user's episode again, with the same draws, and returns the error that ends it."""
        policy_draws, environment_draws = (
            slot_randomness(batch, slot, purpose, test_entry=True)
            for purpose in ("policy", "environment")
        )
        policy = batch.mixture.pick(word(policy_draws))
        try:
            play(self._environment, policy, batch.reward_range, environment_draws, batch.layout)
        except Exception as error:  # an external environment may raise anything
            code: object = self._environment
            if isinstance(code, GymnasiumEnvironment):
                code = code.native  # the external code is inside Riffle's adapter
            return describe_error(error, source_file(code))
        return "it did not fail when it was run again"


def run_per_user(
    spec: RunSpec, run_id: str, users: Users, registry: Registry | None = None
) -> tuple[Run, list[Batch]]:
    """Runs a spec user by user; returns the run, and each batch's descriptor and private counts.

    Raises RemoteError ``batch-too-small`` or ``invalid-spec`` if the coordinator would raise it.
    """
    learner = (registry or Registry()).build(spec)
    batches: list[Batch] = []

    def count(index: int, deployment: Deployment) -> tuple[BatchCounts, int]:
        issued = SIMULATOR.issue(run_id, spec, deployment, index=index, step=index)
        counts = private_counts(issued.descriptor, batch_histogram(issued.descriptor, users))
        batches.append((issued.descriptor, counts))
        return counts, issued.descriptor.padding.messages

    try:
        return run_batches(learner, count), batches
    except LearnerError as error:
        raise refusal(spec, error) from error


def batch_histogram(descriptor: BatchDescriptor, users: Users) -> Ints:
    """Returns the analyzer's histogram (C + 1,) of all n reports of a batch."""
    reports = [users.report(descriptor, slot) for slot in range(descriptor.n)]
    if descriptor.word_bits:  # there are no dummies
        return np.append(np.sum(reports, axis=0, dtype=np.int64), 0)
    symbols = np.concatenate(reports).reshape(-1, descriptor.symbols.count)
    histogram, _ = count(descriptor.trust, descriptor.layout, symbols)
    return add_noise(descriptor, histogram)


RUN_ID = "0" * 32  # this id keys the draws if the spec has no run id


def run_seed(
    chosen: Preset, seed: int, on_users: Callable[[int], None] = lambda _: None
) -> tuple[SeedResult, list[dict[str, Any]]]:
    """Runs one seed user by user; returns the result, and each batch as in the REST API.

    Raises LocalError ``invalid-spec`` if every episode failed.
    """
    started, spec, world = time.perf_counter(), chosen.spec, chosen.make()
    seeds = {"seed": spec.seed + seed, "test_seed": (spec.test_seed or 0) + seed}
    seeded, users = spec.model_copy(update=seeds), Users(world, on_users)
    run, batches = run_per_user(seeded, spec.run_id or RUN_ID, users, chosen.registry())
    users.notify()
    if users.failed == users.episodes > 0:
        raise LocalError("invalid-spec", f"every episode failed, the first with {users.failure}")
    mdp = world.mdp if isinstance(world, Modelled) else None
    result = result_of(seeded, seed, run, mdp, time.perf_counter() - started)
    asked: dict[str, Any] = {"reward_mean": users.reward_mean, "episodes_failed": users.failed}
    return replace(result, first_failure=users.failure, **asked), [
        {"batch_id": d.batch_id, "n": d.n, "layer": d.layer, "counts": _public(counts)}
        for d, counts in batches
    ]


def _public(counts: BatchCounts) -> dict[str, Any]:
    """Returns the fields that `coordinator.api.models.Counts` publishes, arrays as lists.

    Importing that module would load the services' libraries, which a simulation does not need.
    """
    fields = asdict(counts)
    for name in ("layout", "n", "term"):
        del fields[name]
    for name in ("transition_variance", "visit_variance", "reward_variance"):
        fields[name] = float(fields[name].max())
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}
