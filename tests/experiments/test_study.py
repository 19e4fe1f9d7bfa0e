"""A study and the figures run the same learners on the same draws."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from riffle.common.accounting import CalibrationName
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import RunSpec
from riffle.experiments.presets import Preset
from riffle.experiments.regret import SeedResult, band, share
from riffle.experiments.research import Result
from riffle.experiments.study import optimal_survives, run_seed
from riffle.experiments.sweep import Backend, Run, compute, run_jobs
from riffle.node_client.environments.registry import Parameter, exact_mdp, make

RIVERSWIM: dict[str, Parameter] = {"states": 4, "horizon": 3}
K = 1_000


def result_of(chosen: RunSpec, seed: int) -> SeedResult:
    return run_seed(Preset(chosen, RIVERSWIM), seed)


def spec(learner: str, calibration: str = "exact") -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "study",
            "learner": learner,
            "environment": "RiverSwim-v0",
            "states": 4,
            "actions": 2,
            "horizon": 3,
            "episodes": K,
            "epsilon": 1.0,
            "beta": 1e-5,
            "dishonest_fraction": 0.0,
            "calibration": calibration,
        }
    )


@pytest.mark.parametrize("calibration", ["exact", "paper"])
@pytest.mark.parametrize("learner", ["pe", "sdp-pe", "sdp-pe-conference", "ucbvi", "ucbvi-jdp"])
def test_a_study_is_the_run_that_figures_show(learner: str, calibration: CalibrationName) -> None:
    if calibration == "paper" and learner.startswith("sdp-pe"):
        pytest.skip("the papers' noise refuses batches this small")
    here = result_of(spec(learner, calibration), 3)
    world = tuple(RIVERSWIM.items())
    run = Run(learner, "RiverSwim-v0", world, K, 1.0, calibration)
    assert replace(here, seconds=0.0) == replace(compute(run, 3), seconds=0.0)


@pytest.mark.parametrize("learner", ["pe", "sdp-pe", "sdp-pe-conference"])
def test_a_curve_rises_to_the_regret(learner: str) -> None:
    result = result_of(spec(learner).model_copy(update={"episodes": 6_000}), 0)
    assert (len(result.episodes), result.episodes[-1]) == (100, 6_000)
    assert (np.diff(result.cumulative) >= 0).all()
    assert result.cumulative[-1] == pytest.approx(result.regret)
    assert ("epsilon" in result.constants) == (learner != "pe")


def test_policy_elimination_without_noise_loses_little() -> None:
    world = (("states", 4), ("horizon", 6))
    run = Run("pe", "RiverSwim-v0", world, 20_000, None)
    assert np.mean([compute(run, seed).regret for seed in range(2)]) < 1_800


def test_noise_beyond_the_services_default_length_is_simulated() -> None:
    """At K = 20,000 the papers' noise takes 7,612 messages a report; the services allow 4,096."""
    world = (("states", 4), ("horizon", 6))
    result = compute(Run("sdp-pe", "RiverSwim-v0", world, 20_000, 1.0, "paper"), 0)
    assert 0 < result.regret < result.optimal_value * 20_000


def test_seeds_come_in_order_and_processes_change_nothing() -> None:
    chosen = Preset(spec("ucbvi"), RIVERSWIM)
    one, two = (
        list(run_jobs(partial(run_seed, chosen), range(3), Backend(workers=workers)))
        for workers in (1, 2)
    )
    assert [result.seed for result in two] == [0, 1, 2]
    assert [result.regret for result in one] == [result.regret for result in two]
    document = Result(chosen, tuple(one)).summary
    assert document["regret_mean"] == pytest.approx(sum(r.regret for r in one) / 3)
    assert "seed" not in document["constants"]


def test_one_value_has_no_band() -> None:
    assert band([2.0]) == (2.0, None)


def test_the_shares_show_whether_the_optimal_policy_survives() -> None:
    """A radius of zero keeps the estimate's best alone; a wide one eliminates nothing."""
    mdp = exact_mdp(make("RiverSwim-v0", **RIVERSWIM))
    known = {}
    for scale in (0.0, 1e6):
        chosen = spec("sdp-pe").model_copy(update={"options": {"radius_scale": scale}})
        results = [result_of(chosen, seed) for seed in range(3)]
        known[scale] = Result(Preset(chosen, RIVERSWIM), tuple(results)).summary
    assert known[1e6]["share_optimal_survives"] == 1
    assert known[1e6]["share_eliminated"] == 0
    assert known[0.0]["share_eliminated"] == 1
    assert known[0.0]["share_optimal_survives"] < 1
    assert optimal_survives(Registry().build(spec("sdp-pe")), mdp)
    other = result_of(spec("ucbvi"), 0)
    assert (other.optimal_survives, share([other.eliminated])) == (None, None)
