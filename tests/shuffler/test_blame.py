"""Failed messages that a coordinator names: counted by node, once, for the operator alone."""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from riffle.shuffler.store import batch_rows
from riffle.shuffler.store.vault import Vault
from tests.shuffler.conftest import Api, both_engines, problem
from tests.shuffler.test_crash import dies
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN, Batch, user

N = 4


def fill(api: Api, batch: Batch, tokens: list[str], first: int = 0) -> dict[bytes, int]:
    """Fills a batch, a report of each node; returns which node sent each message."""
    sent: dict[bytes, int] = {}
    for number, token in enumerate(tokens):
        (lease,) = api.leases(batch, [user(first + number)], token)
        messages = batch.messages()
        assert api.outcomes(batch, [(lease.lease, batch.report(messages))], token) == ["accepted"]
        sent |= dict.fromkeys(batch.rows(messages), number)
    return sent


def nodes(api: Api) -> list[tuple[int, int]]:
    """The counts of all nodes: messages, batches."""
    found = api.call("GET", "/nodes", OPERATOR_TOKEN).json()["nodes"]
    return [(one["failed_messages"], one["failed_batches"]) for one in found]


class Blame:
    """A batch of a report from each of four nodes, handed over; ``senders`` by place."""

    def __init__(self, api: Api, deployment: int = 0) -> None:
        self.api = api
        self.ids, tokens = zip(*(api.enrol(10) for _ in range(N)), strict=True)
        self.batch = api.deposit(N, deployment)
        sent = fill(api, self.batch, list(tokens), first=100 * deployment)
        answer = api.messages(self.batch)
        self.digest = answer.headers["Riffle-Messages-Digest"]
        self.senders = [sent[row] for row in self.batch.rows(answer.content)]

    def places(self, node: int, count: int) -> list[int]:
        """The first places of a node's messages."""
        return [place for place, sender in enumerate(self.senders) if sender == node][:count]

    def acknowledge(self, failed: list[int]) -> Any:
        body = {"messages_sha256": self.digest, "failed": failed}
        path = f"/batches/{self.batch.batch_id}/acknowledgement"
        return self.api.call("POST", path, COORDINATOR_TOKEN, json=body)

    def counts(self) -> list[tuple[int, int]]:
        """The counts of the four nodes."""
        found = self.api.call("GET", "/nodes", OPERATOR_TOKEN).json()["nodes"]
        by_id = {one["node_id"]: one for one in found}
        return [(by_id[one]["failed_messages"], by_id[one]["failed_batches"]) for one in self.ids]


@both_engines
def test_failed_messages_are_counted_by_node(api: Api) -> None:
    first = Blame(api)
    failed = sorted(first.places(1, 3) + first.places(3, 1))
    assert first.acknowledge(failed).json()["state"] == "erased"
    assert first.counts() == [(0, 0), (3, 1), (0, 0), (1, 1)]
    text = api.client.get("/metrics", headers={"Authorization": f"Bearer {OPERATOR_TOKEN}"}).text
    assert "riffle_shuffler_messages_failed 4.0" in text
    assert "riffle_shuffler_nodes_failed 2.0" in text


@both_engines
def test_all_messages_of_a_batch_are_mapped(api: Api) -> None:
    first = Blame(api)
    assert first.acknowledge(list(range(len(first.senders)))).json()["state"] == "erased"
    sent = Counter(first.senders)
    assert first.counts() == [(sent[node], 1) for node in range(N)]


@both_engines
def test_a_repeated_acknowledgement_counts_once(api: Api) -> None:
    first = Blame(api)
    failed = first.places(2, 2)
    for _ in range(2):
        assert first.acknowledge(failed).json()["state"] == "erased"
    assert first.acknowledge(first.places(0, 2)).json()["state"] == "erased"
    api.restart()
    first.acknowledge(failed)
    assert first.counts() == [(0, 0), (0, 0), (2, 1), (0, 0)]


