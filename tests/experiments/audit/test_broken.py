"""The attack refutes encodings that do not protect: epsilon above 5 x or beta above 10 x claimed.

Bounds have a family-wise error of 1e-6. The attacks' true rates are far from the limits: 1/4 a cell
against 10 beta = 0.01 for numbers, about 0.5 against 0.1 for envelopes.
"""

import numpy as np
import pytest
from scipy import stats

from riffle.common.accounting.calibrate import paper_noise
from riffle.experiments.audit import broken
from riffle.experiments.audit.attack import Attack
from riffle.experiments.audit.broken import LiteralBatch
from riffle.experiments.audit.world import Setting, build

ERROR = 1e-6


def refutes(outcome: Attack) -> bool:
    bounds = outcome.bounds
    return bounds.epsilon > 5 * outcome.epsilon or bounds.beta > 10 * outcome.beta


@pytest.mark.parametrize("beta", [1e-3, 1e-5])
def test_the_attack_breaks_numbers_in_both_regimes(beta: float) -> None:
    outcomes = broken.attack_numbers(Setting(1.0, beta), 20_000, ERROR)
    assert len(outcomes) == 2
    for attack in outcomes:
        assert refutes(attack), attack.as_dict()
        assert attack.bounds.beta > 10 * beta
        assert attack.bounds.beta < 0.26  # tau / 2n = 2^-m = 1/4, and no more


def test_the_attack_breaks_one_envelope_a_report() -> None:
    outcome = broken.attack_envelopes(build(Setting(1.0, 1e-2, n=16)), 500, ERROR)
    assert refutes(outcome), outcome.as_dict()
    assert outcome.bounds.beta > 10 * outcome.beta


@pytest.mark.parametrize(("n", "bits"), [(2_000, 1), (500, 2)])
def test_literal_numbers_follow_their_law(n: int, bits: int) -> None:
    """Share of trials with a number m + 1: n = 2 tau gives tau / 2n, n = tau / 2 gives 2^-m."""
    batch = LiteralBatch(n, paper_noise(n, 1_000), cells=1)
    assert batch.noise.bits == bits
    scores = broken._cells(batch, 20_000, 1, np.random.default_rng(1))
    exposed = int((scores >= 1e3).sum())
    assert stats.binomtest(exposed, 20_000, 0.25).pvalue > ERROR
    assert (broken._cells(batch, 20_000, 0, np.random.default_rng(2)) < 1e3).all()


def test_envelopes_do_not_depend_on_their_order() -> None:
    world = build(Setting(n=5, seed=3))
    v = broken.vectors(world, 20, first=True, start=0)
    reversed_order = broken._log_mean(world, v[:, ::-1])
    assert broken._log_mean(world, v) == pytest.approx(reversed_order)
