"""The attacks that `docs/security.md` speaks of, through the real services over HTTP."""

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest

from riffle.common.accounting import account
from riffle.common.protocol.descriptor import serialize
from riffle.common.protocol.hpke import KeyPair, seal, seal_indices
from riffle.common.protocol.signatures import batch_id, sign_deposit
from riffle.common.protocol.verification import batch_event
from riffle.common.server import service
from riffle.node_client.environments.registry import make
from tests.coordinator.world import SIGNING, TOKEN
from tests.fuzz.live import Batch, Network, network
from tests.shuffler.world import COORDINATOR_TOKEN

N = 20
LARGE = 60
ENVIRONMENT = make("RiverSwim-v0", states=2, horizon=2)
EPSILON, GAMMA = 4.0, 0.1
LEASE_SECONDS = 20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(
        tmp_path_factory.mktemp("live"), lease_seconds=LEASE_SECONDS, max_owner_share=GAMMA
    ) as made:
        yield made


def honest(batch: Batch, count: int) -> list[bytes]:
    return [batch.honest(ENVIRONMENT) for _ in range(count)]


def silent(batch: Batch) -> bytes:
    """A report without data and without noise."""
    d = batch.context.descriptor
    return batch.sealed(np.full(d.padding.messages, d.layout.dummy))


def broken(batch: Batch) -> bytes:
    """A report whose messages are noise of another kind."""
    d = batch.context.descriptor
    keys = batch.keys
    return seal(keys.batch_key, keys.report_info, bytes(d.padding.messages * d.message_bytes))


def loud(batch: Batch) -> bytes:
    """A report whose messages all name the first counter."""
    return batch.sealed(np.zeros(batch.context.descriptor.padding.messages, dtype=np.int64))


def deposit(live: Network, batch: Batch, **changes: Any) -> httpx.Response:
    """What a coordinator that lies deposits under a batch id that it has used."""
    other = batch.context.descriptor.model_copy(update=changes)
    data = serialize(other)
    headers = {"Riffle-Signature": sign_deposit(SIGNING, data)}
    path = f"/batches/{other.batch_id}"
    return live.call("shuffler", "PUT", path, COORDINATOR_TOKEN, content=data, headers=headers)


def slug(answer: httpx.Response) -> str:
    return str(answer.json()["type"]).rpartition(":")[2]


def test_one_descriptor_and_one_key_a_batch(live: Network) -> None:
    """Two would let whoever deposited them tell nodes apart, by policy or by trial decryption."""
    batch = live.deploy()
    second_key = KeyPair.generate().public.hex()
    for lie in ({"policies": (((1, 1), (1, 1)),)}, {"analyzer_key": second_key}):
        answer = deposit(live, batch, **lie)
        assert (answer.status_code, slug(answer)) == (409, "descriptor-conflict")
    assert live.batch(batch.id).signed == batch.signed


def test_silent_reports_are_those_that_the_guarantee_was_made_for(live: Network) -> None:
    """Up to gamma the promise holds without them. Beyond, silence cannot be seen: it is stated."""
    batch = live.deploy()
    live.fill(batch, [*honest(batch, 18), silent(batch), silent(batch)])
    spend = live.settled(batch)["spend"]
    assert (spend["failed"], spend["dishonest_reports"]) == (0, 2)
    d = batch.context.descriptor
    at_gamma = account(batch_event(d, GAMMA), d.guarantee.beta)
    half = account(batch_event(d, 0.5), d.guarantee.beta)
    assert spend["epsilon_upper"] == pytest.approx(at_gamma.epsilon_upper)
    assert at_gamma.epsilon_upper <= EPSILON < half.epsilon_lower


def test_an_owner_is_no_more_than_their_share_of_sybils(live: Network) -> None:
    batch = live.deploy()
    path, body = f"/batches/{batch.id}/leases", {"users": live.users(N)}
    found = live.ask("shuffler", "POST", path, token=live.node, json=body)
    assert len(found["leases"]) == round(GAMMA * N)
    assert {one["problem"] for one in found["refused"]} == {"share-exceeded"}


