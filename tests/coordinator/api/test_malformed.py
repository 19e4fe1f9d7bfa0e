"""Requests that no database takes are refused before: PostgreSQL has no NUL in a text."""

from pathlib import Path

import pytest

from tests.coordinator.calls import Api, problem
from tests.coordinator.conftest import both_engines
from tests.coordinator.world import SMALL, TOKEN, store_url

BODIES = {
    "deployments": b'{"episodes": 1, "policy": [[0, 0], [0, 0]]}',
    "truth": b'{"optimal_value": 1, "values": [{"deployment": 0, "value": 1}]}',
}


@both_engines
def test_a_nul_in_a_path_is_a_fault_of_the_caller(api: Api, tmp_path: Path) -> None:
    api.restart(store_url=store_url(tmp_path))
    paths = api.client.get("/openapi.json").json()["paths"]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answers = 0
    for path, methods in paths.items():
        if "{" not in path:
            continue
        url = path.format(run_id="a%00b", index="0", key_id="a%00b", name="a%00b")
        for method in map(str.upper, methods):
            body = BODIES.get(url.rpartition("/")[2], b"")
            answer = api.client.request(method, url, content=body, headers=headers)
            assert problem(answer)[0] in (400, 404), (method, url, answer.text)
            answers += 1
    assert answers > 15


@both_engines
@pytest.mark.parametrize("field", ["name", "environment", "run_id", "learner"])
def test_a_nul_in_a_spec_is_a_fault_of_the_caller(api: Api, tmp_path: Path, field: str) -> None:
    api.restart(store_url=store_url(tmp_path))
    for value in ("a\0b", "\0", "a\0"):
        answer = api.call("POST", "", json=SMALL | {field: value})
        assert problem(answer)[0] in (400, 422), answer.text
    assert api.get("") == {"runs": []}
