"""Manual mode: an outside learner deploys policies and reads private counts."""

from typing import Any

import numpy as np
import pytest

from riffle.coordinator.learners.registry import ManualLearner
from riffle.coordinator.learners.registry import problem as problem_of
from riffle.coordinator.learning.learner import LearnerError
from tests.coordinator.calls import Answer, Api, problem
from tests.coordinator.learner import Tiny
from tests.coordinator.world import RUN, SMALL, spec

MANUAL = {**SMALL, "learner": "manual"}
POLICY = [[0, 1], [1, 1]]


def deploy(api: Api, **body: Any) -> Answer:
    return api.call("POST", f"/{RUN}/deployments", json=body)


def counted(api: Api, index: int) -> Any:
    api.until(lambda: api.get(f"/{RUN}/deployments/{index}")["state"] == "counted")
    return api.get(f"/{RUN}/deployments/{index}")


def test_manual_mode_from_policy_to_private_counts(api: Api) -> None:
    api.shuffler.expired = 0
    assert api.call("POST", "", json=MANUAL).status_code == 201
    assert problem(api.call("GET", f"/{RUN}/deployment"))[:2] == (404, "unknown-deployment")
    first = deploy(api, policy=POLICY, episodes=20)
    assert first.status_code == 201
    assert first.json()["mixture"]["policies"] == [POLICY]
    detail = counted(api, 0)
    assert detail["value_estimate"]["confidence"] == 0.95
    assert np.shape(detail["counts"]["transitions"]) == (2, 2, 2, 2)
    mixture = {"policies": [POLICY, [[0, 0], [0, 0]]], "probabilities": [0.25, 0.75]}
    assert deploy(api, **mixture, episodes=20, layer=1).json()["index"] == 1
    assert counted(api, 1)["mixture"]["probabilities"] == [0.75, 0.25]
    api.wait_for("finished")
    result = api.get(f"/{RUN}/result")
    assert result["policy"] == POLICY
    assert result["value_estimate"] == detail["value_estimate"]["value"]
    assert (result["episodes"], result["policy_switches"]) == (40, 1)


def test_manual_mode_survives_a_restart(api: Api) -> None:
    api.shuffler.expired = 0
    api.call("POST", "", json=MANUAL)
    deploy(api, policy=POLICY, episodes=20)
    counted(api, 0)
    api.restart()
    deploy(api, policy=POLICY, episodes=20)
    counted(api, 1)
    api.wait_for("finished")


def test_a_repeated_deployment_is_the_same_one(api: Api) -> None:
    api.call("POST", "", json=MANUAL)
    assert deploy(api, policy=POLICY, episodes=20, step=0).json()["index"] == 0
    assert deploy(api, policy=POLICY, episodes=20, step=0).json()["index"] == 0
    other = deploy(api, policy=POLICY, episodes=19, step=0)
    assert problem(other)[:2] == (409, "wrong-state")
    counted(api, 0)
    assert len(api.get(f"/{RUN}/deployments")["deployments"]) == 1