@pytest.mark.parametrize(("liars", "state"), [(2, "counted"), (3, "rejected")])
def test_messages_that_do_not_open(liars: int, state: str, live: Network) -> None:
    """Within gamma they cost nothing; past it the weaker guarantee is recorded, no count used."""
    batch = live.deploy()
    live.fill(batch, [*honest(batch, N - liars), *[broken(batch)] * liars])
    found = live.settled(batch)
    spend = found["spend"]
    assert found["state"] == state
    assert (spend["failed"], spend["dishonest_reports"]) == (liars * spend["messages"] // N, liars)
    assert spend["used"] == (found["counts"] is not None) == (state == "counted")
    assert (float(spend["epsilon_upper"]) <= EPSILON) == (state == "counted")


@pytest.mark.parametrize("liars", [2, 3])
def test_the_shufflers_operator_sees_whose_messages_do_not_open(liars: int, live: Network) -> None:
    """By node, whether or not the counts are used; nothing at the coordinator names a node."""
    known = {one["node_id"] for one in live.ask("shuffler", "GET", "/nodes")["nodes"]}
    batch = live.deploy()
    live.fill(batch, [*honest(batch, N - liars), *[broken(batch)] * liars])
    assert live.settled(batch)["spend"]["dishonest_reports"] == liars
    nodes = live.until(
        lambda: live.ask("shuffler", "GET", "/nodes")["nodes"],
        lambda nodes: any(one["failed_messages"] for one in nodes if one["node_id"] not in known),
    )
    nodes = [one for one in nodes if one["node_id"] not in known]
    # Two reports a node, and those that do not open came last.
    L = batch.context.descriptor.padding.messages
    expected = [(liars - 2) * L, 2 * L] if liars > 2 else [2 * L]
    failed = [(one["failed_messages"], one["failed_batches"]) for one in nodes]
    assert sorted(failed) == [(0, 0)] * (len(nodes) - len(expected)) + [(m, 1) for m in expected]
    assert live.call("shuffler", "GET", "/nodes", COORDINATOR_TOKEN).status_code == 401
    run = f"/runs/{batch.context.descriptor.run_id}"
    for path in ("", "/deployments/0", "/history", "/conservation", "/ledger"):
        text = live.call("coordinator", "GET", run + path).text
        assert not any(one["node_id"] in text for one in nodes)


@pytest.mark.parametrize(("liars", "suspicious"), [(0, False), (6, True)])
def test_a_batch_of_lies_is_marked(liars: int, suspicious: bool, live: Network) -> None:
    """The mark is in ledger, result, events and metrics; the counts are used all the same."""
    batch = live.deploy(episodes=LARGE)
    live.fill(batch, [*honest(batch, LARGE - liars), *(loud(batch) for _ in range(liars))])
    found = live.settled(batch)
    run = f"/runs/{batch.context.descriptor.run_id}"
    assert (found["state"], found["spend"]["suspicious"]) == ("counted", suspicious)
    assert live.ask("coordinator", "GET", f"{run}/result")["suspicious_batches"] == int(suspicious)
    history = live.ask("coordinator", "GET", f"{run}/history")["events"]
    (counted,) = (one["data"] for one in history if one["kind"] == "batch_counted")
    assert counted["suspicious"] == suspicious
    metrics = httpx.get(
        f"{live.coordinator}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
    ).text
    assert ("riffle_coordinator_suspicious_batches 0.0" in metrics) != suspicious


@pytest.mark.parametrize("trust", ["central", "local"])
def test_a_downgrade_of_the_trust_model_gets_no_report(trust: str, live: Network) -> None:
    run = live.run(trust=trust)
    body = {"policy": [[0, 1], [1, 0]], "episodes": N}
    live.ask("coordinator", "POST", f"/runs/{run}/deployments", json=body)
    ended = live.until(
        lambda: live.ask("coordinator", "GET", f"/runs/{run}"), lambda run: run["state"] == "failed"
    )
    assert "trust" in ended["message"]
    missing = live.call("shuffler", "GET", f"/batches/{batch_id(run, 0)}", live.node)
    assert missing.status_code == 404


def test_leases_that_are_never_used_delay_a_batch_by_their_life(live: Network) -> None:
    batch = live.deploy()
    for _ in range(10):  # ten owners hold every slot
        live.leases(batch, live.users(N // 10), live.enrol())
    live.clock.ahead += LEASE_SECONDS + 1
    try:
        live.fill(batch, honest(batch, N))
    finally:
        live.clock.ahead = 0.0
    assert live.settled(batch)["state"] == "counted"


def test_a_report_of_another_batch_is_worth_nothing(live: Network) -> None:
    """Its outer seal is bound to its batch, and so is every message inside."""
    first, batch = live.deploy(), live.deploy()
    (lease,) = live.leases(batch, live.users(1))
    assert live.upload(batch, [lease], honest(first, 1)) == ["wrong-key"]
    d, keys = first.context.descriptor, first.keys
    dummies = np.full(d.padding.messages, d.layout.dummy)
    inner = seal_indices(keys.analyzer_key, keys.message_info, dummies, d.layout.width, 1)
    again = seal(batch.keys.batch_key, batch.keys.report_info, inner)
    assert live.upload(batch, [lease], [again]) == ["accepted"]
    live.fill(batch, honest(batch, N - 1))
    assert live.settled(batch)["spend"]["failed"] == d.padding.messages


def test_a_replayed_report_counts_once(live: Network) -> None:
    batch = live.deploy()
    reports = honest(batch, 2)
    leases = live.leases(batch, live.users(2))
    assert live.upload(batch, leases, reports) == ["accepted"] * 2
    assert live.upload(batch, leases, reports) == ["replayed"] * 2
    assert live.upload(batch, leases, honest(batch, 2)) == ["already-reported"] * 2
    assert live.ask("shuffler", "GET", f"/batches/{batch.id}/status")["reports"] == 2


# -- bodies -------------------------------------------------------------------------------------


def raw(live: Network, data: bytes) -> socket.socket:
    address = httpx.URL(live.shuffler)
    connection = socket.create_connection((address.host, address.port or 0), timeout=10)
    connection.sendall(data)
    return connection


def head(live: Network, batch: Batch, size: int) -> bytes:
    return (
        f"POST /v1/batches/{batch.id}/reports HTTP/1.1\r\nHost: shuffler\r\n"
        f"Authorization: Bearer {live.node}\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


def test_a_body_too_large_is_refused_before_it_is_all_there(live: Network) -> None:
    batch = live.deploy()
    with raw(live, head(live, batch, 1 << 40)) as connection:
        answer = b""
        while b"too-large" not in answer:
            with suppress(OSError):  # what was answered can be read all the same
                connection.sendall(bytes(1 << 16))
            connection.settimeout(0.05)
            try:
                part = connection.recv(1 << 16)
            except TimeoutError:
                continue
            assert part, answer
            answer += part
    assert b" 413 " in answer.splitlines()[0]


def test_a_body_that_drips_is_given_up(live: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BODY_SECONDS", 0.5)
    batch = live.deploy()
    began = time.monotonic()
    with raw(live, head(live, batch, 1_000)) as connection:
        for _ in range(80):  # 8 seconds of a body that always goes on
            connection.sendall(b"a")
            if select.select([connection], [], [], 0.1)[0]:
                break
        else:
            pytest.fail("each byte gave the body more time")
        answer = connection.recv(1 << 16)
    assert b" 408 " in answer.splitlines()[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2] or "{}").get("status", 408) == 408
    assert 0.4 < time.monotonic() - began < 9
    assert live.ask("shuffler", "GET", f"/batches/{batch.id}/status")["dropped"] == {}
