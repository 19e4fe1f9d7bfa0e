"""Reports permuted as whole units: the analyzer sees an anonymous vector a user.

Noise is Riffle's, calibrated for the multiset of all messages, and reports come from the product's
encoder; only the shuffle keeps a report's messages together. Each vector then carries one user's
noise, 1/n of what the proof counts on. With g(v | e) the law of one vector given its user's
episode, everybody else having e', the likelihood ratio of the two populations is

    mean over the n vectors v of g(v | e) / g(v | e').

The papers' encoding taken literally: a user sends z = bit + noise, a number a counter.

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
from scipy import special, stats

from riffle.common.accounting.calibrate import paper_noise, paper_tau
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.noise import Noise
from riffle.common.mechanism.randomness import generator_for
from riffle.common.mechanism.shuffle import count
from riffle.experiments.audit.attack import CERTAIN, TUNING_SHARE, Attack, judge
from riffle.experiments.audit.evidence import FloatArray, Scores
from riffle.experiments.audit.pipeline import reports
from riffle.experiments.audit.world import Setting, World


def attack(world: World, trials: int, error: float) -> Attack:
    """One-envelope reports at the world's claim, which holds for Riffle's messages."""
    tuning = max(1, trials // TUNING_SHARE)
    seen = (_scores(world, tuning, 0), _scores(world, trials, 2 * tuning))
    return judge("one-envelope", world.setting, *seen, error)


def _scores(world: World, trials: int, start: int) -> dict[str, Scores]:
    first = vectors(world, trials, first=True, start=start)
    second = vectors(world, trials, first=False, start=start + trials)
    return {"likelihood ratio": Scores(_log_mean(world, first), _log_mean(world, second))}


def vectors(world: World, trials: int, *, first: bool, start: int) -> Ints:
    """Every user's counts (trials, n, C). Their order is not used: the score is symmetric."""
    layout = world.plan.layout
    seen = np.empty((trials, world.setting.n, layout.counters), dtype=np.int64)
    for i in range(trials):
        for user, report in enumerate(reports(world, start + i, first=first)):
            seen[i, user] = count(layout, report)
        world.on_trial()
    return seen


def _log_mean(world: World, v: Ints) -> FloatArray:
    """log mean g(v | e) / g(v | e'), shape (trials,), in [-CERTAIN, CERTAIN].

    A vector that no user with e' can send is the user's own: infinite.
    """
    up, down = world.cells()
    bits = world.noise.bits
    with np.errstate(divide="ignore"):
        mass = stats.binom.logpmf(np.arange(-1, bits + 2), bits, world.noise.p)
    given_e = mass[v[..., up]].sum(axis=-1) + mass[v[..., down] + 1].sum(axis=-1)
    given_other = mass[v[..., up] + 1].sum(axis=-1) + mass[v[..., down]].sum(axis=-1)
    possible = np.isfinite(given_other)
    gain = np.where(possible, given_e, CERTAIN) - np.where(possible, given_other, 0.0)
    found = special.logsumexp(gain, axis=-1) - np.log(world.setting.n)
    return np.asarray(np.clip(found, -CERTAIN, CERTAIN))


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
        tuning = _scores_of_paper_sums(batch, max(1, trials // TUNING_SHARE), generator)
        fresh = _scores_of_paper_sums(batch, trials, generator)
        label = f"paper-sums, {name} (n = {n}, tau = {tau})"
        found.append(judge(label, setting, tuning, fresh, error / len(REGIMES)))
    return found


def _generator(seed: int | None, name: str) -> np.random.Generator:
    """Draws of a simulation, not of a person's noise."""
    return np.random.default_rng() if seed is None else generator_for(seed, "audit", name)


def _scores_of_paper_sums(
    batch: LiteralBatch, trials: int, generator: np.random.Generator
) -> dict[str, Scores]:
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
