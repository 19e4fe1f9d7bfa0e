"""What no database takes is refused before it: PostgreSQL has no NUL in a text, SQLite has."""

import pytest

from tests.shuffler.conftest import Api, both_engines, problem
from tests.shuffler.test_callers import ID, ROUTES
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN


@both_engines
@pytest.mark.parametrize(("method", "path", "allowed"), [r for r in ROUTES if ID in r[1]])
def test_a_nul_in_a_path(api: Api, method: str, path: str, allowed: set[str]) -> None:
    tokens = {"coordinator": COORDINATOR_TOKEN, "operator": OPERATOR_TOKEN, "node": api.token}
    answer = api.call(method, path.replace(ID, f"{ID[:-1]}%00"), tokens[min(allowed)])
    assert (answer.status_code, problem(answer)) == (400, "malformed")


@both_engines
@pytest.mark.parametrize("name", ["a\0b", "\0", "a\nb", "\x7f", ""])
def test_a_name_that_no_store_or_log_should_hold(api: Api, name: str) -> None:
    answer = api.call("POST", "/nodes", OPERATOR_TOKEN, json={"name": name, "users": 1})
    assert (answer.status_code, problem(answer)) == (400, "malformed")


@both_engines
@pytest.mark.parametrize("name", ["a\0b", "\0"])
def test_a_nul_in_a_user(api: Api, name: str) -> None:
    batch = api.deposit()
    answer = api.lease(batch, [name])
    assert (answer.status_code, problem(answer)) == (400, "malformed")
