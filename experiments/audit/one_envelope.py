"""Reports permuted as whole units: the analyzer sees an anonymous vector a user.

Noise is Riffle's, calibrated for the multiset of all messages, and reports come from the product's
encoder; only the shuffle keeps a report's messages together. Each vector then carries one user's
noise, 1/n of what the proof counts on. With g(v | e) the law of one vector given its user's
episode, everybody else having e', the likelihood ratio of the two populations is

    mean over the n vectors v of g(v | e) / g(v | e').
"""

import numpy as np
from scipy import special, stats

from riffle.common.counters import Ints
from riffle.common.mechanism import count
from riffle.experiments.audit.attack import CERTAIN, TUNING_SHARE, Attack, judge
from riffle.experiments.audit.evidence import FloatArray, Scores
from riffle.experiments.audit.pipeline import reports
from riffle.experiments.audit.world import World


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
