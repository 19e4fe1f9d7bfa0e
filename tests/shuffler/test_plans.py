"""How SQLite carries out the statements of a request: through an index of what is asked for.

A statement that reads all users, or all of a batch, gives the right answer and makes every request
slower with every report; no test of answers sees it.
"""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import Engine, event

from tests.shuffler.conftest import Api, both_aggregations
from tests.shuffler.world import user

GROWING = "users|lease_groups|reports|report_keys"
WHOLE_TABLE = re.compile(rf"^SCAN ({GROWING})\b")
WHOLE_BATCH = re.compile(rf"^SEARCH ({GROWING}) .*\(batch_id=\?\)$")
Statements = dict[str, int]
"""Text of a statement -> how many parameters it has."""


@contextmanager
def recorded() -> Iterator[Statements]:
    """Yields the statements sent to any database while the context lasts."""
    found: Statements = {}

    def record(*arguments: object) -> None:
        _, _, statement, parameters, _, many = arguments
        assert isinstance(statement, str)
        assert isinstance(parameters, tuple | list)
        found[statement] = len(parameters[0] if many else parameters)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", record)


def plans(api: Api, statements: Statements) -> list[tuple[str, str]]:
    """Every step of every statement's plan: (step, statement)."""
    with closing(api.core._store.engine.raw_connection()) as connection:
        cursor = connection.cursor()
        return [
            (str(row[3]), text)
            for text, count in statements.items()
            if text.startswith(("SELECT", "UPDATE", "INSERT", "DELETE"))
            for row in cursor.execute(f"EXPLAIN QUERY PLAN {text}", ("[]",) * count)
        ]


@pytest.fixture
def of_requests(api: Api) -> Statements:
    """Statements of leases and uploads of all kinds, in a batch that stays open."""
    batch, other = api.deposit_shared(0.5), api.deposit_shared(0.5, deployment=1)
    with recorded() as found:
        leases = api.leases(batch, [user(0), user(1)])
        api.leases(batch, [user(1), user(2)])
        api.lease(other, [user(0), user(3)])
        api.outcomes(batch, [(lease.lease, batch.report()) for lease in leases])
        api.outcomes(batch, [(leases[0].lease, batch.report())])
        api.clock.now += 60
        api.lease(batch, [user(4)])
    return found


@both_aggregations
def test_no_request_reads_a_whole_table_or_batch(api: Api, of_requests: Statements) -> None:
    assert any(text.startswith("INSERT INTO reports") for text in of_requests)
    steps = plans(api, of_requests)
    assert [
        pair for pair in steps if WHOLE_TABLE.search(pair[0]) or WHOLE_BATCH.search(pair[0])
    ] == []


@both_aggregations
def test_no_statement_of_a_batchs_life_reads_a_whole_table(api: Api) -> None:
    with recorded() as found:
        batch = api.deposit()
        api.fill(batch)
        api.finish(batch)
        api.abandon(api.deposit(deployment=1))
    steps = plans(api, found)
    assert len(steps) > 20
    assert [pair for pair in steps if WHOLE_TABLE.search(pair[0])] == []
