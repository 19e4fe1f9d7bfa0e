"""Private UOB-LBPS (004, Algorithm 3): bandit feedback.

    pi_1 = pi^{q_1}, q_1 uniform on every layer, P_1 all transitions
    for k = 1..K:
        execute pi_k; the Privatizer releases N_{k+1} and the noisy loss l~_k        (lines 2-3)
        l"_k = (l~_k + E') / (2 E' + 1)                                              (line 4)
        l^_k = l"_k / u_k,   u_k(x, a) = max over P_k of q^{P, pi_k}(x, a)           (line 5)
        P~_{k+1}, and the confidence set P_{k+1} of Eq. 3.1                          (lines 6-7)
        q_{k+1} = argmin over Delta(P_{k+1}) of <l^_k, q> + D_psi(q || q_k) / eta    (line 8)
        pi_{k+1} = pi^{q_{k+1}}                                                      (line 9)

with psi(q) = -sum ln q and, by Theorem 4.2, eta = sqrt(X / K), delta = XA / K. With probability 1 -
delta, E' bounds the noise of all losses (Assumption 4.1), and l" is in [0, 1]. If the noise is
larger, l" is clipped; that is post-processing and keeps the step defined. Without noise, E' = 0 and
l" = l.
"""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import everything, upper_occupancy
from riffle.coordinator.learning.adversarial.layered import induced_policy, uniform_occupancy
from riffle.coordinator.learning.adversarial.log_barrier import log_barrier_step
from riffle.coordinator.learning.adversarial.omd import Step
from riffle.coordinator.learning.adversarial.uc_o_reps import Constants
from riffle.coordinator.learning.learner import FloatArray


def optimistic_loss(noisy: FloatArray, E_loss: float, u: FloatArray) -> FloatArray:
    """Returns l^ (H, W, A) of Eq. 4.1-4.2 from l~ and u; zero if u is zero (on padding)."""
    scaled = np.clip((noisy + E_loss) / (2 * E_loss + 1), 0.0, 1.0)
    return np.divide(scaled, u, out=np.zeros(u.shape), where=u > 0)


class PrivateUOBLBPS:
    """One run: `policy` (H, W, A) is pi_k, `observe` takes what is released after it."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.q = uniform_occupancy(constants.layers)
        self.policy = induced_policy(constants.layers, self.q)
        self.box = everything(constants.layers)

    def observe(
        self, transitions: FloatArray, visits: FloatArray, loss: FloatArray, E: float, E_loss: float
    ) -> Step:
        """Runs lines 3-9 on noisy sums N and the episode's noisy losses l~_k (H, W, A)."""
        c = self.constants
        u = upper_occupancy(c.layers, self.box, self.policy)
        estimate = optimistic_loss(loss, E_loss, u)
        self.box = c.confidence_set(transitions, visits, E)
        step = log_barrier_step(c.layers, self.box, c.eta * estimate, self.q)
        self.q, self.policy = step.q, step.policy
        return step