@both_engines
def test_a_crash_before_the_end_is_durable_loses_no_name(api: Api) -> None:
    """What tells nodes apart is kept as long as the batch is, also in the next process."""
    first = Blame(api)
    failed = first.places(0, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_rows, "transition", dies)
        assert first.acknowledge(failed).status_code == 500
    assert first.counts() == [(0, 0)] * N
    api.restart()
    first.acknowledge(failed)
    assert first.counts() == [(2, 1), (0, 0), (0, 0), (0, 0)]


@both_engines
def test_a_crash_after_the_end_is_durable_counts_once(api: Api) -> None:
    first = Blame(api)
    failed = first.places(0, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vault, "destroy", dies)
        assert first.acknowledge(failed).status_code == 500
    api.restart()
    first.acknowledge(failed)
    assert first.counts() == [(2, 1), (0, 0), (0, 0), (0, 0)]


@both_engines
def test_two_acknowledgements_at_once_count_once(api: Api) -> None:
    """Both have found whose messages they name before either is stored."""
    first, slots = Blame(api), [1, 1]
    commit = api.core._store.committer.submit
    named = partial(
        batch_rows.acknowledge, batch_id=first.batch.batch_id, sha256=first.digest, failed=slots
    )
    for _ in range(2):
        commit(named).result()
    assert first.counts() == [(0, 0), (2, 1), (0, 0), (0, 0)]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_another_replica_maps_them_and_both_count_once(api: Api) -> None:
    first = Blame(api)
    with ExitStack() as stack:
        first.api = api.replica(stack)
        first.acknowledge(first.places(1, 2))
        first.api = api
        first.acknowledge(first.places(1, 2))
        assert first.counts() == [(0, 0), (2, 1), (0, 0), (0, 0)]


def test_the_coordinator_learns_nothing_about_whose_they_were(api: Api) -> None:
    """Whichever it names, every answer is the same, and no answer of its token counts them."""
    answers = []
    for deployment, wanted in enumerate(({0: 4}, {1: 1, 2: 1, 3: 2}, {})):
        one = Blame(api, deployment)
        failed = sorted(p for node, count in wanted.items() for p in one.places(node, count))
        answer = one.acknowledge(failed)
        path = f"/batches/{one.batch.batch_id}"
        seen = [
            answer,
            *(api.call("GET", path + of, COORDINATOR_TOKEN) for of in ("/status", "/conservation")),
        ]
        headers = [{k: v for k, v in a.headers.items() if k != "date"} for a in seen]
        texts = [a.text.replace(one.batch.batch_id, "") for a in seen]
        answers.append(([a.status_code for a in seen], headers, texts))
    assert answers[0] == answers[1] == answers[2]
    assert sum(messages for messages, _ in nodes(api)) == 8
    assert api.call("GET", "/nodes", COORDINATOR_TOKEN).status_code == 401
    metrics = {"Authorization": f"Bearer {COORDINATOR_TOKEN}"}
    assert api.client.get("/metrics", headers=metrics).status_code == 401


@pytest.mark.parametrize("failed", [[-1], [1, 0], [2, 2], [10**9], list(range(5_000)), ["x"]])
def test_places_that_are_none_are_refused(api: Api, failed: list[Any]) -> None:
    first = Blame(api)
    answer = first.acknowledge(failed)
    assert (answer.status_code, problem(answer)) == (400, "malformed")
    assert api.status(first.batch)["state"] == "forwarded"
    assert first.counts() == [(0, 0)] * N


def test_a_lost_secret_tells_nobody_apart(api: Api) -> None:
    first = Blame(api)
    api.core._vault.destroy(first.batch.batch_id)
    assert first.acknowledge(first.places(0, 1)).json()["state"] == "erased"
    assert first.counts() == [(0, 0)] * N


def test_a_wrong_digest_names_nobody(api: Api) -> None:
    first = Blame(api)
    first.digest = "00" * 32
    assert problem(first.acknowledge(first.places(0, 1))) == "wrong-state"
    assert first.counts() == [(0, 0)] * N
