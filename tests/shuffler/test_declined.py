"""Nodes that decline an open batch: what the shuffler notes of it, and who sees what."""

from contextlib import ExitStack

import pytest

from riffle.common.protocol.wire import DECLINE_SECONDS
from tests.shuffler.conftest import Api, problem
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN, Batch


def decline(api: Api, batch: Batch, reason: object, token: str | None = None) -> int:
    path = f"/batches/{batch.batch_id}/declined"
    return api.call("POST", path, token or api.token, json={"reason": reason}).status_code


@pytest.mark.parametrize("token", [COORDINATOR_TOKEN, OPERATOR_TOKEN])
def test_the_status_shows_sorted_reasons_without_nodes_or_counts(api: Api, token: str) -> None:
    batch, other = api.deposit(), api.deposit(deployment=1)
    _, second = api.enrol(10)
    for reason, node in (("too-slow", api.token), ("no-users", second), ("too-slow", second)):
        assert decline(api, batch, reason, node) == 200
    assert api.status(batch, token)["declined"] == ["no-users", "too-slow"]
    assert api.status(other, token)["declined"] == []


def test_a_reason_is_shown_as_long_as_some_node_repeats_it(api: Api) -> None:
    batch = api.deposit()
    decline(api, batch, "no-users")
    for _ in range(4):
        api.clock.now += 2 * DECLINE_SECONDS
        assert decline(api, batch, "too-slow") == 200
    assert api.status(batch, COORDINATOR_TOKEN)["declined"] == ["too-slow"]
    api.clock.now += 3 * DECLINE_SECONDS
    assert api.status(batch, COORDINATOR_TOKEN)["declined"] == []


def test_every_replica_shows_a_reason(api: Api) -> None:
    batch = api.deposit()
    with ExitStack() as stack:
        other = api.replica(stack)
        assert decline(other, batch, "too-slow") == 200
        assert api.status(batch, COORDINATOR_TOKEN)["declined"] == ["too-slow"]


def test_a_batch_that_is_over_has_no_reasons(api: Api) -> None:
    batch = api.deposit()
    decline(api, batch, "too-slow")
    api.call("POST", f"/batches/{batch.batch_id}/abandon", OPERATOR_TOKEN)
    assert decline(api, batch, "too-slow") == 200
    assert api.status(batch, OPERATOR_TOKEN)["declined"] == []


@pytest.mark.parametrize("reason", ["", "node-7", "x" * 70_000, 3, None, ["too-slow"]])
def test_only_known_reasons_are_noted(api: Api, reason: object) -> None:
    batch = api.deposit()
    assert decline(api, batch, reason) in (400, 413)
    assert api.status(batch, OPERATOR_TOKEN)["declined"] == []


def test_an_unknown_batch_cannot_be_declined(api: Api) -> None:
    path = f"/batches/{'ab' * 16}/declined"
    answer = api.call("POST", path, api.token, json={"reason": "too-slow"})
    assert problem(answer) == "unknown-batch"
