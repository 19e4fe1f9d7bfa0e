"""Private UOB-LBPS (paper 004, Algorithm 3): bandit feedback.

    pi_1 = pi^{q_1}, q_1 uniform on every layer, P_1 all transitions
    for k = 1..K:
        execute pi_k; the Privatizer releases counts N_{k+1}, noisy losses l~_k      (lines 2-3)
        l"_k = l~_k / sqrt(1 + v), v the variance of the noise      (in place of line 4)
        l^_k = l"_k / u_k,   u_k(x, a) = max over P in P_k of q^{P, pi_k}(x, a)      (line 5)
        P~_{k+1}, and the confidence set P_{k+1} of Eq. 3.1                          (lines 6-7)
        q_{k+1} = argmin over Delta(P_{k+1}) of <l^_k, q> + D_psi(q || q_k) / eta    (line 8)
        pi_{k+1} = pi^{q_{k+1}}                                                      (line 9)

with psi(q) = -sum ln q and its Bregman divergence D_psi. By Theorem 4.2, eta = sqrt(X / K) and
delta = XA / K. Delta(P) and pi^q are as in `uc_o_reps`.

Line 4 of the paper (Eq. 4.1) is l" = (l~ + E') / (2 E' + 1). Here E' bounds the noise of all losses
with probability 1 - delta (Assumption 4.1). Line 4 adds E' also to the loss of pairs that the
episode did not visit. So rare pairs look bad and become rarer, and regret can be linear
(docs/corrections.md). The corrected form above keeps the mean square of l" at most one. So an eta
that suits losses without noise suits l", too. No regret bound is proved for either form with noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import everything, upper_occupancy
from riffle.coordinator.learning.adversarial.layered import induced_policy, uniform_occupancy
from riffle.coordinator.learning.adversarial.log_barrier import log_barrier_step
from riffle.coordinator.learning.adversarial.omd import Step
from riffle.coordinator.learning.adversarial.uc_o_reps import Constants
from riffle.coordinator.learning.learner import FloatArray


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """Turns noisy losses l~ of an episode into l" (paper 004, Eq. 4.1, or a corrected form).

    ``E`` bounds the noise on every loss (E' in the paper). ``variance`` is this noise's variance.
    """

    estimator: Literal["paper", "correct"]
    E: float
    variance: float

    def __call__(self, noisy: FloatArray) -> FloatArray:
        """Returns estimates l" (H, W, A) of losses from noisy losses l~ (H, W, A).

        Clips Eq. 4.1 of 004 to [0, 1], because the noise may exceed its likely bound E'.
        """
        if self.estimator == "paper":
            return np.clip((noisy + self.E) / (2 * self.E + 1), 0.0, 1.0)
        return noisy / math.sqrt(1 + self.variance)


class PrivateUOBLBPS:
    """One run. `policy` (H, W, A) is pi_k; `observe` takes what is released after episode k."""

    def __init__(self, constants: Constants, estimate: LossEstimate) -> None:
        self.constants, self.estimate = constants, estimate
        self.q = uniform_occupancy(constants.layers)
        self.policy = induced_policy(constants.layers, self.q)
        self.box = everything(constants.layers)

    def observe(
        self, transitions: FloatArray, visits: FloatArray, loss: FloatArray, E: float
    ) -> Step:
        """Runs lines 3-9 of 004's Algorithm 3 on noisy counts and one noisy `loss` (H, W, A)."""
        c = self.constants
        u = upper_occupancy(c.layers, self.box, self.policy)
        optimistic = np.divide(self.estimate(loss), u, out=np.zeros(u.shape), where=u > 0)
        self.box = c.confidence_set(transitions, visits, E)
        step = log_barrier_step(c.layers, self.box, c.eta * optimistic, self.q)
        self.q, self.policy = step.q, step.policy
        return step
