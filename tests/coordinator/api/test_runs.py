"""The REST surface of runs, through the app itself."""

import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.coordinator.calls import Answer, Api, problem
from tests.coordinator.world import RUN, SMALL

# -- a run --------------------------------------------------------------------------------------


def test_a_run_from_spec_to_result(api: Api) -> None:
    api.finish()
    result = api.get(f"/{RUN}/result")
    assert result["state"] == "finished"
    assert result["policy"] == [[0, 0], [0, 0]]
    assert (result["episodes"], result["episodes_executed"], result["reports"]) == (40, 42, 40)
    assert result["messages_forwarded"] == result["messages_counted"] + result["failed"]
    assert 0 < result["epsilon"] <= 4.0
    assert result["beta"] == 0.01
    assert result["within_budget"]
    assert result["policy_switches"] == 1
    assert result["constants"] == {"name": "tiny"}
    assert {"waiting", "fetching", "opening", "storing", "planning"} <= set(result["timings"])


def test_stages_ledger_and_lists(api: Api) -> None:
    api.finish()
    (stage,) = api.get(f"/{RUN}/stages")["stages"]
    assert (stage["deployment"], stage["active_before"], stage["L_b"]) == (1, 8, 20)
    ledger = api.get(f"/{RUN}/ledger")
    assert [entry["deployment"] for entry in ledger["entries"]] == [0, 1]
    assert ledger["epsilon"] == max(entry["epsilon_upper"] for entry in ledger["entries"])
    assert all(e["epsilon_lower"] <= e["epsilon_upper"] for e in ledger["entries"])
    assert ledger["neighbours"] == "replace one user"
    deployments = api.get(f"/{RUN}/deployments")["deployments"]
    assert [(d["index"], d["layer"], d["state"]) for d in deployments] == [
        (0, 0, "counted"),
        (1, None, "counted"),
    ]
    (listed,) = api.get("")["runs"]
    assert (listed["id"], listed["episodes"], listed["active"]) == (RUN, 40, 1)


def test_private_counts_of_a_deployment(api: Api) -> None:
    api.finish()
    crude, fine = api.get(f"/{RUN}/deployments/0"), api.get(f"/{RUN}/deployments/1")
    assert crude["counts"]["rewards"] is None
    assert crude["value_estimate"] is None
    counts = fine["counts"]
    assert np.shape(counts["transitions"]) == (2, 2, 2, 2)
    assert np.shape(counts["visits"]) == np.shape(counts["rewards"]) == (2, 2, 2)
    assert counts["visit_variance"] == pytest.approx(2 * counts["transition_variance"])
    total = np.sum(counts["transitions"])
    assert abs(total - 40) < 6 * np.sqrt(16 * counts["transition_variance"])
    estimate = fine["value_estimate"]
    assert estimate["value"] == pytest.approx(np.sum(counts["rewards"]) / 20)
    assert estimate["radius"] > estimate["noise_deviation"] > 0
    assert fine["spend"]["used"]


def test_the_same_run_again_is_the_same_run(api: Api) -> None:
    api.finish()
    again = api.call("POST", "", json=SMALL)
    assert (again.status_code, again.json()["state"]) == (201, "finished")
    other = api.call("POST", "", json={**SMALL, "episodes": 41})
    assert problem(other)[:2] == (409, "wrong-state")


def test_a_restart_goes_on(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=SMALL)
    api.until(lambda: "status" in api.shuffler.calls)
    api.restart()
    assert api.get(f"/{RUN}")["state"] == "running"
    api.shuffler.fills = True
    api.wait_for("finished")


def test_stopping(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=SMALL)
    assert api.call("POST", f"/{RUN}/stop").json()["state"] == "stopped"
    assert api.call("POST", f"/{RUN}/stop").status_code == 200
    api.until(lambda: api.get(f"/{RUN}/deployments/0")["state"] == "abandoned")


def test_a_finished_run_cannot_be_stopped(api: Api) -> None:
    api.finish()
    assert problem(api.call("POST", f"/{RUN}/stop"))[:2] == (409, "wrong-state")


def test_sdp_pe_runs(api: Api) -> None:
    small = {**SMALL, "learner": "sdp-pe", "episodes": 240, "options": {"smallest_n": 20}}
    assert api.call("POST", "", json=small).status_code == 201
    api.wait_for("finished")
    result = api.get(f"/{RUN}/result")
    assert result["episodes"] == 240
    assert result["constants"]["smallest_n"] == 20
    assert len(api.get(f"/{RUN}/stages")["stages"]) >= 1
    assert np.shape(result["policy"]) == (2, 2)


