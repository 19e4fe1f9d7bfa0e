"""Private UCB-VI: UCBVI on privatized counts, under joint DP or local DP.

The baseline of 000, section VI (DP-UCBVI: Qiao and Wang 2023, with the Central and Local Privatizer
as 004 writes them). Everything a policy is made from passes a Privatizer (`privatizers`), which
holds the privacy statement; all here is post-processing. Policy k uses S_{k-1}, so at most K - 1
contributions are summed and the tree has ceil(log2 K) levels.

    noisy counts -> Eq. 7 (closed form, `coordinator.learning.postprocess`) -> P~, r~, N~ -> UCBVI.

Two sets of noise levels, named as in `privatizers`:

- `paper`: three families (transitions, visits, rewards) with the documents' Laplace noise.
- `tight`: two families (transitions and rewards; visits are sums), replacing one user moves
  4 H cells, the least of Laplace and analytic Gaussian noise at the same (epsilon, beta).

Two bonuses:

- `paper` (Qiao and Wang 2023, Algorithm 1), with counts that are raised by the add-on of Eq. 7:

    b = 2 sqrt(Var V iota / N) + sqrt(2 iota / N) + 20 H X E iota / N + 4 H sqrt(iota / N).

  Their last term holds a minimum of H^2 and something above 10^6 H^3 X A iota^2 / N, which is H^2
  for every N of interest; it is written as H here.
- `practical`: that of `ucbvi`, plus what noise does to r~ + P~ V, whose first-order standard
  deviation is sqrt(sigma_T^2 sum_x' (V(x') - P~ V)^2 + sigma_R^2) / N:

    b = bonus_scale (...) + noise_scale sqrt(iota (sigma_T^2 sum_x' (V - P~ V)^2 + sigma_R^2)) / N.

  Counts are projected with tolerance zero and without the add-on, and visits are counted as at
  least `least_visits` deviations of their noise, as in SDP-PE's practical preset.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Episode, Families, Sizes
from riffle.coordinator.learning.learner import FloatArray, batch_counts
from riffle.coordinator.learning.postprocess import consistent
from riffle.coordinator.learning.privatizers import (
    AdditiveNoise,
    BinaryMechanism,
    LocalPrivatizer,
    NoiseLevels,
    Privatizer,
    Sensitivity,
    central_noise,
    local_noise,
    precision,
)
from riffle.coordinator.learning.ucbvi import (
    UCBVI,
    Bonus,
    Estimates,
    contribution,
    estimates,
    spread,
)

Trust = Literal["central", "local"]
FAMILIES: dict[NoiseLevels, Families] = {"paper": "paper", "tight": "lean"}


def layout_of(sizes: Sizes, levels: NoiseLevels) -> CounterLayout:
    """The counters that are privatized."""
    return CounterLayout(sizes, FAMILIES[levels])


def noise_of(
    trust: Trust, levels: NoiseLevels, sizes: Sizes, K: int, epsilon: float, beta: float
) -> AdditiveNoise:
    """The noise of one draw of the Privatizer, for a run of K episodes."""
    sensitivity = Sensitivity.of_cells(layout_of(sizes, levels).cells)
    H = sizes.H
    if trust == "local":
        return local_noise(levels, sensitivity=sensitivity, H=H, epsilon=epsilon, beta=beta)
    return central_noise(levels, sensitivity=sensitivity, H=H, T=K - 1, epsilon=epsilon, beta=beta)


def privatizer_of(
    trust: Trust,
    noise: AdditiveNoise,
    layout: CounterLayout,
    K: int,
    generator: np.random.Generator,
) -> Privatizer:
    """The Privatizer of a run of K episodes."""
    shape = (layout.counters,)
    if trust == "local":
        return LocalPrivatizer(shape, noise, generator)
    return BinaryMechanism(K - 1, shape, noise, generator)


class PrivateUCBVI(UCBVI):
    """One run of private UCB-VI; `layout` and `privatizer` belong together."""

    def __init__(
        self,
        sizes: Sizes,
        K: int,
        layout: CounterLayout,
        privatizer: Privatizer,
        delta: float = 0.05,
        bonus: Bonus | None = None,
    ) -> None:
        super().__init__(sizes, K, delta, bonus)
        self.layout = layout
        self.privatizer = privatizer
        self._counts = np.zeros(layout.counters)

    def observe(self, episode: Episode) -> None:
        """Take one user's contribution through the Privatizer; the last user's is not needed."""
        self.episodes += 1
        if self.episodes < self.confidence.K:
            self._counts = self.privatizer.add(contribution(self.layout, episode))

    def estimates(self) -> Estimates:
        """P~, r~, N~ of the private counts so far."""
        t = min(self.episodes, self.confidence.K - 1)
        if t == 0:
            return super().estimates()
        counts = batch_counts(self.layout, t, self._counts, self.privatizer.variance(t))
        E = self._precision(t)
        literal = self.bonus.name == "paper"
        projected = consistent(
            counts.transitions, counts.visits, E if literal else 0.0, add_on=literal
        )
        return estimates(projected, counts, E, 0.0 if literal else self.bonus.least_visits)

    def exploration(self, model: Estimates, h: int, V: FloatArray, PV: FloatArray) -> FloatArray:
        """The bonus b_h (X, A)."""
        if self.bonus.name == "paper":
            return self._literal(model, h, V, PV)
        squares = np.zeros_like(PV)
        for then in V:
            squares = squares + (then - PV) ** 2
        noise = model.transition_variance * squares + model.reward_variance
        scaled = self.bonus.noise_scale * np.sqrt(self.confidence.iota * noise)
        sampling = super().exploration(model, h, V, PV)
        return np.asarray(sampling + scaled / np.maximum(model.N[h], 1.0))

    def _literal(self, model: Estimates, h: int, V: FloatArray, PV: FloatArray) -> FloatArray:
        X, H = self.sizes.X, self.sizes.H
        width = self.confidence.qiao / np.maximum(model.N[h], 1.0)
        shift = 20.0 * H * (model.E * X) * width
        b = 2.0 * np.sqrt(spread(model.P[h], V, PV) * width) + np.sqrt(2.0 * width)
        return np.asarray(b + shift + 4.0 * H * np.sqrt(width))

    def _precision(self, t: int) -> float:
        if self.bonus.name != "paper":
            return 0.0
        counters, confidence = self.layout.counters, self.confidence
        return precision(
            self.privatizer, t, counters=counters, times=confidence.K, delta=confidence.delta
        )
