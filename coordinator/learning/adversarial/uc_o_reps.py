"""Private-UC-O-REPS (paper 004, Algorithms 1 and 2): full information.

    pi_1 = pi^{q_1}, q_1 uniform on every layer
    for k = 1..K:
        execute pi_k; the Privatizer releases counts N_{k+1}, losses L~_{k+1}        (lines 2-3)
        P~_{k+1} from N~_{k+1}, and the confidence set P_{k+1} of Eq. 3.1            (lines 4-5)
        q_{k+1} = argmin over Delta(P_{k+1}) of <L~_{k+1}, q> + psi(q) / eta         (line 6)
        pi_{k+1} = pi^{q_{k+1}}                                                      (line 7)

where N~ are the post-processed counts N (`confidence`), and the losses L~ have noise. Here
psi(q) = sum q ln q and, by Theorem 3.3, eta = sqrt(ln(XA/H) / K), delta = XA / K. Delta(P) has
the occupancy measures of transitions in P, and pi^q is the policy that q induces (`layered`). Line
6 is `omd.ftrl_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from riffle.coordinator.learning.adversarial.confidence import (
    Box,
    confidence_set,
    log_iota,
    post_process,
)
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    induced_policy,
    uniform_occupancy,
)
from riffle.coordinator.learning.adversarial.omd import Step, ftrl_step
from riffle.coordinator.learning.learner import FloatArray


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of both algorithms of 004. `scale` multiplies the width beta (004, Eq. 3.1)."""

    layers: Layers
    K: int
    eta: float
    delta: float
    scale: float = 1.0

    def confidence_set(self, transitions: FloatArray, visits: FloatArray, E: float) -> Box:
        """Returns the confidence set for noisy `transitions` (H, W, A, W) and `visits` (H, W, A).

        W is the size of the largest layer. The noise on every count is at most E / 4.
        """
        counts = post_process(self.layers, transitions, visits, E)
        ln_iota = log_iota(self.layers, self.K, self.delta)
        return confidence_set(self.layers, counts, ln_iota, self.scale)


def constants(layers: Layers, K: int, eta: float | None, *, full: bool, scale: float) -> Constants:
    """Returns the constants of paper 004: Theorem 3.3 (full information) or 4.2 (bandit).

    If ``eta`` is given, it replaces the theorem's eta. delta is the smaller of XA / K and one half.
    """
    XA = layers.X * layers.A
    theorem = math.log(XA / layers.H) if full else layers.X
    eta = math.sqrt(theorem / K) if eta is None else eta
    return Constants(layers, K, eta, min(XA / K, 0.5), scale)


class PrivateUCOREPS:
    """One run. `policy` (H, `Layers.W`, A) is for episode k; `observe` takes k's released sums."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.policy = induced_policy(constants.layers, uniform_occupancy(constants.layers))
        self.step: Step | None = None

    def observe(
        self, transitions: FloatArray, visits: FloatArray, losses: FloatArray, E: float
    ) -> Step:
        """Runs lines 3-7 (see the module) on noisy sums (H, W, A[, W]). Counts have precision E."""
        c = self.constants
        box = c.confidence_set(transitions, visits, E)
        start = None if self.step is None else self.step.v
        self.step = ftrl_step(c.layers, box, c.eta * losses * c.layers.pairs, start)
        self.policy = self.step.policy
        return self.step
