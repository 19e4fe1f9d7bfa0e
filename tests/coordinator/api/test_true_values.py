"""True values that the operator of a simulated environment supplies, regret and bands."""

import numpy as np
import pytest
from scipy import stats

from riffle.coordinator.learning.true_values import Curve, TrueRow, bands, curve
from tests.coordinator.calls import Answer, Api, problem
from tests.coordinator.world import RUN, SMALL


def steps(episodes: list[int], values: list[float], optimal: float = 1.0) -> Curve:
    pairs = enumerate(zip(episodes, values, strict=True))
    return curve([TrueRow(index, n, optimal, value) for index, (n, value) in pairs])


def test_regret_adds_what_every_episode_lost() -> None:
    result = steps([10, 0, 20], [0.5, 0.1, 0.75])
    assert result.episodes.tolist() == [10, 30]  # a batch that executed nothing lost nothing
    assert result.value.tolist() == [0.5, 0.75]
    assert result.regret.tolist() == [5.0, 10.0]


def test_a_band_is_students_interval_of_runs_that_came_as_far() -> None:
    runs = [steps([100], [value]) for value in (0.2, 0.4, 0.9)]
    short = steps([99], [0.0])
    result = bands(runs[0], [runs[1], short, runs[2]])
    assert result is not None
    assert result.runs == 3
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem([0.2, 0.4, 0.9]))
    np.testing.assert_allclose(result.value.mean, 0.5)
    np.testing.assert_allclose(result.value.low, low)
    np.testing.assert_allclose(result.value.high, high)
    np.testing.assert_allclose(result.regret.mean, np.multiply(result.episodes, 0.5))


def test_a_band_follows_the_values_step_by_step() -> None:
    result = bands(steps([50, 50], [0.0, 1.0]), [steps([25, 75], [0.0, 1.0])])
    assert result is not None
    at = dict(zip(result.episodes, result.value.mean, strict=True))
    assert [at[25.0], at[50.0], at[75.0]] == [0.0, 0.5, 1.0]
    assert result.regret.mean[-1] == pytest.approx((50 + 25) / 2)


@pytest.mark.parametrize("others", [[], [steps([9], [0.5])]])
def test_one_run_has_no_band(others: list[Curve]) -> None:
    assert bands(steps([10], [0.5]), others) is None
    assert bands(steps([], []), others) is None


# -- over REST ------------------------------------------------------------------------------------


def supply(api: Api, *values: float, optimal: float = 1.5, run: str = RUN) -> Answer:
    result = [{"deployment": index, "value": value} for index, value in enumerate(values)]
    return api.call("POST", f"/{run}/truth", json={"optimal_value": optimal, "values": result})


def test_a_run_without_true_values_has_no_regret(api: Api) -> None:
    api.finish()
    empty: list[float] = []
    shown = api.get(f"/{RUN}/truth")
    assert (shown["optimal_value"], shown["regret"], shown["bands"]) == (None, empty, None)


def test_supplied_values_become_regret_over_episodes_executed(api: Api) -> None:
    api.finish()  # two deployments of 20 episodes, and one lease each that came to nothing
    assert supply(api, 0.5).status_code == 204
    assert supply(api, 0.5, 1.25).status_code == 204
    shown = api.get(f"/{RUN}/truth")
    assert shown["deployments"] == [0, 1]
    assert shown["episodes"] == [21, 42]
    assert shown["regret"] == [21 * 1.0, 21 * 1.0 + 21 * 0.25]


def test_runs_of_one_spec_make_a_band(api: Api) -> None:
    api.finish()
    other = "f" * 32
    for run, changes in ((other, {"seed": 7}), ("e" * 32, {"epsilon": 3.0})):
        api.call("POST", "", json={**SMALL, **changes, "run_id": run})
        api.until(lambda run=run: api.get(f"/{run}")["state"] == "finished")  # type: ignore[misc]
        supply(api, 0.5, 0.5, run=run)
    supply(api, 0.25, 0.25)
    assert api.get(f"/{RUN}/truth")["bands"]["runs"] == 2  # not the one with another epsilon


def test_contradicting_values_are_refused_as_a_whole(api: Api) -> None:
    api.finish()
    supply(api, 0.5)
    assert problem(supply(api, 0.75, 1.0))[:2] == (409, "wrong-state")
    assert problem(supply(api, 0.5, optimal=1.0))[:2] == (409, "wrong-state")
    assert problem(supply(api, 0.5, 0.5, 0.5))[:2] == (404, "unknown-deployment")
    refused = problem(supply(api, 0.5, optimal=2.5))
    assert refused[1] == "invalid-spec"
    assert "2.5 exceeds the horizon 2" in refused[2]
    above = problem(supply(api, 0.5, 0.75, optimal=0.7))
    assert "0.75 exceeds the optimal value 0.7" in above[2], "regret never falls"
    assert problem(supply(api, 0.5, run="0" * 32))[1] == "unknown-run"
    assert api.get(f"/{RUN}/truth")["deployments"] == [0]


def test_private_estimates_are_told_with_the_count(api: Api) -> None:
    api.finish()
    stream = api.call("GET", f"/{RUN}/events").text
    detail = api.get(f"/{RUN}/deployments/1")["value_estimate"]
    assert f'"value":{detail["value"]}' in stream.replace(" ", "")
    assert f'"radius":{detail["radius"]}' in stream.replace(" ", "")


def test_the_list_of_runs_counts_as_a_run_does(api: Api) -> None:
    api.finish()
    assert api.get("")["runs"] == [api.get(f"/{RUN}")]
    assert api.get("")["runs"][0]["episodes"] == 40
