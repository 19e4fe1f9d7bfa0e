"""Learners of an environment whose possible transitions are declared."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Families
from riffle.common.mechanism.parameters import Noise, Padding
from riffle.coordinator.learning.learner import Problem, batch_counts
from riffle.coordinator.learning.postprocess import consistent
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.learning.ucbvi_shuffle import UCBVIShuffle
from riffle.experiments.simulator import Mechanism, simulate
from riffle.node_client.environments.tabular import TabularMDP, riverswim
from tests.coordinator.learning.worlds import suboptimality

MDP = riverswim(3, 4)
SUPPORT = MDP.declaration.support
FAMILIES: tuple[Families, ...] = ("paper", "lean", "joint")


def problem(families: Families, variance: float) -> Problem:
    return Problem(
        MDP.sizes, MDP.d1, 8_000, 1.0, 1e-5, 0.05, families, lambda n, layer: variance,
        support=SUPPORT,
    )  # fmt: skip


def mechanism(layout: CounterLayout, n: int) -> Mechanism:
    """A variance of about 30 on every counter."""
    return Mechanism(Noise(max(1, round(30 * 1024 / n)), 1, 10), Padding(1, 0))


@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize("learner", [SDPPE, UCBVIShuffle])
def test_a_declared_support_is_learned_from(learner: Any, families: Families) -> None:
    run = simulate(MDP, learner(problem(families, 30.0)), families, mechanism, 3, SUPPORT)
    assert run.summary.finished
    assert suboptimality(MDP, run.summary.policy) < 0.05


@pytest.mark.parametrize("learner", [SDPPE, UCBVIShuffle])
def test_no_impossible_transition_gets_probability(learner: Any) -> None:
    run = simulate(MDP, learner(problem("joint", 30.0)), "joint", mechanism, 3, SUPPORT)
    possible = problem("joint", 30.0).layout(None).possible
    visited = possible.any(axis=-1, keepdims=True)
    P = run.learner._model.P  # type: ignore[attr-defined]
    assert np.all(P[~possible & visited] == 0)
    assert np.count_nonzero(P[possible]) > possible.sum() / 2


def test_only_possible_entries_have_noise() -> None:
    layout = CounterLayout(MDP.sizes, "joint", None, SUPPORT)
    counts = batch_counts(layout, 10, np.ones(layout.counters), 4.0)
    possible = layout.possible
    assert np.array_equal(counts.transitions, 2.0 * possible)
    assert np.array_equal(counts.transition_variance, 8.0 * possible)
    assert np.array_equal(counts.visit_variance, 8.0 * possible.sum(axis=-1))
    assert np.array_equal(counts.reward_variance, 4.0 * possible.sum(axis=-1))
    layout = replace(layout, families="paper")
    paper = batch_counts(layout, 10, np.ones(layout.counters), 4.0)
    assert np.array_equal(paper.visit_variance, 4.0 * possible.any(axis=-1))


def test_eq_7_and_the_add_on_leave_impossible_transitions_at_zero() -> None:
    possible = np.array([[True, False, True], [False, False, False]])
    c = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    N = consistent(c, np.array([7.0, 0.0]), 4.0, possible=possible)
    assert np.allclose(N.transitions, np.array([[3.5, 0, 4.5], [0, 0, 0]]))


def test_a_population_that_leaves_the_support_is_refused() -> None:
    """A false declaration: users' reports would be noise only, which a population cannot show."""
    stays = TabularMDP(np.full(MDP.P.shape, 1 / 3), MDP.r, MDP.d1)
    with pytest.raises(ValueError, match="outside the declared support"):
        simulate(stays, UCBVIShuffle(problem("joint", 30.0)), "joint", mechanism, 3, SUPPORT)
