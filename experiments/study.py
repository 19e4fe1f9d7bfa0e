"""Many seeds of one simulated run, with confidence bands.

The same learner objects as the services drive the population-level simulator. Seeds are the keys
of the population's draws; the learner's own draws take the spec's seed plus the same number.
Bands are two-sided 95 % Student t intervals of the mean over seeds.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from scipy import stats

from common.counters import CounterLayout
from coordinator.planning import calibrated
from coordinator.registry import Registry
from coordinator.specs import RunSpec
from experiments.regret import optimal_value, policy_value
from experiments.simulator import Mechanism, simulate
from node_client.environments.registry import Parameter, exact_mdp, make

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One simulated run: what it lost, learned and cost."""

    seed: int
    regret: float
    optimal_value: float
    policy_value: float
    value_estimate: float
    active: int
    policy_switches: int
    messages: int
    seconds: float
    policy: list[list[int]]

    @property
    def within_5_percent(self) -> bool:
        """Whether the learned policy loses at most 5 % of the optimal value."""
        return self.policy_value >= 0.95 * self.optimal_value


@dataclass(frozen=True, slots=True)
class Study:
    """The seeds of one spec."""

    spec: RunSpec
    results: tuple[SeedResult, ...]

    def document(self) -> dict[str, Any]:
        """Means with bands, under the keys that ``riffle simulate`` documents."""
        regrets = [result.regret for result in self.results]
        mean, low, high = band(regrets)
        last = self.results[-1]
        return {
            "learner": self.spec.learner,
            "preset": self.spec.preset,
            "environment": self.spec.environment,
            "episodes": self.spec.episodes,
            "epsilon": self.spec.epsilon,
            "beta": self.spec.beta,
            "families": self.spec.families,
            "seeds": len(self.results),
            "regret_mean": mean,
            "regret_ci": [low, high],
            "regret_ci_method": "two-sided 95 % Student t over seeds",
            "regret_ceiling": last.optimal_value * self.spec.episodes,
            "optimal_value": last.optimal_value,
            "policy_value_mean": float(np.mean([r.policy_value for r in self.results])),
            "policy_value_min": min(r.policy_value for r in self.results),
            "share_within_5_percent": float(np.mean([r.within_5_percent for r in self.results])),
            "policy_switches": max(r.policy_switches for r in self.results),
            "messages": max(r.messages for r in self.results),
            "seconds": sum(r.seconds for r in self.results),
        }


def band(values: list[float]) -> tuple[float, float, float]:
    """Mean, lower and upper end of its Student t interval; one value has no band."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values))
    return mean, mean - half, mean + half


def run_seed(spec: RunSpec, environment: dict[str, Parameter], seed: int) -> SeedResult:
    """One seed of a spec on the population-level simulator."""
    started = time.perf_counter()
    mdp = exact_mdp(make(spec.environment, **environment))

    def mechanism(layout: CounterLayout, n: int) -> Mechanism:
        made = calibrated(spec, n, layout.layer)
        return Mechanism(made.noise, made.padding)

    learner = Registry().build(spec.model_copy(update={"seed": spec.seed + seed}))
    run = simulate(mdp, learner, spec.families, mechanism, seed)
    policy = run.summary.policy
    return SeedResult(
        seed=seed,
        regret=run.regret.total,
        optimal_value=optimal_value(mdp),
        policy_value=policy_value(mdp, policy),
        value_estimate=run.summary.value_estimate,
        active=run.summary.active,
        policy_switches=run.regret.switches,
        messages=run.messages,
        seconds=time.perf_counter() - started,
        policy=policy.tolist(),
    )


def study(
    spec: RunSpec,
    environment: dict[str, Parameter],
    seeds: int,
    *,
    workers: int = 2,
    on_result: Callable[[SeedResult], None] = lambda _: None,
) -> Study:
    """All seeds 0..seeds-1, in ``workers`` processes; results in the order of the seeds."""
    results: list[SeedResult] = []
    for result in _results(spec, environment, seeds, workers):
        on_result(result)
        results.append(result)
    return Study(spec, tuple(results))


def _results(
    spec: RunSpec, environment: dict[str, Parameter], seeds: int, workers: int
) -> Iterator[SeedResult]:
    if min(workers, seeds) <= 1:
        yield from (run_seed(spec, environment, seed) for seed in range(seeds))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, [spec] * seeds, [environment] * seeds, range(seeds))
