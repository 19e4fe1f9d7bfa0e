"""The Privatizers of document 004 for its two algorithms: private counts and losses.

Privacy is `none`, `central` (JDP: the Binary Mechanism; the variant of Algorithm 4 for
full-information losses; plain noise for bandit losses, Lemma 5.6) or `local` (LDP). There are two
calibrations.

`paper` is 004 literally: Lap(3H/epsilon) for each family, times the levels of the tree. It does not
keep its promise. Replacing one user changes, in L1: each visit family, N(x,a) and N(x,a,x'), by 2H
(one entry down and one up in every layer); bandit losses likewise by up to 2H; and under full
information all XA losses (XA counts the pairs), since the new user may bring any l_k in [0, 1]. The
epsilon really given is Delta_1 / (3H) times the stated one, with Delta_1 = 6H, or 4H + XA.

`correct` gives 2/3 of (epsilon, beta) to the counts and 1/3 to the losses, each with the least
noise for its sensitivity (Laplace or analytic Gaussian); they compose to (epsilon, beta)-DP.

Noise is seeded: this is a simulation of the mechanisms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.privatizers import (
    NO_NOISE,
    AdditiveNoise,
    BinaryMechanism,
    LocalPrivatizer,
    Sensitivity,
    noise_of_draw,
    paper_guarantee,
    tree_levels,
)

Privacy = Literal["none", "central", "local"]
Calibration = Literal["paper", "correct"]

COUNT_SHARE = 2 / 3  # of (epsilon, beta), under `correct`


@dataclass(frozen=True, slots=True)
class Protection:
    """The privacy of a run: K episodes, full information or bandit feedback."""

    privacy: Privacy
    calibration: Calibration
    epsilon: float
    beta: float
    K: int
    full: bool

    def noise(self, sensitivity: Sensitivity, H: int, share: float, summed: bool) -> AdditiveNoise:
        """Returns the noise of one release; `summed` sums come from a tree of a central agent."""
        if self.privacy == "none":
            return NO_NOISE
        name: Literal["paper", "tight"] = "paper"
        epsilon, beta = self.epsilon, self.beta
        if self.calibration == "correct":
            name, epsilon, beta = "tight", share * epsilon, share * beta
        depth = tree_levels(self.K - 1) if self.privacy == "central" and summed else 1
        return noise_of_draw(
            name, sensitivity=sensitivity, H=H, depth=depth, epsilon=epsilon, beta=beta
        )

    def sums(
        self, size: int, noise: AdditiveNoise, generator: np.random.Generator, variant: bool
    ) -> BinaryMechanism | LocalPrivatizer:
        """Returns the private running sums of K - 1 arrays of this size."""
        if self.privacy == "central":
            return BinaryMechanism(self.K - 1, (size,), noise, generator, variant=variant)
        return LocalPrivatizer((size,), noise, generator)


class Channel:
    """The Privatizer of a case: noise on the cells that exist (no padding), and its precision.

    Counts: N(x,a) and N(x,a,x') in one stream of T = K - 1 contributions. Losses: a stream of sums
    under full information; noise on every episode's own losses under bandit feedback.
    """

    def __init__(
        self,
        protection: Protection,
        layers: Layers,
        delta: float,
        count_draws: np.random.Generator,
        loss_draws: np.random.Generator,
    ) -> None:
        self._layers, self._delta, self._K = layers, delta, protection.K
        pairs, H, full = layers.pair_count, layers.H, protection.full
        sensitivity = _loss_sensitivity(full, layers)
        self.count_noise = protection.noise(Sensitivity.of_cells(2 * H), H, COUNT_SHARE, True)
        self.loss_noise = protection.noise(sensitivity, H, 1 - COUNT_SHARE, full)
        size = pairs + layers.cell_count
        self._counts = protection.sums(size, self.count_noise, count_draws, variant=False)
        self._sums = protection.sums(pairs, self.loss_noise, loss_draws, variant=True)
        self._bandit = LocalPrivatizer((pairs,), self.loss_noise, loss_draws)
        self._t = 0
        self.E_loss = _deviation(self.loss_noise, 1, 2 * pairs * self._K / delta)

    def counts(self, visited: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        """Returns noisy sums N(x,a,x'), N(x,a) after one more episode, and E."""
        layers, pairs = self._layers, self._layers.pair_count
        self._t += 1
        sigma = np.concatenate((visited.sum(axis=-1)[layers.pairs], visited[layers.cells]))
        released = self._counts.add(sigma)
        transitions, visits = np.zeros(layers.cells.shape), np.zeros(layers.pairs.shape)
        visits[layers.pairs], transitions[layers.cells] = released[:pairs], released[pairs:]
        return transitions, visits, self.E(self._t)

    def E(self, t: int) -> float:
        """Returns E of Assumption 2.3 after t contributions; a run's all hold with 1 - 2 delta."""
        counters = self._layers.pair_count + self._layers.cell_count
        ratio = counters * self._K / self._delta
        return 4 * _deviation(self.count_noise, self._counts.terms(t), ratio)

    def loss_sums(self, loss: FloatArray) -> FloatArray:
        """Returns noisy L(x,a) after one more episode's losses, all of them shown."""
        return self._unpacked(self._sums.add(loss[self._layers.pairs]))

    def visited_losses(self, loss: FloatArray) -> FloatArray:
        """Returns l~ of one episode from its losses at visited pairs, zero elsewhere."""
        return self._unpacked(self._bandit.privatize(loss[self._layers.pairs]))

    def _unpacked(self, values: FloatArray) -> FloatArray:
        array = np.zeros(self._layers.pairs.shape)
        array[self._layers.pairs] = values
        return array


def guarantee(full: bool, layers: Layers, calibration: Calibration, epsilon: float) -> float:
    """Returns the epsilon that a calibration really gives for replacing one user."""
    if calibration == "correct":
        return epsilon
    total = Sensitivity.of_cells(2 * layers.H) + _loss_sensitivity(full, layers)
    return paper_guarantee(total, layers.H, epsilon)


def _loss_sensitivity(full: bool, layers: Layers) -> Sensitivity:
    if full:
        return Sensitivity.of_losses(layers.pair_count)
    return Sensitivity.of_cells(layers.H)


@lru_cache(maxsize=1 << 16)
def _deviation(noise: AdditiveNoise, terms: int, ratio: float) -> float:
    return noise.deviation(terms, math.log(ratio))
