"""Measures a simulated run of SDP-PE at K = 1e9 beside one at K = 1e6: a batch costs the same.

Run `python -m benchmarks.bench_simulator`. RiverSwim-v0 (X=4, A=2, H=6), epsilon 1, the practical
constants, process time of one process. The large run has more stages: a stage may take 1.5 times as
long, and the run 60 s in all. It also prints the seconds of a stage that the enumerated active set
takes (2^21 classes of policies: every value, elimination, the best and the most visiting policy);
the bar is 1 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from riffle.coordinator.learning.sdp_pe.enumeration import EnumeratedPolicies
from riffle.experiments.regret import SeedResult
from riffle.experiments.sweep import Run, compute
from riffle.node_client.environments.tabular import riverswim

SMALL, LARGE = 10**6, 10**9
BAR_RATIO, BAR_SECONDS, BAR_ENUMERATION = 1.5, 60.0, 1.0
P = ParamSpec("P")
T = TypeVar("T")
ENUMERATION = ("best", "best_visits", "eliminate", "contains")


def stages(result: SeedResult) -> int:
    """Returns the number of stages. Switches lead into all but the first, to exploiting, and into H
    batches."""
    return (result.policy_switches or 0) - riverswim().sizes.H


class Stopwatch:
    """Process time within the methods of the enumerated set; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def timed(self, method: Callable[P, T]) -> Callable[P, T]:
        def call(*given: P.args, **named: P.kwargs) -> T:
            self._depth += 1
            started = time.process_time()
            try:
                return method(*given, **named)
            finally:
                self._depth -= 1
                self.seconds += 0.0 if self._depth else time.process_time() - started

        return call


def run(K: int) -> SeedResult:
    return compute(Run("sdp-pe", "RiverSwim-v0", (("states", 4), ("horizon", 6)), K, 1.0), 0)


@contextmanager
def enumeration_timed() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    with ExitStack() as patched:
        for name in ENUMERATION:
            method = watch.timed(getattr(EnumeratedPolicies, name))
            patched.enter_context(patch.object(EnumeratedPolicies, name, method))
        yield watch


def main() -> None:
    run(SMALL // 100)  # imports and caches
    results, slowest = [], 0.0
    for K in (SMALL, LARGE):
        with enumeration_timed() as watch:
            result = run(K)
        a_stage = watch.seconds / stages(result)
        results.append(result)
        slowest = max(slowest, a_stage)
        print(f"K = {K:>13,}: {result.seconds:6.2f} s, {stages(result)} stages, ", end="")
        print(f"enumeration {a_stage:.3f} s a stage, ", end="")
        print(f"{result.policy_switches} switches, regret {result.regret:,.0f}")
    small, large = results
    ratio = large.seconds / small.seconds
    a_stage = ratio * stages(small) / stages(large)
    print(f"time {ratio:.2f} x, {a_stage:.2f} x a stage")
    met = a_stage <= BAR_RATIO and large.seconds < BAR_SECONDS and slowest <= BAR_ENUMERATION
    raise SystemExit(0 if met else "a bar is missed: 1.5 x a stage, 60 s, or enumeration 1 s")


if __name__ == "__main__":
    main()
