"""The audit of Riffle: its bound is near the claim but not above it, and it detects planted faults.

Bounds have a family-wise error of 1e-3 here. A bound above the claim is checked once more on fresh
trials before the test fails, so an accident has probability 1e-6. The bound's share of the claim
was 0.73 on average with standard deviation 0.05 at this size (120 repetitions of the model): one
attempt stays below 0.6 about once in 300, three in a row once in 10^7.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from riffle.common.mechanism.parameters import Aggregation, Noise
from riffle.experiments.audit import attack
from riffle.experiments.audit.attack import Attack, Pair, audit
from riffle.experiments.audit.world import Setting, World, build
from riffle.shuffler import permutation

pytestmark = pytest.mark.long

ERROR, ALPHA = 1e-3, 1e-6
TRIALS, SEALED = 20_000, 500
ATTEMPTS = 3
SETTING = Setting(epsilon=2.0, beta=1e-2, families="lean")


@pytest.fixture(scope="module")
def world() -> World:
    return build(SETTING)


@pytest.fixture(scope="module")
def audited(world: World) -> tuple[Attack, Pair]:
    return audit(world, TRIALS, ERROR)


def test_the_bound_is_not_above_the_claim(world: World, audited: tuple[Attack, Pair]) -> None:
    outcome, _ = audited
    assert not (outcome.violated and audit(world, TRIALS, ERROR)[0].violated), outcome.as_dict()


def test_the_bound_is_most_of_the_claim(world: World, audited: tuple[Attack, Pair]) -> None:
    shares = [audited[0].bounds.epsilon / SETTING.epsilon]
    while max(shares) < 0.6 and len(shares) < ATTEMPTS:
        shares.append(audit(world, TRIALS, ERROR)[0].bounds.epsilon / SETTING.epsilon)
    assert max(shares) >= 0.6, shares


def test_sealed_trials_agree(world: World, audited: tuple[Attack, Pair]) -> None:
    """1,000 trials with HPKE, opened by the deployed analyzer; chi-square at 1e-6."""
    assert attack.agreement(world, audited[1], SEALED) > ALPHA


def test_agreement_notices_another_law(world: World, audited: tuple[Attack, Pair]) -> None:
    """500 trials of one population against all of the other."""
    few, many = (attack.likelihood_ratio(world, seen.counts) for seen in audited[1])
    assert attack._same_law(few[:500], many) < ALPHA
    assert attack._same_law(few[:500], few[500:]) > ALPHA


@pytest.mark.parametrize("aggregation", ["messages", "sums"])
def test_the_audit_detects_noise_that_is_too_weak(aggregation: Aggregation) -> None:
    """A fifth of the bits; the bound on beta then lies far above the claim."""
    setting = replace(SETTING, aggregation=aggregation)
    bits = build(setting).noise.bits // 5
    outcome, _ = audit(build(setting, Noise(bits, 1, 3)), 2_000, ALPHA)
    assert outcome.violated
    assert outcome.bounds.beta > 10 * SETTING.beta


def test_the_audit_detects_a_shuffle_that_does_not_permute(monkeypatch: pytest.MonkeyPatch) -> None:
    identity: Callable[..., object] = lambda size, _: np.arange(size)  # noqa: E731
    monkeypatch.setattr(permutation, "permutation", identity)
    outcome, _ = audit(build(SETTING), 500, ALPHA)
    assert outcome.bounds.beta > 0.5
    assert outcome.bounds.beta_event.distinguisher == "head"


def test_log_ratios_are_those_of_the_binomial() -> None:
    """log b(y - 1) / b(y) = log y (1 - p) / ((N - y + 1) p); impossible outcomes are certain."""
    gain = attack.log_ratios(6, 0.125)
    y = np.arange(1, 7)
    assert gain[1:7] == pytest.approx(np.log(y * 0.875 / ((7 - y) * 0.125)))
    assert (gain[0], gain[7]) == (-attack.CERTAIN, attack.CERTAIN)


def test_the_likelihood_ratio_subtracts_everybody_elses_data() -> None:
    """Two users: user 1 has e', so the down cell's noise is its count less one."""
    batch = build(Setting(n=2), Noise(3, 1, 3))
    (up,), (down,) = batch.cells()
    counts = np.zeros((1, batch.batch.layout.counters), dtype=np.int64)
    counts[0, up], counts[0, down] = 4, 3
    gain = attack.log_ratios(6, 0.125)
    assert attack.likelihood_ratio(batch, counts)[0] == pytest.approx(gain[4] - gain[2])
