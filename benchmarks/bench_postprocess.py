"""Measures Eq. 7 in closed form against an LP solver: equal optima, and the ratio of their times.

Run ``python -m benchmarks.bench_postprocess``. On 10,000 random instances, the optima of count-like
data must agree to 1e-9, and those of data of extreme scales to 1e-6 relative. Then the closed form
of 1,000 rows at once is timed against the solver row by row, so the ratio holds on any machine.
"""

import time

import numpy as np
from scipy.optimize import linprog

from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.postprocess import project

INSTANCES = 10_000
ROWS = 1_000


def solver_optimum(c: FloatArray, total: float, tolerance: float) -> float:
    """Returns t* of Eq. 7 by HiGHS; variables n(1) ... n(X), t."""
    X = c.size
    close = np.block([[np.eye(X), -np.ones((X, 1))], [-np.eye(X), -np.ones((X, 1))]])
    sums = np.array([[*np.ones(X), 0.0], [*-np.ones(X), 0.0]])
    solution = linprog(
        [*np.zeros(X), 1.0],
        A_ub=np.vstack([close, sums]),
        b_ub=np.concatenate([c, -c, [total + tolerance, tolerance - total]]),
        bounds=[(0, None)] * (X + 1),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert solution.fun is not None, "the solver found no optimum"
    return float(solution.fun)


def agreement(generator: np.random.Generator, *, extreme: bool) -> float:
    """Returns the largest difference of the optima over half the instances; relative if extreme."""
    worst = 0.0
    for _ in range(INSTANCES // 2):
        X = int(generator.integers(1, 9))
        scales = 10.0 ** generator.uniform(-3, 6, X) if extreme else np.full(X, 20.0)
        c = generator.normal(scales, scales)
        total = max(0.0, float(c.sum() + generator.normal(0, scales.max())))
        tolerance = float(generator.uniform(0, scales.max()))
        if not extreme:
            c, total, tolerance = np.round(c), round(total), round(tolerance)
        ours = float(np.abs(project(c, np.array(total), tolerance) - c).max())
        theirs = solver_optimum(c, total, tolerance)
        worst = max(worst, abs(ours - theirs) / (scales.max() if extreme else 1.0))
    return worst


def main() -> None:
    generator = np.random.default_rng(7)
    counts = agreement(generator, extreme=False)
    extreme = agreement(generator, extreme=True)
    print(f"largest difference, count-like: {counts:.2e} (bar 1e-9)")
    print(f"largest difference, extreme scales, relative: {extreme:.2e} (bar 1e-6)")
    c = generator.normal(20, 15, (ROWS, 4))
    totals = np.maximum(c.sum(axis=1) + generator.normal(0, 10, ROWS), 0)
    ours = min(_seconds(lambda: project(c, totals, 8.0)) for _ in range(20))
    theirs = _seconds(lambda: [solver_optimum(c[i], totals[i], 8.0) for i in range(ROWS)])
    print(f"{ROWS} rows: closed form {ours * 1e3:.3f} ms, HiGHS {theirs * 1e3:.0f} ms, "
          f"ratio {theirs / ours:.0f}")  # fmt: skip
    assert counts <= 1e-9
    assert extreme <= 1e-6


def _seconds(work: object) -> float:
    assert callable(work)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
