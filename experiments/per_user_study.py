"""Many seeds of one run, simulated user by user: ``riffle simulate --per-user``.

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

from riffle.coordinator.counts import plain
from riffle.coordinator.registry import Registry
from riffle.coordinator.specs import RunSpec
from riffle.experiments.per_user import UserRun, Users, ignore, run_per_user
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
from riffle.node_client.environments.environment import Modelled
from riffle.node_client.environments.registry import Parameter, make
from riffle.node_client.environments.tabular import TabularMDP

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
