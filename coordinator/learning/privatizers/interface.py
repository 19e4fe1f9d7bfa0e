"""What a Privatizer is: private running sums, with the assumptions of the documents as contract.

User t contributes sigma_t, an array of one entry a counter; S_t = sigma_1 + ... + sigma_t. A
Privatizer releases S_t + noise. Learners rely on this and on nothing else:

- Unbiased: the noise has mean zero and a variance that `variance(t)` tells beforehand.
- Bounded (Assumption 4 of 000, Assumption 2.3 of 004): a counter's noise after t users exceeds
  `deviation(t, l)` in absolute value with probability at most 2 exp(-l). A union bound gives E:
  with probability 1 - delta all noises of a run are within E / 4, see `precision`. Eq. 7 and the
  add-on (`coordinator.postprocess.consistent`, 5.1-5.2 of 004) then make counts that satisfy the
  rest of the assumption: N(x,a) = sum_x' N(x,a,x'), never below the true one, within E of it.
- Private: what the mechanism's own file states. The neighbours are everywhere the same: one user is
  replaced by another. Two sets of noise levels are offered by name: `paper` is the document's
  Laplace noise, literally, with the guarantee it really gives stated; `tight` is the least noise
  that we can prove (epsilon, beta)-DP with.

Noise comes from the generator that is given, which is seeded in experiments: these privatizers are
simulations of running sums. The services make batch sums private, with integer noise from the
system's CSPRNG, in three ways: `common.workflow`.

Sensitivities. Replacing one user changes one entry down and one up by at most one in every step of
every counter family: `Sensitivity.of_cells(cells)` with `CounterLayout.cells`. Losses in [0, 1]
that are all shown (full information, 004) change all together: `Sensitivity.of_losses(X A)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from riffle.common.accounting import gaussian_variance
from riffle.coordinator.learning.learner import FloatArray

NoiseKind = Literal["none", "laplace", "gaussian"]
NoiseLevels = Literal["paper", "tight"]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How far one user's replacement moves all counters together: L1 and L2 norms."""

    l1: float
    l2: float

    @classmethod
    def of_cells(cls, cells: int) -> Sensitivity:
        """`cells` counters up by one and `cells` down by one."""
        return cls(2.0 * cells, math.sqrt(2.0 * cells))

    @classmethod
    def of_losses(cls, pairs: int) -> Sensitivity:
        """`pairs` numbers in [0, 1], any of which may change."""
        return cls(float(pairs), math.sqrt(pairs))

    def __add__(self, other: Sensitivity) -> Sensitivity:
        """Of two families of counters released together."""
        return Sensitivity(self.l1 + other.l1, math.hypot(self.l2, other.l2))

    def repeated(self, times: int) -> Sensitivity:
        """When every contribution enters `times` released numbers."""
        return Sensitivity(times * self.l1, math.sqrt(times) * self.l2)


@dataclass(frozen=True, slots=True)
class AdditiveNoise:
    """Independent noise of one kind; `scale` is b of Lap(b) or sigma of N(0, sigma^2)."""

    kind: NoiseKind
    scale: float

    @property
    def variance(self) -> float:
        """Of one draw."""
        return {"none": 0.0, "laplace": 2.0, "gaussian": 1.0}[self.kind] * self.scale**2

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Fresh noise of this shape."""
        if self.kind == "none":
            return np.zeros(shape)
        if self.kind == "laplace":
            return generator.laplace(0.0, self.scale, shape)
        return generator.normal(0.0, self.scale, shape)

    def deviation(self, terms: int, log_term: float) -> float:
        """A bound that a sum of `terms` draws exceeds with probability <= 2 exp(-log_term).

        Gaussian: s = sigma sqrt(2 terms l). Laplace: log E exp(x Z / b) = -log(1 - x^2) is at most
        x^2 / (1 - x), so the sum is sub-gamma with variance factor 2 terms b^2 and scale b
        (Boucheron et al. 2003): s = b (2 sqrt(terms l) + l).
        """
        if self.kind == "none" or terms == 0:
            return 0.0
        if self.kind == "gaussian":
            return self.scale * math.sqrt(2.0 * terms * log_term)
        return self.scale * (2.0 * math.sqrt(terms * log_term) + log_term)


NO_NOISE = AdditiveNoise("none", 0.0)


def laplace(sensitivity: Sensitivity, epsilon: float) -> AdditiveNoise:
    """Laplace noise that is epsilon-DP (Dwork et al. 2006): b = Delta_1 / epsilon."""
    return AdditiveNoise("laplace", sensitivity.l1 / epsilon)


def gaussian(sensitivity: Sensitivity, epsilon: float, beta: float) -> AdditiveNoise:
    """Least Gaussian noise that is (epsilon, beta)-DP (Balle and Wang 2018, Theorem 8)."""
    unit = gaussian_variance(epsilon, beta, 1) / 2.0
    return AdditiveNoise("gaussian", sensitivity.l2 * math.sqrt(unit))


def least(sensitivity: Sensitivity, epsilon: float, beta: float) -> AdditiveNoise:
    """Of the two, that of least variance: Laplace for few counters, Gaussian for many."""
    candidates = (laplace(sensitivity, epsilon), gaussian(sensitivity, epsilon, beta))
    return min(candidates, key=lambda noise: noise.variance)


class Privatizer(Protocol):
    """Private running sums of a stream of arrays of one shape; see the module's docstring."""

    def add(self, sigma: FloatArray) -> FloatArray:
        """Take the next contribution; return the private sum of all so far."""
        ...

    def variance(self, t: int) -> float:
        """Variance of the noise on one counter after t contributions."""
        ...

    def deviation(self, t: int, log_term: float) -> float:
        """Bound on that noise, exceeded with probability at most 2 exp(-log_term)."""
        ...


def precision(privatizer: Privatizer, t: int, *, counters: int, times: int, delta: float) -> float:
    """E of Assumption 4 after t contributions.

    Used at each of `times` moments, it bounds all noises of all `counters` by E / 4 together with
    probability 1 - delta.
    """
    return 4.0 * privatizer.deviation(t, math.log(2.0 * counters * times / delta))
