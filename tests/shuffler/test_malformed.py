"""Texts that a database refuses are refused first: PostgreSQL takes no NUL, SQLite does."""

import pytest

from tests.shuffler.conftest import Api, both_engines, problem
from tests.shuffler.test_callers import ID, ROUTES
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN


@both_engines
@pytest.mark.parametrize(("method", "path", "allowed"), [r for r in ROUTES if ID in r[1]])
def test_a_nul_in_a_path_is_refused(api: Api, method: str, path: str, allowed: set[str]) -> None:
    tokens = {"coordinator": COORDINATOR_TOKEN, "operator": OPERATOR_TOKEN, "node": api.token}
    answer = api.call(method, path.replace(ID, f"{ID[:-1]}%00"), tokens[min(allowed)])
    assert (answer.status_code, problem(answer)) == (400, "malformed")


@both_engines
@pytest.mark.parametrize("name", ["a\0b", "\0", "a\nb", "\x7f", ""])
def test_a_name_with_control_characters_is_refused(api: Api, name: str) -> None:
    answer = api.call(
        "POST", "/nodes", OPERATOR_TOKEN, json={"name": name, "owner": "me", "users": 1}
    )
    assert (answer.status_code, problem(answer)) == (400, "malformed")


@both_engines
@pytest.mark.parametrize("name", ["a\0b", "\0"])
def test_a_nul_in_a_user_is_refused(api: Api, name: str) -> None:
    batch = api.deposit()
    answer = api.lease(batch, [name])
    assert (answer.status_code, problem(answer)) == (400, "malformed")
