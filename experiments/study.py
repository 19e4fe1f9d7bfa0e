"""Simulates one run with many seeds, and gives confidence bands.

The services' own learner objects run on the population-level simulator. Learners that plan before
every episode (UCBVI, private UCB-VI) run through `per_episode` and send no messages. A seed keys
the population's draws of one run; the learner's own draws use the spec's seed plus that number.
Bands are two-sided 95 % Student t intervals of the mean over seeds.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from riffle.common.process.workers import SPAWN
from riffle.coordinator.learners.registry import Registry, refusal, sdp_pe_in
from riffle.coordinator.learning.learner import Learner, LearnerError
from riffle.coordinator.learning.planning import Model, plan
from riffle.coordinator.learning.privatizers import NoiseLevels
from riffle.coordinator.specs import RunSpec
from riffle.experiments.bands import METHOD, student_band
from riffle.experiments.per_episode import PER_EPISODE, Constant, mechanism_of
from riffle.experiments.per_episode import run as run_per_episode
from riffle.experiments.regret import optimal_value, policy_value, regret, switches
from riffle.experiments.simulator import Run, simulate
from riffle.node_client.environments.registry import Parameter, exact_mdp, make
from riffle.node_client.environments.tabular import TabularMDP

Files = Mapping[str, str]
NO_FILES: Files = {}

Result = TypeVar("Result")

# A spec calls the accountant's noise "exact"; simulations call the least provable noise "tight".
CALIBRATIONS: dict[str, NoiseLevels | Literal["conference"]] = {
    "exact": "tight",
    "paper": "paper",
    "conference": "conference",
}


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The result of one simulated run: regret, learned policy, cost, and every constant used.

    optimal_survives: an optimal policy is active at the end. eliminated: some policy is not active.
    Both are None for learners without an active set. Regret and values are NaN where the
    environment's probabilities are unknown.
    """

    seed: int
    regret: float
    optimal_value: float
    policy_value: float
    policy_switches: int
    messages: int
    seconds: float
    policy: list[list[int]]
    constants: dict[str, Constant] = field(default_factory=dict)
    optimal_survives: bool | None = None
    eliminated: bool | None = None

    @property
    def within_5_percent(self) -> bool:
        """Whether the learned policy loses at most 5 % of the optimal value."""
        return self.policy_value >= 0.95 * self.optimal_value


