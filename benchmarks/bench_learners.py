"""Measures `--learner auto` beside SDP-PE as it was at 6b57412: the tables of docs/algorithm.md.

    python -m benchmarks.bench_learners river     # RiverSwim-v0 at three K, and messages
    python -m benchmarks.bench_learners epsilons  # five environments, five epsilons, K = 20,000
    python -m benchmarks.bench_learners declared  # what a declared support is worth
    python -m benchmarks.bench_learners large     # seconds a batch, X=50, A=4, H=20

``--first`` and ``--seeds`` choose the seeds; the default, 7000 to 7019, was not used for tuning. A
cell is the mean pseudo-regret with half the width of its 95 % Student t band over seeds. The
baseline is in `baseline_sdp_pe.json`. The exit code is 1 if a cell is worse than the baseline
beyond both bands, or if a bar is missed. `declared` has two bars on RiverSwim-v0: a regret of
1,300, and 95 % of runs within 5 % of V*. It has two on FrozenLake-v1: a fifth of the counters, and
policies worth 85 % of V* in the mean over seeds. `large` fails if a batch takes more than 20 s, or
at K = 10^9 more than 1.5 times as long as at K = 10^6.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.bench_ablation import EPSILONS, WORLDS, Setting
from riffle.common.mechanism.counters import CounterLayout
from riffle.common.protocol.descriptor import MAX_MESSAGES
from riffle.coordinator.learners.registry import Registry, choose
from riffle.coordinator.specs import RunSpec
from riffle.experiments.regret import band
from riffle.experiments.simulator import simulate
from riffle.experiments.study import mechanism_of
from riffle.node_client.environments.registry import exact_mdp, make

BASELINE = json.loads(Path(__file__).with_name("baseline_sdp_pe.json").read_text())
RIVER = (20_000, 200_000, 2_000_000)


def compare(setting: Setting, seeds: range, before: list[float]) -> bool:
    """Prints a row; returns whether the learner is no worse than before, beyond both bands."""
    runs = [setting.run(seed) for seed in seeds]
    mean, interval = band([run.regret for run in runs])
    half = mean - interval[0] if interval else 0.0
    within = sum(run.within_5_percent for run in runs) / len(runs)
    print(
        f"| {setting.world} | {setting.K:,} | {setting.epsilon:g} | {setting.learner} | "
        f"{before[0]:,}±{before[1]} | {mean:,.0f}±{half:,.0f} | {mean / before[0] - 1:+.0%} | "
        f"{within:.0%} | {max(run.messages for run in runs):,} |",
        flush=True,
    )
    return mean - half <= before[0] + before[1]


LAKE = "gymnasium:FrozenLake-v1"
DECLARED = (
    Setting(),
    Setting(support=True),
    Setting(support=True, options={"homogeneous": True}),
    Setting(LAKE, K=2_000_000, support=True),
    Setting(LAKE, K=500_000, support=True, options={"homogeneous": True}),
)


def declared(seeds: range) -> bool:
    """Prints results of `ucbvi-shuffle` with declarations; returns whether all bars are met."""
    print("| environment | K | declared | counters | regret | near V* | of V*, least | messages |")
    print("|---|---|---|---|---|---|---|---|")
    fine = []
    for row in DECLARED:
        setting = replace(row, learner="ucbvi-shuffle")
        mdp = exact_mdp(make(setting.world))
        counters, without = (
            CounterLayout(mdp.sizes, "joint", None, support).counters
            for support in (mdp.declaration.support if setting.support else None, None)
        )
        runs = [setting.run(seed) for seed in seeds]
        mean, interval = band([run.regret for run in runs])
        half = mean - interval[0] if interval else 0.0
        within = sum(run.within_5_percent for run in runs) / len(runs)
        shares = [run.policy_value / run.optimal_value for run in runs]
        names = ["support"] * setting.support + ["homogeneous"] * len(setting.options)
        print(
            f"| {setting.world} | {setting.K:,} | {', '.join(names) or 'nothing'} | {counters:,} | "
            f"{mean:,.0f}±{half:,.0f} | {within:.0%} | {fmean(shares):.1%}, {min(shares):.1%} | "
            f"{max(run.messages for run in runs):,} |",
            flush=True,
        )
        if setting.world == LAKE:
            fine.append(5 * counters <= without and fmean(shares) >= 0.85)
        elif setting.support:
            fine.append(mean <= 1_300 and within >= 0.95)
    return all(fine)


def large() -> bool:
    """Prints the seconds a batch of `ucbvi-shuffle`; returns whether they are few enough."""
    mdp = exact_mdp(make("RandomMDP-v0", states=50, actions=4, horizon=20))
    seconds = []
    for K in (10**6, 10**9):
        spec = RunSpec(
            name="large", environment="RandomMDP-v0", states=50, actions=4, horizon=20, episodes=K,
            epsilon=1.0, beta=1e-5, learner="ucbvi-shuffle", dishonest_fraction=0.0,
            start=tuple(mdp.d1.tolist()), max_messages=MAX_MESSAGES,
        )  # fmt: skip
        started = time.perf_counter()
        run = simulate(mdp, Registry().build(spec), spec.families, mechanism_of(spec), 0)
        seconds.append((time.perf_counter() - started) / len(run.deployments))
        print(f"K = {K:,}: {len(run.deployments)} batches, {seconds[-1]:.2f} s each", flush=True)
    print(f"ratio {seconds[1] / seconds[0]:.2f}")
    return max(seconds) <= 20 and seconds[1] <= 1.5 * seconds[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", choices=["river", "epsilons", "declared", "large"])
    parser.add_argument("--first", type=int, default=7000)
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds)
    if asked.table == "declared":
        return 0 if declared(seeds) else 1
    if asked.table == "large":
        return 0 if large() else 1
    print("| environment | K | epsilon | learner | SDP-PE | regret | change | near V* | messages |")
    print("|---|---|---|---|---|---|---|---|---|")
    if asked.table == "river":
        rows = [(Setting(K=K, learner="ucbvi-shuffle"), BASELINE["RiverSwim-v0"]) for K in RIVER]
        river = [compare(setting, seeds, before[str(setting.K)]) for setting, before in rows]
        return 0 if all(river) else 1
    fine = []
    for world in WORLDS:
        learner, _ = choose(exact_mdp(make(world, **WORLDS[world])).sizes)
        for epsilon in EPSILONS:
            setting = Setting(world, epsilon=epsilon, learner=learner)
            fine.append(compare(setting, seeds, BASELINE["epsilons"][world][f"{epsilon:g}"]))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
