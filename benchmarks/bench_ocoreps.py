"""Measures the UC-O-REPS step (Eq. 3.2 of 004) beside cvxpy, and a run's time an episode.

Run `python -m benchmarks.bench_ocoreps`. Layers are 1-3-3-3-1, A=2, K=2,000 with the theorem's eta.
The instances are the steps of a run without privacy and of one under central privacy, at residual
1e-7 (cvxpy: Clarabel's own default, 1e-8). `warm` starts at the last step's dual values, as the
learner does; `numpy` is the tests' oracle, and `compiled` the product's step with numba installed.
cvxpy is optional: without it, only our side is timed. A time is CPU time in milliseconds: the
median over 60 instances of the least of five calls. Bar: the compiled warm step, which a run takes
in every episode, takes at most 0.5 ms at residual 1e-7, on both kinds of instances.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import get_args

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box, box
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.adversarial.omd import Step, ftrl_step
from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.adversarial import run
from riffle.experiments.adversaries import ALGORITHMS, Case, Privacy
from riffle.node_client.environments.tabular import layered_mdp
from tests.coordinator.learning.adversarial import omd_oracle

LAYERS = Layers((1, 3, 3, 3, 1), 2)
K = 2000
BAR_MILLISECONDS, BAR_RESIDUAL = 0.5, 1e-7
ETA = float(np.sqrt(np.log(LAYERS.X * LAYERS.A / LAYERS.H) / K))


def milliseconds(call: Callable[[], object], times: int = 5) -> float:
    """Returns the least CPU time of `times` calls, which other processes disturb least."""
    seconds = []
    for _ in range(times):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return 1e3 * min(seconds)


def instances(count: int, noise: float) -> list[tuple[Box, FloatArray]]:
    """Returns consecutive steps late in a run: sums with fresh noise and a shrinking set."""
    generator = np.random.default_rng(0)
    P = layered_mdp(LAYERS.widths, LAYERS.A, 0).P * LAYERS.cells
    means = generator.uniform(0, 1, LAYERS.pairs.shape)
    steps = []
    for k in range(K - count, K):
        width = np.sqrt(2 * P * (1 - P) * 15 / (k / 6)) + 106 / (k / 6)
        L = k * means + generator.normal(0, noise, means.shape)
        steps.append((box(LAYERS, P, width), ETA * L * LAYERS.pairs))
    return steps


def our_times(
    solve: Callable[..., Step], steps: list[tuple[Box, FloatArray]]
) -> tuple[float, float, float, Step]:
    """Returns cold and warm milliseconds, the largest warm residual, and the last answer."""
    cold = [milliseconds(partial(solve, LAYERS, b, c)) for b, c in steps]
    warm, residual, last = [], 0.0, solve(LAYERS, *steps[0])
    for b, c in steps:
        warm.append(milliseconds(partial(solve, LAYERS, b, c, last.v)))
        last = solve(LAYERS, b, c, last.v)
        residual = max(residual, last.residual)
    return float(np.median(cold)), float(np.median(warm)), residual, last


class Cvxpy:
    """Eq. 3.2 with box and cost as parameters, compiled once, solved with Clarabel."""

    def __init__(self, cp: ModuleType) -> None:
        cells = np.argwhere(LAYERS.cells)
        self._cells = tuple(cells.T)
        n = len(cells)
        rows = (cells[:, None, :3] == cells[None, :, :3]).all(axis=2).astype(float)
        self._cp, self.q = cp, cp.Variable(n)
        self._lower, self._upper = cp.Parameter((n, n)), cp.Parameter((n, n))
        self._cost = cp.Parameter(n)
        self._rows = rows
        A, b = self._flow(cells)
        objective = self._cost @ self.q - cp.sum(cp.entr(self.q))
        constraints = [
            A @ self.q == b,
            self.q <= self._upper @ self.q,
            self.q >= self._lower @ self.q,
        ]
        self.problem = cp.Problem(cp.Minimize(objective), constraints)

    @staticmethod
    def _flow(cells: np.ndarray) -> tuple[FloatArray, FloatArray]:
        states = np.argwhere(LAYERS.states)
        out = (cells[None, :, :2] == states[:, None, :]).all(axis=2) * 1.0
        entered = (
            (cells[None, :, 0] + 1 == states[:, None, 0])
            & (cells[None, :, 3] == states[:, None, 1])
        ) * 1.0
        b = np.zeros(len(states))
        b[0] = 1.0
        return out - entered, b

    def __call__(self, bounds: Box, cost: FloatArray) -> FloatArray:
        self._lower.value = bounds.lower[self._cells][:, None] * self._rows
        self._upper.value = bounds.upper[self._cells][:, None] * self._rows
        self._cost.value = cost[self._cells[:3]]
        self.problem.solve(solver=self._cp.CLARABEL)
        answer = np.zeros(LAYERS.cells.shape)
        answer[self._cells] = self.q.value
        return answer


def cvxpy_times(steps: list[tuple[Box, FloatArray]]) -> tuple[float, float, FloatArray] | None:
    """Returns ms of a parametrised and of a rebuilt problem, and the last answer, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cp = import_module("cvxpy")
        except ImportError:
            return None
        solver = Cvxpy(cp)
        solver(*steps[0])
        times = [milliseconds(partial(solver, b, c)) for b, c in steps]
        rebuilt = milliseconds(lambda: Cvxpy(cp)(*steps[-1]), 3)
        return float(np.median(times)), rebuilt, solver(*steps[-1])


def main() -> None:
    slowest = residual = 0.0
    for label, noise in (("no noise", 0.0), ("noise of 690 on sums (central)", 690.0)):
        steps = instances(60, noise)
        for kind, solve in (("numpy", omd_oracle.ftrl_step), ("compiled", ftrl_step)):
            our_times(solve, steps[:5])
            cold, warm, worst, last = our_times(solve, steps)
            print(f"{label}: {kind} cold {cold:.3f} ms, warm {warm:.3f} ms", end="; ")
            print(f"residual {worst:.1e}, gap {last.gap:.1e}, {last.iterations} iterations")
        slowest, residual = max(slowest, warm), max(residual, worst)
        theirs = cvxpy_times(steps)
        if theirs is None:
            print("  cvxpy is not installed")
            continue
        once, rebuilt, answer = theirs
        apart = np.abs(answer - last.q).max()
        print(f"  cvxpy {once:.2f} ms parametrised, {rebuilt:.1f} ms rebuilt; ", end="")
        print(f"{once / warm:.0f} and {rebuilt / warm:.0f} times ours; answers differ {apart:.1e}")
    for name in ALGORITHMS:
        for privacy in get_args(Privacy):
            result = run(Case(name, 300, 1.0, 1e-5, privacy, "exact", 0))
            print(f"{name} {privacy}: {1e3 * result.seconds / 300:.2f} ms an episode, wall clock")
    met = slowest <= BAR_MILLISECONDS and residual <= BAR_RESIDUAL
    print(f"bar: {slowest:.3f} ms of {BAR_MILLISECONDS}, residual {residual:.1e} of {BAR_RESIDUAL}")
    raise SystemExit(0 if met else "the bar is missed: a compiled warm step in 0.5 ms at 1e-7")


if __name__ == "__main__":
    main()
