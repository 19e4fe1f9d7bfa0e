"""The papers' encoding taken literally: a user sends z = bit + noise, a number a counter.

Document 000, section V. With n > tau the noise is one bit of probability tau / 2n, else the number
of ones among m = ceil(tau / n) fair bits. The analyzer gets the permuted numbers of each counter.
z = 2 (or m + 1) needs a bit of 1 and all noise bits of 1: a user with bit 0 never sends it, so
where everybody else has bit 0 it gives the user away with probability tau / 2n (or 2^-m), which no
epsilon pays for.

The product cannot run this encoding, so its views are drawn from their exact law: everybody else's
numbers are one multinomial, the user's own is one more. With f the noise's mass and k_z the
numbers seen, the likelihood ratio of bit 1 to bit 0 on a counter is the mean of f(z - 1) / f(z)
over all n numbers, infinite when m + 1 is among them.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from riffle.common.accounting.paper import paper_noise, paper_tau
from riffle.common.noise import Noise
from riffle.common.randomness import generator_for
from riffle.experiments.audit.attack import CERTAIN, TUNING_SHARE, Attack, judge
from riffle.experiments.audit.evidence import FloatArray, Scores
from riffle.experiments.audit.world import Setting

REGIMES = {"n above tau": 2.0, "n below tau": 0.5}
"""n over tau. The user is given away with probability tau / 2n = 1/4 and 2^-m = 1/4 a cell."""


@dataclass(frozen=True, slots=True)
class LiteralBatch:
    """n users with the papers' noise; ``cells`` counters go up by one, as many down."""

    n: int
    noise: Noise
    cells: int

    @property
    def mass(self) -> FloatArray:
        """f(0 ... m + 1), the last one zero."""
        return np.asarray(stats.binom.pmf(np.arange(self.noise.bits + 2), *self._law))

    @property
    def _law(self) -> tuple[int, float]:
        return self.noise.bits, self.noise.p


def attacks(setting: Setting, trials: int, error: float) -> list[Attack]:
    """Both regimes at the papers' own tau; the error is shared between them."""
    tau = paper_tau(setting.epsilon, setting.beta, setting.sizes)
    found = []
    for name, factor in REGIMES.items():
        n = math.ceil(factor * tau)
        batch = LiteralBatch(n, paper_noise(n, tau), setting.layout.cells)
        generator = _generator(setting.seed, name)
        tuning = _scores(batch, max(1, trials // TUNING_SHARE), generator)
        fresh = _scores(batch, trials, generator)
        label = f"paper-sums, {name} (n = {n}, tau = {tau})"
        found.append(judge(label, setting, tuning, fresh, error / len(REGIMES)))
    return found


def _generator(seed: int | None, name: str) -> np.random.Generator:
    """Draws of a simulation, not of a person's noise."""
    return np.random.default_rng() if seed is None else generator_for(seed, "audit", name)


def _scores(batch: LiteralBatch, trials: int, generator: np.random.Generator) -> dict[str, Scores]:
    """The likelihood ratio under both populations."""
    first = _cells(batch, trials, 1, generator) - _cells(batch, trials, 0, generator)
    second = _cells(batch, trials, 0, generator) - _cells(batch, trials, 1, generator)
    return {"likelihood ratio": Scores(first, second)}


def _cells(
    batch: LiteralBatch, trials: int, bit: int, generator: np.random.Generator
) -> FloatArray:
    """Sum over cells of log P(numbers | bit 1) / P(numbers | bit 0), shape (trials,)."""
    f = batch.mass
    size = (trials, batch.cells)
    numbers = generator.multinomial(batch.n - 1, f, size)
    own = bit + generator.binomial(batch.noise.bits, batch.noise.p, size)
    numbers += own[..., None] == np.arange(len(f))
    ratio = np.append(np.append(0.0, f[:-2]) / f[:-1], 0.0)
    mean = numbers @ ratio / batch.n
    with np.errstate(divide="ignore"):
        finite = np.clip(np.log(mean), -CERTAIN, CERTAIN)
    return np.asarray(np.where(numbers[..., -1] > 0, CERTAIN, finite).sum(axis=1))
