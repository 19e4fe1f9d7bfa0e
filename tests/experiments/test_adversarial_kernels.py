"""The compiled steps of 004 give the references' answers and refusals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs the extra `experiments` (numba)")

from coordinator.learning.adversarial import log_barrier, omd
from coordinator.learning.adversarial.confidence import everything
from coordinator.learning.adversarial.layered import Layers
from coordinator.learning.adversarial.occupancy import uniform
from coordinator.learning.learner import LearnerError
from experiments import adversarial
from experiments.log_barrier_kernels import log_barrier_step
from experiments.omd_kernels import ftrl_step
from tests.coordinator.learning.adversarial.worlds import SHAPES, random_box


def _same(one: omd.Step, other: omd.Step) -> None:
    np.testing.assert_allclose(one.q, other.q, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(one.policy, other.policy, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(one.transitions, other.transitions, rtol=1e-6, atol=1e-10)
    assert one.iterations == other.iterations
    assert one.residual == pytest.approx(other.residual, abs=1e-9)
    assert one.gap == pytest.approx(other.gap, abs=1e-8)
    np.testing.assert_allclose(one.v, other.v, atol=1e-6)


@pytest.mark.parametrize("case", range(24))
def test_ftrl_step_is_the_reference(case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    cost = generator.uniform(0, (1, 4, 30)[case % 3], layers.pairs.shape) * layers.pairs
    cold = omd.ftrl_step(layers, box, cost)
    _same(ftrl_step(layers, box, cost), cold)
    start = cold.v.copy()
    _same(
        ftrl_step(layers, box, 1.1 * cost, cold.v),
        omd.ftrl_step(layers, box, 1.1 * cost, cold.v),
    )
    assert np.array_equal(start, cold.v)  # the last step's dual values are only read


@pytest.mark.parametrize("case", range(24))
def test_log_barrier_step_is_the_reference(case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    q = uniform(layers)
    cost = generator.uniform(0, 2, layers.pairs.shape) * layers.pairs
    expected = log_barrier.log_barrier_step(layers, box, cost, q)
    step = log_barrier_step(layers, box, cost, q)
    _same(step, expected)
    assert step.gap <= log_barrier.GAP


def test_what_the_references_refuse_is_refused() -> None:
    layers = Layers((1, 2, 2, 1), 2)
    q, none = uniform(layers), np.full(layers.pairs.shape, np.nan)
    with pytest.raises(LearnerError, match="FTRL"):
        ftrl_step(layers, everything(layers), none)
    with pytest.raises(LearnerError, match="log-barrier"):
        log_barrier_step(layers, everything(layers), none, q)


@pytest.mark.parametrize("name", ["uc-o-reps", "uob-lbps"])
def test_a_run_is_the_reference_run(
    name: adversarial.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = adversarial.run(name, 100, 1.0, 1e-5, "central", "correct", 3)
    reference = omd.ftrl_step, log_barrier.log_barrier_step
    monkeypatch.setattr(adversarial, "_steps", lambda: reference)
    plain = adversarial.run(name, 100, 1.0, 1e-5, "central", "correct", 3)
    np.testing.assert_allclose(compiled.regret, plain.regret, atol=1e-6)
