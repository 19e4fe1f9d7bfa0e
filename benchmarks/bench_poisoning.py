"""Measures poisoning: the effect of dishonest reports as a function of their share.

Run `python -m benchmarks.bench_poisoning`. RiverSwim-v0 (X=4, A=2, H=6), K = 20,000, trust shuffle,
epsilon 1 at gamma = 10 %, the practical constants, simulated by population. Of every batch of n
reports k = floor(share n) are dishonest: they carry neither data nor noise, and all their L
messages name counters of the attack. The rest are honest; the analyzer debiases as if all were.

- counter: all k L messages on one counter of a batch of n = K; the largest shift against the same
  batch with k honest reports in their place, and the bound k L.
- value: the estimate of that batch's optimal policy, all messages on one counter with reward 1,
  before and after clipping to [0, H].
- learned: V of the policy that SDP-PE learns over V*, the mean over seeds under the worst of
  `ATTACKS`, which repeat their lie at every step and in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Ints
from riffle.common.mechanism.parameters import BatchNoise
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.common.mechanism.workflow import debias
from riffle.coordinator.batches.counts import value_estimate
from riffle.coordinator.batches.issue import calibrated
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.learning.learner import BatchCounts, Deployment, FloatArray, batch_counts
from riffle.coordinator.learning.planning import plan
from riffle.coordinator.specs import RunSpec
from riffle.experiments.regret import optimal_value, policy_value
from riffle.experiments.simulator import counters, joint_counts, noisy_counts
from riffle.node_client.environments.tabular import LEFT, RIGHT, riverswim

K = 20_000
SHARES = (0.0, 0.001, 0.01, 0.05, 0.1)
SEEDS = 3
MDP = riverswim()

Lie = tuple[int, int, int]
"""(x, a, x'): the reports claim this transition, with reward 1 where rewards are in scope."""
ATTACKS: dict[str, tuple[Lie, ...]] = {
    "reward at the start": ((0, LEFT, 0),),
    "reward beside it": ((1, LEFT, 0),),
    "a leap by going left": ((0, LEFT, 3), (1, LEFT, 3), (2, LEFT, 3)),
    "right leads back": ((1, RIGHT, 0), (2, RIGHT, 0), (3, RIGHT, 0)),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """A deployment with the layout, noise and report length that it is calibrated to."""

    deployment: Deployment
    layout: CounterLayout
    noise: BatchNoise
    L: int

    @classmethod
    def of(cls, spec: RunSpec, deployment: Deployment) -> Batch:
        """Returns the batch that the coordinator would issue."""
        calibration = calibrated(spec, deployment.n, deployment.layer)
        layout = CounterLayout(MDP.sizes, spec.families, deployment.layer)
        return cls(deployment, layout, calibration.noise, calibration.padding.messages)

    def honest(self, reports: int, generator: np.random.Generator) -> Ints:
        """Draws the counts (C,) of this many honest reports."""
        true = counters(self.layout, joint_counts(MDP, self.deployment.mixture, reports, generator))
        return noisy_counts(true, reports, self.noise, generator)

    def lies(self, reports: int, chosen: Sequence[int]) -> Ints:
        """Returns the counts (C,) of dishonest reports: all messages, evenly on chosen counters."""
        named = np.resize(np.asarray(chosen), reports * self.L)
        return np.bincount(named, minlength=self.layout.counters)

    def counts(self, histogram: Ints) -> BatchCounts:
        """Debiases a histogram as the analyzer does."""
        n = self.deployment.n
        debiased = debias(self.noise, n, np.append(histogram, n))
        return batch_counts(self.layout, n, debiased, self.noise.variance(n), self.noise.term)


def targets(layout: CounterLayout, lies: Sequence[Lie]) -> list[int]:
    """Returns the counters of these transitions at every step in scope, with reward 1."""
    blocks = layout.split(np.arange(layout.counters, dtype=np.float64))
    cells = blocks["joint"][..., 1] if "joint" in blocks else blocks["transitions"]
    return [int(index) for lie in lies for index in cells[(slice(None), *lie)]]


def specification(seed: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "poisoning",
            "learner": "sdp-pe",
            "environment": "MDP",
            "states": MDP.sizes.X,
            "actions": MDP.sizes.A,
            "horizon": MDP.sizes.H,
            "start": tuple(MDP.d1.tolist()),
            "families": "joint",
            "episodes": K,
            "epsilon": 1.0,
            "beta": 1e-5,
            "dishonest_fraction": max(SHARES),
            "seed": seed,
        }
    )


def learned(share: float, attack: Sequence[Lie], seed: int) -> float:
    """Returns V of the learned policy over V*."""
    spec = specification(seed)
    learner, number = Registry().build(spec), 0
    while (deployment := learner.next_deployment()) is not None:
        batch, generator = Batch.of(spec, deployment), generator_for(seed, "batch", number)
        k = int(share * deployment.n)
        lies = batch.lies(k, targets(batch.layout, attack))
        learner.observe(batch.counts(batch.honest(deployment.n - k, generator) + lies))
        number += 1
    return policy_value(MDP, learner.summary().policy) / optimal_value(MDP)


def one_batch(share: float) -> tuple[int, int, float, FloatArray]:
    """Returns k, L, the largest shift of a counter, and values: true, raw and clipped."""
    optimal = Mixture.single(plan(MDP.P, MDP.r, MDP.d1).policy)
    spec = specification(0)
    batch, k = Batch.of(spec, Deployment(0, "manual", optimal, K, None)), int(share * K)
    generator = generator_for(0, "one batch")
    rest, replaced = batch.honest(K - k, generator), batch.honest(k, generator)
    poisoned = rest + batch.lies(k, targets(batch.layout, ATTACKS["reward at the start"])[:1])
    shift = float(np.abs(poisoned - rest - replaced).max())
    counts = batch.counts(poisoned)
    estimate = value_estimate(counts, spec.delta)
    assert estimate is not None and counts.rewards is not None
    raw = float(counts.rewards.sum()) / K
    return k, batch.L, shift, np.array([optimal_value(MDP), raw, estimate.value])


def main() -> None:
    """Prints the measurements of docs/security.md."""
    print("| share | k | shift of a counter | bound k L | value: true, raw, clipped | learned |")
    print("|---|---|---|---|---|---|")
    for share in SHARES:
        k, L, shift, (true, raw, clipped) = one_batch(share)
        means = {
            name: float(np.mean([learned(share, lies, seed) for seed in range(SEEDS)]))
            for name, lies in ATTACKS.items()
        }
        worst = min(means, key=lambda name: means[name])
        print(
            f"| {share:.1%} | {k:,} | {shift:,.0f} | {k * L:,} | {true:.2f}, {raw:.2f}, "
            f"{clipped:.2f} | {means[worst]:.3f} ({worst if share else 'nobody lies'}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
