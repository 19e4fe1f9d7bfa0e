"""Measures poisoning: the effect of dishonest reports as a function of their share.

Run `python -m benchmarks.bench_poisoning`. RiverSwim-v0 (X=4, A=2, H=6), K = 20,000, trust shuffle,
epsilon 1 at gamma = 10 %, the practical constants, simulated by population. In every batch of n
reports, k = floor(share n) are dishonest: they carry neither data nor noise, and all their L
messages name counters of the attack. The others are honest. The analyzer debiases as if all were.

- counter: all k L messages name one counter of a batch of n = K; the largest shift from the same
  batch with k honest reports instead, and the bound k L.
- value: the estimate of that batch's optimal policy, all messages on one counter with reward 1,
  before and after clipping to [0, H].
- learned: V of the policy that SDP-PE learns over V*, the mean over seeds under the worst of
  `ATTACKS`, which repeat their lie at every step and in every batch.
- marked: the deviation of that batch's counts in standard deviations (the median over draws), and
  the runs of the worst attack in which the coordinator marks batches.
- hidden: the learned V / V* and the marked batches if all k reports claim one episode, which stays
  in state 0 and is rewarded, and carry noise as honest ones do. No test of counts can find these.
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
from riffle.coordinator.batches.counts import check, value_estimate
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

    def hidden_lies(self, reports: int, generator: np.random.Generator) -> Ints:
        """Draws the counts (C,) of reports that claim one episode, with honest noise."""
        chosen = np.repeat(targets(self.layout, ATTACKS["reward at the start"]), reports)
        true = np.bincount(chosen, minlength=self.layout.counters)
        return noisy_counts(true, reports, self.noise, generator)

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


def learned(share: float, attack: Sequence[Lie] | None, seed: int) -> tuple[float, int, int]:
    """Returns V of the learned policy over V*, the marked batches and all batches.

    ``attack``: None is the hidden one.
    """
    spec = specification(seed)
    learner, number, marked = Registry().build(spec), 0, 0
    while (deployment := learner.next_deployment()) is not None:
        batch, generator = Batch.of(spec, deployment), generator_for(seed, "batch", number)
        k = int(share * deployment.n)
        honest = batch.honest(deployment.n - k, generator)
        lies = (
            batch.lies(k, targets(batch.layout, attack))
            if attack
            else batch.hidden_lies(k, generator)
        )
        counts = batch.counts(honest + lies)
        marked += check(counts, MDP.d1).suspicious
        learner.observe(counts)
        number += 1
    value = policy_value(MDP, learner.summary().policy) / optimal_value(MDP)
    return value, marked, number


def one_batch(share: float) -> tuple[int, int, float, FloatArray, float]:
    """Returns k, L, the largest shift of a counter, values (true, raw, clipped), the deviation."""
    optimal = Mixture.single(plan(MDP.P, MDP.r, MDP.d1).policy)
    spec = specification(0)
    batch, k = Batch.of(spec, Deployment(0, "manual", optimal, K, None)), int(share * K)
    generator = generator_for(0, "one batch")
    lie = batch.lies(k, targets(batch.layout, ATTACKS["reward at the start"])[:1])
    found = [batch.counts(batch.honest(K - k, generator) + lie) for _ in range(20)]
    deviation = float(np.median([check(counts, MDP.d1).deviation for counts in found]))
    rest, replaced = batch.honest(K - k, generator), batch.honest(k, generator)
    poisoned = rest + lie
    shift = float(np.abs(poisoned - rest - replaced).max())
    counts = batch.counts(poisoned)
    estimate = value_estimate(counts, spec.delta)
    assert estimate is not None and counts.rewards is not None
    raw = float(counts.rewards.sum()) / K
    values = np.array([optimal_value(MDP), raw, estimate.value])
    return k, batch.L, shift, values, deviation


def several(share: float, attack: Sequence[Lie] | None) -> tuple[float, str]:
    """Returns the mean of V / V* over seeds, and a text with the marked runs and batches."""
    values, marked, batches = zip(*(learned(share, attack, s) for s in range(SEEDS)), strict=True)
    runs = sum(count > 0 for count in marked)
    return float(
        np.mean(values)
    ), f"{runs} of {SEEDS} runs, {sum(marked)} of {sum(batches)} batches"


def main() -> None:
    """Prints the measurements of docs/security.md."""
    columns = ["share", "k", "shift of a counter", "bound k L", "value: true, raw, clipped"]
    columns += ["deviation", "learned", "marked", "hidden", "marked"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for share in SHARES:
        k, L, shift, (true, raw, clipped), deviation = one_batch(share)
        runs = {name: several(share, lies) for name, lies in ATTACKS.items()}
        worst = min(runs, key=lambda name: runs[name][0])
        value, marked = several(share, None)
        print(
            f"| {share:.1%} | {k:,} | {shift:,.0f} | {k * L:,} | {true:.2f}, {raw:.2f}, "
            f"{clipped:.2f} | {deviation:.1f} | {runs[worst][0]:.3f} "
            f"({worst if share else 'nobody lies'}) | {runs[worst][1]} | {value:.3f} | {marked} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
