"""A simulated run of SDP-PE at K = 1e9 beside one at K = 1e6: a batch costs the same for any n.

Run `python -m benchmarks.bench_simulator`. RiverSwim-v0 (X=4, A=2, H=6), epsilon 1, the practical
constants, one process; process time. The large run has more stages, so it may take 1.5 times as
long a stage, and 60 s in all.
"""

from __future__ import annotations

from experiments.per_episode import Result, run
from node_client.environments.tabular import riverswim

SMALL, LARGE = 10**6, 10**9
BAR_RATIO, BAR_SECONDS = 1.5, 60.0


def stages(result: Result) -> int:
    """Stages of a run: one switch into each but the first, one to exploit, H crude batches."""
    return result.switches - riverswim().sizes.H


def main() -> None:
    mdp = riverswim()
    run("sdp-pe", mdp, SMALL // 100)  # imports and caches
    small, large = run("sdp-pe", mdp, SMALL), run("sdp-pe", mdp, LARGE)
    for K, result in ((SMALL, small), (LARGE, large)):
        print(f"K = {K:>13,}: {result.seconds:6.2f} s, {stages(result)} stages, ", end="")
        print(f"{result.switches} switches, regret {result.total:,.0f}")
    ratio = large.seconds / small.seconds
    a_stage = ratio * stages(small) / stages(large)
    print(f"time {ratio:.2f} x, {a_stage:.2f} x a stage")
    met = a_stage <= BAR_RATIO and large.seconds < BAR_SECONDS
    raise SystemExit(0 if met else "a bar is missed: 1.5 x a stage, or 60 s")


if __name__ == "__main__":
    main()
