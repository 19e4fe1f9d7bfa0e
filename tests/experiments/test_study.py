"""A study and the figures run the same learners on the same draws."""

import pytest

from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import RunSpec
from riffle.experiments import per_episode
from riffle.experiments.study import (
    CALIBRATIONS,
    Study,
    band,
    optimal_survives,
    run_seed,
    share,
    study,
)
from riffle.node_client.environments.registry import exact_mdp, make

RIVERSWIM = {"states": 4, "horizon": 3}
K = 1_000


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
def test_a_study_is_the_run_that_figures_show(learner: str, calibration: str) -> None:
    if calibration == "paper" and learner.startswith("sdp-pe"):
        pytest.skip("the papers' noise refuses batches this small")
    mdp = exact_mdp(make("RiverSwim-v0", **RIVERSWIM))
    here = run_seed(spec(learner, calibration), dict(RIVERSWIM), 3)
    there = per_episode.run(
        learner, mdp, K, epsilon=1.0, beta=1e-5, seed=3, calibration=CALIBRATIONS[calibration]
    )
    assert here.regret == pytest.approx(there.total)
    assert here.policy_switches == there.switches
    assert here.constants["delta"] == there.constants["delta"]


def test_seeds_come_in_order_and_two_studies_agree() -> None:
    seen: list[int] = []
    first = study(
        spec("ucbvi"), dict(RIVERSWIM), 3, workers=1, on_result=lambda r: seen.append(r.seed)
    )
    assert seen == [0, 1, 2]
    second = study(spec("ucbvi"), dict(RIVERSWIM), 3, workers=2)
    assert [r.regret for r in first.results] == [r.regret for r in second.results]
    document = first.as_dict()
    assert document["regret_mean"] == pytest.approx(sum(r.regret for r in first.results) / 3)
    assert "seed" not in document["constants"]


def test_one_value_has_no_band() -> None:
    assert band([2.0]) == (2.0, None)


def test_the_shares_show_whether_the_optimal_policy_survives() -> None:
    """A radius of zero keeps the estimate's best alone; a wide one eliminates nothing."""
    mdp = exact_mdp(make("RiverSwim-v0", **RIVERSWIM))
    known = {}
    for scale in (0.0, 1e6):
        chosen = spec("sdp-pe").model_copy(update={"options": {"radius_scale": scale}})
        results = [run_seed(chosen, dict(RIVERSWIM), seed) for seed in range(3)]
        known[scale] = Study(chosen, tuple(results)).as_dict()
    assert known[1e6]["share_optimal_survives"] == 1
    assert known[1e6]["share_eliminated"] == 0
    assert known[0.0]["share_eliminated"] == 1
    assert known[0.0]["share_optimal_survives"] < 1
    assert optimal_survives(Registry().build(spec("sdp-pe")), mdp)
    other = run_seed(spec("ucbvi"), dict(RIVERSWIM), 0)
    assert (other.optimal_survives, share([other.eliminated])) == (None, None)
