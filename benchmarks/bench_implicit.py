"""Measures SDP-PE with implicit active sets at X=50, A=4, H=20: seconds a stage.

Run ``python -m benchmarks.bench_implicit [K]``. The MDP is random and seeded, the noise is that of
epsilon = 1, beta = 1e-5 with the joint family, the preset is practical. Only the learner is timed
(planning, designs, bootstrap, elimination), not the simulated population. Beside the seconds of the
clock stand processor seconds, which a busy machine does not change.
"""

import sys
import time
from dataclasses import dataclass

from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.randomness import generator_for
from riffle.coordinator.learners.registry import problem
from riffle.coordinator.learning.learner import StageResult
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.specs import RunSpec
from riffle.experiments.regret import optimal_value
from riffle.experiments.simulator import private_counts
from riffle.experiments.study import mechanism_of
from riffle.node_client.environments.registry import exact_mdp, make
from tests.coordinator.learning.worlds import suboptimality

BAR_SECONDS = 60.0


@dataclass
class Spent:
    """Seconds of the clock and of the processor."""

    clock: float = 0.0
    processor: float = 0.0


def main() -> None:
    K = int(sys.argv[1]) if len(sys.argv) > 1 else 3_000_000
    mdp = exact_mdp(make("RandomMDP-v0", states=50, actions=4, horizon=20, seed=1))
    spec = RunSpec(
        name="bench",
        environment="RandomMDP-v0",
        states=50,
        actions=4,
        horizon=20,
        start=tuple(mdp.d1),
        episodes=K,
        epsilon=1.0,
        beta=1e-5,
        dishonest_fraction=0.0,
    )
    learner = SDPPE(problem(spec))
    mechanism, spent, batch = mechanism_of(spec), Spent(), 0
    print(f"K={K}, {len(learner.schedule.stages)} stages, V*={optimal_value(mdp):.4f}")
    while (deployment := learner.next_deployment()) is not None:
        layout = CounterLayout(mdp.sizes, spec.families, deployment.layer)
        noise = mechanism(layout, deployment.n).noise
        generator = generator_for(1, "batch", batch)
        counts = private_counts(mdp, deployment, layout, noise, generator)
        clock, processor = time.perf_counter(), time.process_time()
        stage = learner.observe(counts)
        spent.clock += time.perf_counter() - clock
        spent.processor += time.process_time() - processor
        batch += 1
        if stage is not None:
            report(stage, spent, suboptimality(mdp, stage.policy))
            assert spent.processor <= BAR_SECONDS
            spent = Spent()


def report(stage: StageResult, spent: Spent, loss: float) -> None:
    print(
        f"stage {stage.stage}: {spent.clock:.1f} s ({spent.processor:.1f} s of processor), "
        f"radius {stage.radius:.3f}, {stage.decisions_eliminated} decisions eliminated, "
        f"coverage gap at most {stage.coverage_gap:.3f}, V* - V = {loss:.4f}"
    )


if __name__ == "__main__":
    main()
