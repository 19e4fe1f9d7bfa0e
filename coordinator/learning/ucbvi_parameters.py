"""UCBVI and private UCB-VI: optimistic backward induction before every episode.

These learners are the baselines of paper 000, section VI. UCBVI (Azar, Osband, Munos 2017) has no
privacy. DP-UCBVI (Qiao and Wang 2023) has joint or local DP, with the Privatizers of 004. This
module has their bonuses and their noise; `coordinator.learning.ucbvi` is their compiled code.
Services cannot run them: the policy may change with every episode, so no batch could hide a user.

Counts N_h(x, a, x'), N_h(x, a), R_h(x, a) of all episodes so far give P^ and r^. With V_H = 0, for
h = H-1..0,

    Q_h(x, a) = min(H - h, r^ + P^ V_{h+1} + b_h(x, a)),   V_h(x) = max_a Q_h(x, a),

and Q = H - h for a pair never visited. The policy is greedy in Q, and the first action wins ties.
The published UCBVI also takes the minimum with the previous Q. With noisy counts, one underestimate
would then stay for ever. So all learners here leave out the previous Q.

Private learners see counts through a Privatizer; `privatizers` states the privacy guarantee. Eq. 7
of paper 000 (`postprocess`) turns noisy counts into P~, r~, N~. There are two sets of noise levels,
named as in `privatizers`:

- `paper`: three families (transitions, visits, rewards) with the papers' Laplace noise.
- `exact`: two families (transitions and rewards; visits are sums).

A bonus is called `paper` or `practical`:

- `paper` without privacy (UCBVI-CH): 7 H L / sqrt(N), L = log(5 X A K H / delta). This bonus
  exceeds H - h for N < 49 L^2, about ten thousand visits, so nothing is learned at K = 20,000.
- `paper` with privacy (Qiao and Wang 2023, Algorithm 1), on counts raised by the add-on of Eq. 7:

    b = 2 sqrt(Var V iota / N) + sqrt(2 iota / N) + 20 H X E iota / N + 4 H sqrt(iota / N).

  Here iota = log(30 H X A T / delta) with T = K H, and E bounds the noise. The paper's last term
  has the root of min(H^2, z), with a number z, in place of H. For every N of interest, z > H^2.
- `practical`: Bernstein's bonus with estimated variances, plus a multiple of the standard
  deviation, to first order, of the noise in r~ + P~ V:

    b = bonus_scale (sqrt(iota (Var_{P^} V_{h+1} + r^ (1 - r^)) / N) + iota (H - h) / N)
      + noise_scale sqrt(iota (sigma_T^2 sum_x' (V(x') - P~ V)^2 + sigma_R^2)) / N,

  with iota = log(2 H X A K / delta). sigma_T^2 and sigma_R^2 are the variances of the noise on a
  transition count and on a reward sum. Counts are projected with tolerance zero and get no add-on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from riffle.common.mechanism.counters import CounterLayout, Families, Sizes
from riffle.coordinator.learning import privatizers

BonusName = Literal["paper", "practical"]
Trust = Literal["central", "local"]
FAMILIES: dict[privatizers.NoiseLevels, Families] = {"paper": "paper", "exact": "lean"}


@dataclass(frozen=True, slots=True)
class Bonus:
    """A bonus by name, and its constants. Only `practical` uses the constants.

    `bonus_scale` multiplies the bonus for sampling, and `noise_scale` multiplies the bonus for
    privacy noise. Rewards and bonuses, but not transitions, use visit counts raised to at least
    `least_visits` standard deviations of their noise. Otherwise noise alone could make a rarely
    visited pair look rewarding. The defaults are the same for all environments, learners and
    epsilons. They were chosen once from small grids with epsilon = 1, over five environments.
    """

    name: BonusName = "practical"
    bonus_scale: float = 0.1
    noise_scale: float = 0.01
    least_visits: float = 1.0


def log_terms(sizes: Sizes, K: int, delta: float) -> tuple[float, float, float]:
    """Returns the logarithms of the bonuses `practical`, UCBVI-CH and DP-UCBVI, in this order."""
    episodes = sizes.H * sizes.X * sizes.A * K / delta
    return math.log(2 * episodes), math.log(5 * episodes), math.log(30 * sizes.H * episodes)


def layout_of(sizes: Sizes, levels: privatizers.NoiseLevels) -> CounterLayout:
    """Returns the layout of the counters that are privatized."""
    return CounterLayout(sizes, FAMILIES[levels])


def noise_of(
    trust: Trust, levels: privatizers.NoiseLevels, sizes: Sizes, K: int, epsilon: float, beta: float
) -> privatizers.AdditiveNoise:
    """Returns the distribution of each noise draw by the Privatizer of a run with K episodes."""
    sensitivity = privatizers.Sensitivity.of_cells(layout_of(sizes, levels).cells)
    depth = 1 if trust == "local" else max(privatizers.tree_levels(K - 1), 1)
    return privatizers.noise_of_draw(
        levels, sensitivity=sensitivity, H=sizes.H, depth=depth, epsilon=epsilon, beta=beta
    )