# -- what is refused ----------------------------------------------------------------------------

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"name": None}, "name"),
    ({"learner": "nobody"}, "learner"),
    ({"states": 0}, "states"),
    ({"states": "2"}, "states"),
    ({"horizon": 100_000}, "horizon"),
    ({"start": [0.5, 0.4]}, "start"),
    ({"start": [1.0]}, "start"),
    ({"start": [2.0, -1.0]}, "start"),
    ({"reward_low": 1.0}, "reward_low"),
    ({"reward_low": -1e308, "reward_high": 1e308}, "reward_high - reward_low"),
    ({"episodes": 0}, "episodes"),
    ({"epsilon": 0.0}, "epsilon"),
    ({"epsilon": "NaN"}, "epsilon"),
    ({"beta": 1.0}, "beta"),
    ({"dishonest_fraction": 1.0}, "dishonest_fraction"),
    ({"families": "all"}, "families"),
    ({"constants": "mine"}, "constants"),
    ({"options": {"nonsense": 1}}, "nonsense"),
    ({"unknown_field": 1}, "unknown_field"),
    ({"states": 5_000, "actions": 1_000}, "counters"),
    ({"run_id": "xyz"}, "run_id"),
    ({"seed": 1 << 53}, "seed"),
    ({"test_seed": 1 << 53}, "test_seed"),
    ({"options": {"smallest_n": 10**400}}, "options"),
    ({"options": {"smallest_n": 1 << 60}}, "options"),
    ({"reissues": 10**400}, "reissues"),
    ({"episode_seconds": 0}, "episode_seconds"),
    ({"episode_seconds": 600, "batch_seconds": 1_199}, "batch_seconds"),
    ({"reward_high": 10**400}, "reward_high"),
    ({"start": [10**400, 0]}, "start"),
]


@pytest.mark.parametrize(("change", "named"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_malformed_spec_is_named(api: Api, change: dict[str, Any], named: str) -> None:
    status, slug, detail = problem(api.call("POST", "", json={**SMALL, **change}))
    assert (status, slug) == (422, "invalid-spec")
    assert named in detail
    assert api.get("")["runs"] == []


def test_a_body_that_is_not_json_is_malformed(api: Api) -> None:
    assert problem(api.call("POST", "", content=b"{"))[:2] == (400, "malformed")
    assert problem(api.call("POST", "", content=b" " * (2 << 20)))[:2] == (413, "too-large")


def test_a_batch_too_small_names_the_smallest_one(api: Api) -> None:
    answer = problem(api.call("POST", "", json={**SMALL, "max_messages": 8}))
    assert answer[:2] == (422, "batch-too-small")
    assert "smallest n that works is" in answer[2]
    assert api.get("")["runs"] == []


def test_a_batch_too_large_to_hand_over_is_refused_at_once(api: Api) -> None:
    large = {**SMALL, "learner": "sdp-pe", "episodes": 1 << 36, "options": {"smallest_n": 1 << 28}}
    answer = problem(api.call("POST", "", json=large))
    assert answer[:2] == (422, "invalid-spec")
    assert "1073741824 bytes" in answer[2]


def test_sdp_pe_refuses_what_it_cannot_do(api: Api) -> None:
    listed = {"active_set": "enumerated"}
    many = {**SMALL, "learner": "sdp-pe", "states": 30, "actions": 4, "options": listed}
    many |= {"episodes": 100_000}
    assert "enumeration" in problem(api.call("POST", "", json=many))[2]
    option = {**SMALL, "learner": "sdp-pe", "options": {"growth": "fast"}}
    assert "growth" in problem(api.call("POST", "", json=option))[2]


def test_a_schedules_smallest_batch_is_checked_at_once(api: Api) -> None:
    small = {**SMALL, "learner": "sdp-pe", "episodes": 20_000, "max_messages": 8}
    answer = problem(api.call("POST", "", json=small))
    assert answer[1] == "batch-too-small"
    assert "smallest n that works is" in answer[2]


@pytest.mark.parametrize("path", ["", f"/{RUN}", f"/{RUN}/result", f"/{RUN}/events"])
def test_every_route_needs_the_operators_token(api: Api, path: str) -> None:
    response = api.client.get(f"/v1/runs{path}")
    assert problem(response)[:2] == (401, "unauthorized")
    wrong = api.client.get(f"/v1/runs{path}", headers={"Authorization": "Bearer wrong"})
    assert problem(wrong)[:2] == (401, "unauthorized")
    assert "operator/coordinator_token" in problem(wrong)[2]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/deployment",
        "/deployments",
        "/deployments/0",
        "/stages",
        "/ledger",
        "/result",
        "/events",
    ],
)
def test_an_unknown_run_is_reported(api: Api, path: str) -> None:
    assert problem(api.call("GET", f"/{'f' * 32}{path}"))[:2] == (404, "unknown-run")