@dataclass(frozen=True, slots=True)
class Study:
    """The results of one spec over its seeds."""

    spec: RunSpec
    results: tuple[SeedResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns means with bands, under the keys that ``riffle simulate`` documents."""
        last = self.results[-1]
        return {
            "learner": self.spec.learner,
            "preset": self.spec.preset,
            "calibration": CALIBRATIONS[self.spec.calibration],
            "environment": self.spec.environment,
            "episodes": self.spec.episodes,
            "epsilon": self.spec.epsilon,
            "beta": self.spec.beta,
            "trust": self.spec.trust,
            "families": last.constants.get("families", "not private"),
            "seeds": len(self.results),
            **self._exact_values(),
            "share_optimal_survives": share([r.optimal_survives for r in self.results]),
            "share_eliminated": share([r.eliminated for r in self.results]),
            "policy_switches": max(r.policy_switches for r in self.results),
            "messages": max(r.messages for r in self.results),
            "seconds": sum(r.seconds for r in self.results),
            "constants": {k: v for k, v in last.constants.items() if k != "seed"},
        }

    def _exact_values(self) -> dict[str, Any]:
        """Returns regret and values, as null if the environment's probabilities are unknown."""
        best = self.results[-1].optimal_value
        mean, interval = band([result.regret for result in self.results])
        values = [result.policy_value for result in self.results]
        exact = {
            "regret_mean": mean,
            "regret_ci": interval,
            "regret_ci_method": METHOD,
            "regret_ceiling": best * self.spec.episodes,
            "optimal_value": best,
            "policy_value_mean": float(np.mean(values)),
            "policy_value_min": min(values),
            "share_within_5_percent": share([r.within_5_percent for r in self.results]),
        }
        return dict.fromkeys(exact) if math.isnan(best) else exact


def band(values: list[float]) -> tuple[float, list[float] | None]:
    """Returns the mean and its Student t interval, which is None for a single value."""
    result = student_band(values)
    return float(result.mean), [float(result.low), float(result.high)] if len(values) > 1 else None


def share(flags: list[bool | None]) -> float | None:
    """Returns the share of true flags; None if the flag is undefined for any run."""
    return None if None in flags else float(np.mean([bool(flag) for flag in flags]))


def run_seed(
    spec: RunSpec, environment: dict[str, Parameter], seed: int, learners: Files = NO_FILES
) -> SeedResult:
    """Runs one seed of a spec on the simulator that its learner needs."""
    mdp = exact_mdp(make(spec.environment, **environment))
    if spec.learner in PER_EPISODE:
        return _run_per_episode(spec, mdp, seed)
    return _run_by_population(spec, mdp, seed, Registry(files=learners))


def _run_by_population(spec: RunSpec, mdp: TabularMDP, seed: int, registry: Registry) -> SeedResult:
    started = time.perf_counter()
    learner = registry.build(spec.model_copy(update={"seed": spec.seed + seed}))
    try:
        run = simulate(mdp, learner, spec.families, mechanism_of(spec), seed, spec.support)
    except LearnerError as error:
        raise refusal(spec, error) from error
    return result_of(spec, seed, run, mdp, time.perf_counter() - started)


def result_of(
    spec: RunSpec, seed: int, run: Run, mdp: TabularMDP | None, seconds: float
) -> SeedResult:
    """Returns the result of a batched run; ``mdp`` is None if the probabilities are unknown."""
    policy = run.summary.policy
    return SeedResult(
        seed=seed,
        regret=math.nan if mdp is None else regret(mdp, run.deployments).total,
        optimal_value=math.nan if mdp is None else optimal_value(mdp),
        policy_value=math.nan if mdp is None else policy_value(mdp, policy),
        policy_switches=switches(run.deployments),
        messages=run.messages,
        seconds=seconds,
        policy=policy.tolist(),
        constants={**run.summary.constants, **_recorded(spec)},
        optimal_survives=None if mdp is None else optimal_survives(run.learner, mdp),
        eliminated=_any_eliminated(run),
    )


def _recorded(spec: RunSpec) -> dict[str, Constant]:
    support = "none" if spec.support is None else "declared"
    declared: dict[str, Constant] = {"homogeneous": spec.homogeneous, "support": support}
    return {"families": spec.families, "delta": spec.delta, **declared}


def _any_eliminated(run: Run) -> bool | None:
    """Returns whether some policy was eliminated; None for a learner without an active set."""
    if sdp_pe_in(run.learner) is None:
        return None
    return any(stage.eliminated or stage.decisions_eliminated for stage in run.stages)


def optimal_survives(learner: Learner, mdp: TabularMDP) -> bool | None:
    """Returns whether a policy of value V* is active; None for a learner without an active set."""
    inner = sdp_pe_in(learner)
    if inner is None:
        return None
    best = plan(mdp.P, mdp.r, mdp.d1)
    # Several policies may be optimal: they differ in states that an optimal one never visits.
    active_value = float(inner.phi.best(Model(mdp.P, mdp.r)).value)
    return inner.phi.contains(best.policy) or active_value >= float(best.value) - 1e-9


def _run_per_episode(spec: RunSpec, mdp: TabularMDP, seed: int) -> SeedResult:
    started = time.perf_counter()
    run = run_per_episode(
        spec.learner,
        mdp,
        spec.episodes,
        epsilon=spec.epsilon,
        beta=spec.beta,
        seed=spec.seed + seed,
        calibration=CALIBRATIONS[spec.calibration],
        constants=spec.preset,
        options=spec.options,
    )
    return SeedResult(
        seed=seed,
        regret=run.total,
        optimal_value=optimal_value(mdp),
        policy_value=policy_value(mdp, run.policy),
        policy_switches=run.switches,
        messages=0,
        seconds=time.perf_counter() - started,
        policy=run.policy.tolist(),
        constants=run.constants,
    )


def study(
    spec: RunSpec,
    environment: dict[str, Parameter],
    seeds: int,
    *,
    workers: int = 2,
    on_result: Callable[[SeedResult], None] = lambda _: None,
    learners: Files = NO_FILES,
) -> Study:
    """Runs a spec with seeds 0..seeds-1 in ``workers`` processes; results are in seed order.

    ``learners`` maps names to ``path/file.py:Class``, for learners that are not installed.
    """
    run = partial(run_seed, spec, environment, learners=learners)
    results: list[SeedResult] = []
    for result in map_seeds(run, seeds, workers):
        on_result(result)
        results.append(result)
    return Study(spec, tuple(results))


def map_seeds(run: Callable[[int], Result], seeds: int, workers: int) -> Iterator[Result]:
    """Yields ``run(seed)`` for seeds 0..seeds-1 in that order, from ``workers`` processes."""
    if min(workers, seeds) <= 1:
        yield from map(run, range(seeds))
        return
    with ProcessPoolExecutor(workers, mp_context=SPAWN) as pool:
        yield from pool.map(run, range(seeds))