@pytest.mark.parametrize(
    ("body", "slug", "named"),
    [
        ({"episodes": 20}, "invalid-spec", "policy"),
        ({"policy": POLICY}, "invalid-spec", "episodes"),
        ({"policy": POLICY, "episodes": 41}, "wrong-state", "40 episodes"),
        ({"policy": [[0, 1]], "episodes": 20}, "invalid-spec", "shape"),
        ({"policy": [[0, 1], [0]], "episodes": 20}, "invalid-spec", "policy"),
        ({"policy": [[0, 2], [0, 0]], "episodes": 20}, "invalid-spec", "action"),
        ({"policies": [POLICY], "episodes": 20}, "invalid-spec", "probabilities"),
        (
            {"policies": [POLICY], "probabilities": [0.5], "episodes": 20},
            "invalid-spec",
            "sum to 1",
        ),
        (
            {"policies": [POLICY], "probabilities": [0.5, 0.5], "episodes": 20},
            "invalid-spec",
            "as many",
        ),
        ({"policy": POLICY, "episodes": 20, "layer": 2}, "invalid-spec", "layer"),
        ({"policy": POLICY, "episodes": 1 << 28}, "invalid-spec", "1073741824 bytes"),
        ({"policy": [[10**400, 1], [1, 1]], "episodes": 20}, "invalid-spec", "policy"),
        ({"policy": [[1 << 63, 1], [1, 1]], "episodes": 20}, "invalid-spec", "policy"),
        ({"policy": [[-1, 1], [1, 1]], "episodes": 20}, "invalid-spec", "policy"),
        ({"policy": POLICY, "episodes": 20, "step": 1 << 53}, "invalid-spec", "step"),
        ({"policy": POLICY, "episodes": 20, "layer": 10**400}, "invalid-spec", "layer"),
        ({"policy": POLICY, "episodes": 20, "step": 3}, "wrong-state", "step"),
    ],
)
def test_a_deployment_that_is_wrong_is_named(
    api: Api, body: dict[str, Any], slug: str, named: str
) -> None:
    api.call("POST", "", json=MANUAL)
    answer = problem(deploy(api, **body))
    assert answer[1] == slug
    assert named in answer[2]


def test_one_deployment_at_a_time(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=MANUAL)
    deploy(api, policy=POLICY, episodes=20)
    assert problem(deploy(api, policy=POLICY, episodes=20))[:2] == (409, "wrong-state")


def test_learners_deploy_for_themselves(api: Api) -> None:
    api.shuffler.fills = False
    api.call("POST", "", json=SMALL)
    assert problem(deploy(api, policy=POLICY, episodes=20))[:2] == (409, "wrong-state")


def test_the_learner_takes_one_deployment_at_a_time() -> None:
    learner = ManualLearner(problem_of(spec()))
    deployment = Tiny(problem_of(spec())).next_deployment()
    assert deployment is not None
    learner.submit(deployment)
    assert learner.next_deployment() is deployment
    with pytest.raises(LearnerError, match="under way"):
        learner.submit(deployment)
    assert learner.summary().episodes_used == 0


def test_manual_mode_has_no_options(api: Api) -> None:
    answer = problem(api.call("POST", "", json={**MANUAL, "options": {"growth": 2}}))
    assert answer[1:] == ("invalid-spec", "manual: manual mode has no options")


# -- K counts episodes that were executed --------------------------------------------------------


def test_executed_episodes_use_up_the_run(api: Api) -> None:
    api.call("POST", "", json=MANUAL)
    deploy(api, policy=POLICY, episodes=20)
    counted(api, 0)  # 20 reports, and one lease that came to nothing
    answer = problem(deploy(api, policy=POLICY, episodes=20))
    assert answer[:2] == (409, "wrong-state")
    assert "21 of 40 episodes" in answer[2]
    deploy(api, policy=POLICY, episodes=19)
    counted(api, 1)
    api.wait_for("finished")
    result = api.get(f"/{RUN}/result")
    assert (result["episodes"], result["episodes_executed"]) == (39, 41)


def test_a_rejected_batchs_episodes_are_used_too(api: Api) -> None:
    api.shuffler.expired, api.shuffler.fills = 0, False
    api.call("POST", "", json=MANUAL)
    L = deploy(api, policy=POLICY, episodes=20).json()["messages"]
    api.shuffler.broken, api.shuffler.fills = {0: 3 * L}, True
    api.until(lambda: len(api.get(f"/{RUN}/deployments")["deployments"]) == 2)
    counted(api, 1)  # the same deployment again
    assert api.get(f"/{RUN}/deployments/0")["state"] == "rejected"
    api.wait_for("finished")
    result = api.get(f"/{RUN}/result")
    assert (result["episodes"], result["episodes_executed"]) == (20, 40)
