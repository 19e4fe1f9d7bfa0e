"""The two convex steps of 004 written down literally for cvxpy, as oracles."""

from __future__ import annotations

from typing import Any

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import FloatArray


def solve(
    cp: Any, layers: Layers, box: Box, cost: FloatArray, previous: FloatArray | None
) -> FloatArray:
    """q of Eq. 3.2 (previous None), or of Eq. 4.3 from q_k = previous; cost times eta."""
    q = {cell: cp.Variable() for cell in zip(*np.nonzero(layers.cells), strict=True)}
    rows = {
        (h, x, a): sum(q[h, x, a, y] for y in range(layers.widths[h + 1]))
        for h, x, a in zip(*np.nonzero(layers.pairs), strict=True)
    }
    flat = cp.hstack(list(q.values()))
    constraints = _flow(layers, q, rows)
    for (h, x, a, y), variable in q.items():
        constraints.append(variable <= box.upper[h, x, a, y] * rows[h, x, a])
        constraints.append(variable >= box.lower[h, x, a, y] * rows[h, x, a])
    linear = sum(cost[pair] * total for pair, total in rows.items())
    if previous is None:
        objective = linear - cp.sum(cp.entr(flat))
    else:
        pull = sum(variable / previous[cell] for cell, variable in q.items())
        objective = linear + pull - cp.sum(cp.log(flat))
    problem = cp.Problem(cp.Minimize(objective), constraints)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    answer = np.zeros(layers.cells.shape)
    for cell, variable in q.items():
        answer[cell] = float(variable.value)
    return answer


def _flow(layers: Layers, q: Any, rows: Any) -> list[Any]:
    constraints = [sum(rows[0, 0, a] for a in range(layers.A)) == 1]
    for h in range(1, layers.H):
        for y in range(layers.widths[h]):
            entered = sum(
                q[h - 1, x, a, y] for x in range(layers.widths[h - 1]) for a in range(layers.A)
            )
            constraints.append(entered == sum(rows[h, y, a] for a in range(layers.A)))
    return constraints