def test_an_unknown_deployment_is_reported(api: Api) -> None:
    api.finish()
    for index in (-1, 2):
        response = api.call("GET", f"/{RUN}/deployments/{index}")
        assert problem(response)[:2] == (404, "unknown-deployment")


def test_seeded_runs_need_the_test_entry(api: Api) -> None:
    seeded = {**SMALL, "test_seed": 7}
    assert problem(api.call("POST", "", json=seeded))[:2] == (403, "test-entry-refused")
    api.restart(test_entry=True)
    assert api.call("POST", "", json=seeded).status_code == 201
    api.wait_for("finished")
    ledger = api.get(f"/{RUN}/ledger")
    assert ledger["epsilon"] == "Infinity"
    assert ledger["entries"][0]["epsilon_upper"] == "Infinity"
    assert api.get(f"/{RUN}/result")["epsilon"] == "Infinity"


# -- waiting and following ----------------------------------------------------------------------


def test_the_current_deployment_is_a_conditional_get(api: Api) -> None:
    api.finish()
    response = api.call("GET", f"/{RUN}/deployment")
    assert response.headers["etag"] == '"1"'
    assert response.json()["purpose"] == "fine"
    same = api.call("GET", f"/{RUN}/deployment", headers={"If-None-Match": '"1"'})
    assert (same.status_code, same.content) == (304, b"")
    older = api.call("GET", f"/{RUN}/deployment", headers={"If-None-Match": '"0"'})
    assert older.status_code == 200
    assert problem(api.call("GET", f"/{RUN}/deployment?wait=31"))[0] == 400


@pytest.mark.parametrize("known", ["9" * 5_000, "9" * 400, str(1 << 64), '"', "", "-1", "*"])
def test_an_etag_of_nobody_matches_nothing(api: Api, known: str) -> None:
    api.finish()
    answer = api.call("GET", f"/{RUN}/deployment", headers={"If-None-Match": known})
    assert (answer.status_code, answer.json()["index"]) == (200, 1)


@pytest.mark.parametrize("last", ["9" * 5_000, str(1 << 53), str(1 << 64), "-1"])
def test_an_event_id_out_of_range_is_refused(api: Api, last: str) -> None:
    api.finish()
    answer = api.call("GET", f"/{RUN}/events", headers={"Last-Event-ID": last})
    assert problem(answer)[:2] == (400, "malformed")


@pytest.mark.parametrize("index", ["9" * 5_000, str(1 << 64), "-1"])
def test_an_index_out_of_range_is_reported(api: Api, index: str) -> None:
    api.finish()
    assert problem(api.call("GET", f"/{RUN}/deployments/{index}"))[0] in (400, 404)


def test_a_long_poll_returns_when_the_next_deployment_comes(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=SMALL)
    release = threading.Timer(0.3, lambda: setattr(api.shuffler, "fills", True))
    release.start()
    started = time.monotonic()
    response = api.call("GET", f"/{RUN}/deployment?wait=20", headers={"If-None-Match": '"0"'})
    assert response.json()["index"] == 1  # so it waited for the release
    assert time.monotonic() - started < 15
    release.join()


def test_a_long_poll_ends_without_a_new_deployment(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=SMALL)
    response = api.call("GET", f"/{RUN}/deployment?wait=0.2", headers={"If-None-Match": '"0"'})
    assert response.status_code == 304


def stream(response: Answer) -> list[dict[str, Any]]:
    events = []
    for block in response.text.strip().split("\n\n"):
        lines = [line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")]
        events.append(dict(lines))
    return events


def test_events_stream_to_the_end_and_resume(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=SMALL)
    release = threading.Timer(0.2, lambda: setattr(api.shuffler, "fills", True))
    release.start()
    response = api.call("GET", f"/{RUN}/events")
    release.join()
    assert response.headers["content-type"].startswith("text/event-stream")
    events = stream(response)
    assert [event["id"] for event in events] == [str(i) for i in range(1, 10)]
    assert [events[0]["event"], events[-1]["event"]] == ["run_started", "run_finished"]
    assert json.loads(events[3]["data"])["epsilon"] <= 4.0
    resumed = api.call("GET", f"/{RUN}/events", headers={"Last-Event-ID": "6"})
    assert stream(resumed) == events[6:]
    assert problem(api.call("GET", f"/{RUN}/events", headers={"Last-Event-ID": "x"}))[0] == 400
