"""Attacks two unsafe encodings: one envelope for each report, or one number for each counter.

**One envelope.** The shuffle keeps a report's messages together, so the analyzer sees an anonymous
vector for each user. Each vector has only 1/n of the noise that the proof needs. Let g(v | e) be
the probability of one vector v given its user's episode e. User 0 has e or e', and all other users
have e'. The likelihood ratio of the two populations is

    mean over the n vectors v of g(v | e) / g(v | e').

**Numbers**: the papers' encoding taken literally (paper 000, section V). A user sends z = bit +
noise, one number for each counter. If all other users have bit 0, the largest possible number
exposes a user with bit 1. No finite epsilon covers this event. Riffle has no code for this
encoding, so what the analyzer sees is drawn from its exact distribution. Let f be the noise's mass
function. The likelihood ratio of bit 1 to bit 0 on a counter is the mean of f(z - 1) / f(z) over
all n numbers.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from riffle.common.accounting.calibrate import paper_noise, paper_tau
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.parameters import Noise
from riffle.common.mechanism.randomness import generator_for
from riffle.common.mechanism.shuffle_model import count
from riffle.experiments.audit.attack import CERTAIN, TUNING_SHARE, Attack, FloatArray, Scores, judge
from riffle.experiments.audit.pipeline import reports
from riffle.experiments.audit.world import Setting, World


def attack_envelopes(world: World, trials: int, error: float) -> Attack:
    """Attacks one-envelope reports, as if they had the (epsilon, beta) of Riffle's own reports."""
    tuning_trials = max(1, trials // TUNING_SHARE)
    tuning = _envelope_scores(world, tuning_trials, 0)
    fresh = _envelope_scores(world, trials, 2 * tuning_trials)
    return judge("one-envelope", world.setting, tuning, fresh, error)


def _envelope_scores(world: World, trials: int, start: int) -> dict[str, Scores]:
    first = vectors(world, trials, first=True, start=start)
    second = vectors(world, trials, first=False, start=start + trials)
    return {"likelihood ratio": Scores(_log_mean(world, first), _log_mean(world, second))}


def vectors(world: World, trials: int, *, first: bool, start: int) -> Ints:
    """Returns every user's counts (trials, n, C). A shuffle of the users would change no score."""
    layout = world.batch.layout
    counts = np.empty((trials, world.setting.n, layout.counters), dtype=np.int64)
    for i in range(trials):
        for user, report in enumerate(reports(world, start + i, first=first)):
            counts[i, user] = count(layout, report)
        world.on_trial()
    return counts


def _log_mean(world: World, v: Ints) -> FloatArray:
    """Returns log likelihood ratios (trials,) of the vectors `v`, within [-CERTAIN, CERTAIN].

    The ratio is the mean of g(v | e) / g(v | e') (see the module's docstring). If no user with
    episode e' can send a vector, the vector is user 0's.
    """
    up, down = world.cells()
    bits = world.noise.bits
    with np.errstate(divide="ignore"):
        mass = stats.binom.logpmf(np.arange(-1, bits + 2), bits, world.noise.p)
    given_e = mass[v[..., up]].sum(axis=-1) + mass[v[..., down] + 1].sum(axis=-1)
    given_other = mass[v[..., up] + 1].sum(axis=-1) + mass[v[..., down]].sum(axis=-1)
    possible = np.isfinite(given_other)
    gain = np.where(possible, given_e, CERTAIN) - np.where(possible, given_other, 0.0)
    log_mean = special.logsumexp(gain, axis=-1) - np.log(world.setting.n)
    return np.asarray(np.clip(log_mean, -CERTAIN, CERTAIN))


REGIMES = {"n above tau": 2.0, "n below tau": 0.5}
"""The ratio n / tau by regime. In each regime, a cell exposes the user with probability 1/4."""


@dataclass(frozen=True, slots=True)
class LiteralBatch:
    """n users with the papers' noise. Replacing user 0 changes ``cells`` pairs of counters."""

    n: int
    noise: Noise
    cells: int

    @property
    def mass(self) -> FloatArray:
        """The probabilities f(0), ..., f(m + 1) of the noise of m bits; the last one is zero."""
        bits, p = self.noise.bits, self.noise.p
        return np.asarray(stats.binom.pmf(np.arange(bits + 2), bits, p))


def attack_numbers(setting: Setting, trials: int, error: float) -> list[Attack]:
    """Attacks two batches: n is above the papers' tau in one batch, and below tau in the other."""
    tau = paper_tau(setting.epsilon, setting.beta, setting.sizes)
    outcomes = []
    for name, factor in REGIMES.items():
        n = math.ceil(factor * tau)
        batch = LiteralBatch(n, paper_noise(n, tau), setting.layout.cells)
        generator = np.random.default_rng()  # simulates; no real user's noise comes from it
        if setting.seed is not None:
            generator = generator_for(setting.seed, "audit", name)
        tuning = _sum_scores(batch, max(1, trials // TUNING_SHARE), generator)
        fresh = _sum_scores(batch, trials, generator)
        label = f"paper-numbers, {name} (n = {n}, tau = {tau})"
        outcomes.append(judge(label, setting, tuning, fresh, error / len(REGIMES)))
    return outcomes


def _sum_scores(
    batch: LiteralBatch, trials: int, generator: np.random.Generator
) -> dict[str, Scores]:
    """Draws log likelihood ratios for the two populations, which differ only in user 0."""
    first = _cells(batch, trials, 1, generator) - _cells(batch, trials, 0, generator)
    second = _cells(batch, trials, 0, generator) - _cells(batch, trials, 1, generator)
    return {"likelihood ratio": Scores(first, second)}


def _cells(
    batch: LiteralBatch, trials: int, bit: int, generator: np.random.Generator
) -> FloatArray:
    """Draws log likelihood ratios (trials,) of bit 1 to bit 0, if user 0 has `bit` in all cells."""
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
