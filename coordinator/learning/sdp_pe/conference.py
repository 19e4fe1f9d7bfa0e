"""SDP-PE, conference variant: Algorithms 1-3 of paper 003.

Paper 003 differs from paper 000 (`sdp_pe.algorithm`) in three places:

- a stage runs 2 L_b episodes: L_b crude episodes (L_b / H for each layer) and L_b fine episodes;
- fine exploration has no optimal design. Let pi_{h,x,a} be the active policy that visits (h, x, a)
  most under the crude model. Each of these policies runs for L_b / (H X A) episodes;
- the radius (Algorithm 1, line 9) is 2 C (sqrt(H^5 X^2 A iota / L_b) + X^3 A^2 H^5 E iota / L_b).
  C, iota and E are as in paper 000 (`constants`).

Here the policies pi_{h,x,a} form a uniform mixture. If even L_b episodes of pi_{h,x,a} are expected
to visit (h, x, a) less than once, the mixture lacks pi_{h,x,a}, as in `sdp_pe.algorithm`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from riffle.coordinator.learning.learner import Problem
from riffle.coordinator.learning.planning import occupancy
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE, Crude
from riffle.coordinator.learning.sdp_pe.constants import PRACTICAL, Constants
from riffle.coordinator.learning.sdp_pe.coverage import Design, largest_gap
from riffle.coordinator.learning.sdp_pe.schedule import Stage


class ConferenceSDPPE(SDPPE):
    """The conference variant of SDP-PE (003). The constant `auxiliary_share` is always zero."""

    fine_batches = 1

    def __init__(self, problem: Problem, constants: Constants = PRACTICAL) -> None:
        super().__init__(problem, replace(constants, auxiliary_share=0.0))

    def _coverage_design(self, stage: Stage, crude: Crude) -> Design:
        """Mixes all policies pi_{h,x,a} with equal weights (003, Algorithm 3, lines 1-4)."""
        H = self.problem.sizes.H
        pi = np.concatenate([self._best_visits(crude.P, h, stage.fine) for h in range(H)])
        weights = np.full(len(pi), 1.0 / len(pi))
        visits = np.tensordot(weights, occupancy(crude.P, self.problem.d1, pi), 1)
        reached = visits > 0
        gap = largest_gap(self.phi, crude.P, visits, reached)
        return Design(pi, weights, visits, reached, gap, 0)

    def _worst_case(self, L_b: int, E: float) -> float:
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        sampling = math.sqrt(H**5 * X**2 * A * self.iota / L_b)
        noise = X**3 * A**2 * H**5 * E * self.iota / L_b
        return 2 * self.constants.radius_scale * (sampling + noise)
