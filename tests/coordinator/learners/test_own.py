"""The base class of learners: its books, its checks, its plain model."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.parameters import Padding
from riffle.coordinator.learners.own import OwnLearner, estimate
from riffle.coordinator.learning.learner import BatchCounts, Deployment, LearnerError, Problem
from riffle.experiments.regret import optimal_value, policy_value
from riffle.experiments.simulator import Mechanism, simulate
from riffle.node_client.environments.tabular import riverswim

MDP = riverswim(3, 3)


def problem(K: int = 1000) -> Problem:
    return Problem(MDP.sizes, MDP.d1, K, 1.0, 1e-5, 0.05, "joint", lambda n, layer: 0.0)


class Half(OwnLearner):
    def next_deployment(self) -> Deployment | None:
        if self.batches == 0:
            return self.deploy(self.explorers(8), self.problem.K // 2)
        return self.deploy(self.policy, self.left) if self.left else None

    def observe(self, counts: BatchCounts) -> None:
        super().observe(counts)
        if self.batches == 1:
            self.improve(counts)


def test_without_noise_the_best_policy_is_found_and_every_episode_is_used() -> None:
    learner = Half(problem(20_000), half=True)
    run = simulate(MDP, learner, "joint", lambda layout, n: Mechanism(None, Padding(3, 0)), 0)
    assert [d.n for d in run.deployments] == [10_000, 10_000]
    assert policy_value(MDP, run.summary.policy) == pytest.approx(optimal_value(MDP))
    assert run.summary.value_estimate == pytest.approx(optimal_value(MDP), abs=0.02)
    assert (run.summary.finished, run.summary.episodes_used) == (True, 20_000)
    assert run.summary.constants == {"half": True}


def test_next_deployment_may_be_asked_twice() -> None:
    learner = Half(problem())
    one, other = learner.next_deployment(), learner.next_deployment()
    assert one is not None
    assert other is not None
    assert one.mixture.same_as(other.mixture)


def counts_of(layout: CounterLayout, n: int, visits: float) -> BatchCounts:
    X, A, hs = layout.sizes.X, layout.sizes.A, layout.layers
    ones = np.full((hs, X, A, X), visits / X)
    four = np.full(ones.shape, 4.0)
    noise = (four, four[..., 0], four[..., 0])
    return BatchCounts(layout, n, ones, ones.sum(-1), ones.sum(-1) / 2, *noise)


def test_counts_of_something_else_are_refused() -> None:
    learner = Half(problem())
    wrong = [
        counts_of(CounterLayout(MDP.sizes, "joint", None), 499, 9.0),
        counts_of(CounterLayout(MDP.sizes, "joint", 1), 500, 9.0),
    ]
    for counts in wrong:
        with pytest.raises(LearnerError, match="asked for"):
            learner.observe(counts)
    assert (learner.left, learner.batches) == (1000, 0)


@pytest.mark.parametrize(
    ("policies", "n", "says"),
    [
        (np.zeros((3, 3)), 0, "cannot deploy 0"),
        (np.zeros((3, 3)), 1001, "1000 of K are left"),
        (np.zeros((2, 3)), 10, "shape"),
        (np.full((3, 3), 2), 10, "action"),
    ],
)
def test_a_wrong_deployment_is_refused(policies: object, n: int, says: str) -> None:
    with pytest.raises(LearnerError, match=says):
        Half(problem()).deploy(policies, n)  # type: ignore[arg-type]


def test_a_model_of_counts_is_their_ratios_and_noise_alone_is_no_reward() -> None:
    layout = CounterLayout(Sizes(3, 2, 3), "joint", None)
    P, r = estimate(counts_of(layout, 500, 90.0))
    np.testing.assert_allclose(P, 1 / 3)
    np.testing.assert_allclose(r, 0.5)
    P, r = estimate(counts_of(layout, 500, 0.6))  # a third of the noise's deviation of 2
    np.testing.assert_allclose(P.sum(-1), 0.3)
    np.testing.assert_allclose(r, 0.15)


@pytest.mark.parametrize("supported", [True, False])
def test_counts_of_steps_that_are_alike_are_pooled(supported: bool) -> None:
    """Each step's counts are lopsided; only their sums over steps, with their noise, are right."""
    layout = CounterLayout(MDP.sizes, "joint", None, MDP.declaration.support if supported else None)
    P = np.where(layout.possible, MDP.P, 0.0)
    visits = np.where(P.sum(-1) > 0, np.array([10.0, 50.0, 600.0])[:, None, None], 0.0)
    noise = np.where(layout.possible, 4.0, 0.0)
    counts = BatchCounts(
        layout, 1000, visits[..., None] * P, visits, visits * MDP.r,
        noise, noise.sum(-1), noise.max(-1),
    )  # fmt: skip
    model, r = estimate(counts, alike=True)
    np.testing.assert_allclose(model, MDP.P)
    np.testing.assert_allclose(r, MDP.r)
    twice = 2 * visits[:, 2, 1].sum()
    noisy = replace(counts, visit_variance=np.full(visits.shape, twice**2 / 3))
    np.testing.assert_allclose(estimate(noisy, alike=True)[1][:, 2], MDP.r[:, 2] / 2)
    learner = Half(replace(problem(), homogeneous=True))
    learner.improve(counts)
    assert learner.value == pytest.approx(optimal_value(MDP))


def test_the_documented_sum_of_batches_sums_counts_and_noise() -> None:
    page = (Path(__file__).parents[3] / "docs" / "own.md").read_text()
    (block,) = re.findall(r"```python\n(# pooled.py\n.*?)```", page, re.DOTALL)
    known: dict[str, Any] = {}
    exec(block, known)  # noqa: S102  (our own page)
    one = counts_of(CounterLayout(MDP.sizes, "joint", None), 500, 9.0)
    both = known["pooled"](one, one)
    assert both.n == 1000
    for name in fields(BatchCounts)[2:-1]:
        np.testing.assert_array_equal(getattr(both, name.name), 2 * getattr(one, name.name))
    np.testing.assert_allclose(estimate(both)[1], estimate(one)[1])


def test_numpy_integers_are_numbers_of_episodes() -> None:
    deployment = Half(problem()).deploy(np.zeros((3, 3)), np.int64(10))  # type: ignore[arg-type]
    assert type(deployment.n) is int


def test_a_model_needs_rewards() -> None:
    layer = CounterLayout(MDP.sizes, "joint", 0)
    with pytest.raises(LearnerError, match="layer=None"):
        estimate(replace(counts_of(layer, 10, 1.0), rewards=None))
