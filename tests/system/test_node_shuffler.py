"""Nodes and the shuffler over HTTP on loopback, with sealing processes: one batch, counted.

The batch is seeded through the test entry, so the counts an analyzer gets from the network must be
those of the per-user path without network, to the last message.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.descriptor import BatchDescriptor, SignedDescriptor, parse, serialize
from riffle.common.protocol.hpke import open_histogram
from riffle.common.protocol.signatures import sign_deposit
from riffle.node_client.environments.registry import make
from riffle.node_client.episode import slot_report
from riffle.node_client.main import serve
from riffle.node_client.pipeline import Totals
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.app import create_app
from riffle.shuffler.settings import Settings as ShufflerSettings
from tests.node_client import world

EXPIRES = int(time.time()) + 3_600
NODES = 5
COORDINATOR_TOKEN, OPERATOR_TOKEN = "c" * 43, "o" * 43


def shuffler_settings(folder: Path, **changes: Any) -> ShufflerSettings:
    (folder / "shuffler.key").write_text(world.SHUFFLER.hex())
    fixed: dict[str, Any] = {
        "data_dir": folder / "shuffler",
        "shuffler_id": "shuffler-1",
        "signing_key_file": folder / "shuffler.key",
        "coordinator_key": world.public(world.COORDINATOR).hex(),
        "coordinator_token_hash": hash_token(COORDINATOR_TOKEN),
        "operator_token_hash": hash_token(OPERATOR_TOKEN),
        "max_epsilon": 5.0,
        "max_beta": 1e-2,
        "min_dishonest_fraction": 0.1,
        "test_entry": True,
    }
    return ShufflerSettings(**(fixed | changes))


@contextmanager
def running(settings: ShufflerSettings, port: int = 0) -> Iterator[httpx.Client]:
    """The shuffler under uvicorn in a thread; a client of it."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        config = uvicorn.Config(
            create_app(settings),
            log_level="critical",
            timeout_graceful_shutdown=1,  # a node's long poll would hold it for 20 seconds
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=40) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def call(client: httpx.Client, method: str, path: str, token: str, **rest: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} | rest.pop("headers", {})
    answer = client.request(method, f"/v1{path}", headers=headers, **rest)
    assert answer.is_success, answer.text
    return answer


def node_settings(folder: Path, client: httpx.Client, **changes: Any) -> NodeSettings:
    credentials = [
        call(
            client,
            "POST",
            "/nodes",
            OPERATOR_TOKEN,
            json={"name": f"node-{i}", "owner": f"owner-{i}", "users": 1000},
        )
        for i in range(NODES)
    ]
    file = folder / "credentials.json"
    file.write_text(json.dumps([answer.json() for answer in credentials]))
    fixed: dict[str, Any] = {
        "shuffler_url": str(client.base_url),
        "shuffler_id": "shuffler-1",
        "shuffler_key": world.public(world.SHUFFLER).hex(),
        "coordinator_key": world.public(world.COORDINATOR).hex(),
        "credentials_file": file,
        "state_dir": folder / "state",
        "simulated_users": True,
        "states": 4,
        "horizon": 2,
        "max_epsilon": 5.0,
        "max_beta": 1e-2,
        "min_dishonest_fraction": 0.1,
        "workers": 1,
        "users_a_request": 4,
        "test_entry": True,
    }
    return NodeSettings(**(fixed | changes))


def deposit(client: httpx.Client, **changes: Any) -> SignedDescriptor:
    data = serialize(world.descriptor(**{"expires_at": EXPIRES} | changes))
    batch = parse(data).descriptor.batch_id
    headers = {"Riffle-Signature": sign_deposit(world.COORDINATOR, data)}
    path = f"/batches/{batch}"
    answer = call(client, "PUT", path, COORDINATOR_TOKEN, content=data, headers=headers)
    return SignedDescriptor.model_validate_json(answer.content)


def sealed(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """Wait for a batch; its status."""
    path, deadline = f"/batches/{batch_id}/status?wait=30&state=sealed", time.monotonic() + 120
    while True:
        found: dict[str, Any] = call(client, "GET", path, OPERATOR_TOKEN).json()
        if found["state"] == "sealed":
            return found
        assert time.monotonic() < deadline


async def serve_until(settings: NodeSettings, client: httpx.Client, batches: list[str]) -> Totals:
    stop, totals = asyncio.Event(), Totals()
    nodes = asyncio.create_task(serve(settings, stop, totals))
    try:
        for batch_id in batches:
            await asyncio.to_thread(sealed, client, batch_id)
    finally:
        stop.set()
        await nodes
    return totals


def test_counts_over_the_network_are_those_of_the_per_user_path(tmp_path: Path) -> None:
    with running(shuffler_settings(tmp_path)) as client:
        settings = node_settings(tmp_path, client)
        signed = [deposit(client, deployment=i, test_seed=5) for i in range(2)]
        contexts = [parse(s.descriptor.encode()) for s in signed]
        ids = [context.descriptor.batch_id for context in contexts]
        totals = asyncio.run(serve_until(settings, client, ids))
        assert (totals.episodes, totals.accepted) == (2 * world.N, 2 * world.N)
        assert totals.refused == {}
        for context in contexts:
            d = context.descriptor
            path = f"/batches/{d.batch_id}/messages"
            body = call(client, "GET", path, COORDINATOR_TOKEN).content
            histogram, failed = open_histogram(
                world.ANALYZER.private,
                context.message_info,
                body,
                d.layout.width,
                d.layout.counters,
            )
            assert failed == []
            assert np.array_equal(histogram, expected_counts(d))


def expected_counts(plan: BatchDescriptor) -> Any:
    environment = make("RiverSwim-v0", states=4, horizon=2)
    rows = [slot_report(plan, environment, slot, test_entry=True)[1] for slot in range(plan.n)]
    return np.bincount(np.concatenate(rows), minlength=plan.layout.counters + 1)


def test_nodes_wait_for_a_shuffler_that_comes_back(tmp_path: Path) -> None:
    with running(shuffler_settings(tmp_path)) as client:
        settings = node_settings(tmp_path, client)
    port = client.base_url.port or 0

    async def go() -> Totals:
        stop, totals = asyncio.Event(), Totals()
        nodes = asyncio.create_task(serve(settings, stop, totals))
        await asyncio.sleep(0.5)
        try:
            await asyncio.to_thread(second_life)
        finally:
            stop.set()
            await nodes
        return totals

    def second_life() -> None:
        with running(shuffler_settings(tmp_path), port) as again:
            context = parse(deposit(again).descriptor.encode())
            assert sealed(again, context.descriptor.batch_id)["reports"] == world.N

    assert asyncio.run(go()).accepted == world.N


@pytest.mark.parametrize("demand", [{"max_epsilon": 2.0}, {"test_entry": False}])
def test_a_batch_that_the_nodes_owner_refuses_stays_empty(
    demand: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "riffle.node"),
        running(shuffler_settings(tmp_path)) as client,
    ):
        settings = node_settings(tmp_path, client, **demand)
        signed = deposit(client, test_seed=5)
        batch_id = parse(signed.descriptor.encode()).descriptor.batch_id

        async def go() -> Totals:
            stop, totals = asyncio.Event(), Totals()
            nodes = asyncio.create_task(serve(settings, stop, totals))
            while "batch-refused" not in caplog.text and not nodes.done():
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # nor does anything come later
            stop.set()
            await nodes
            return totals

        assert asyncio.run(go()) == Totals()
        found = call(client, "GET", f"/batches/{batch_id}/status", OPERATOR_TOKEN).json()
        assert (found["episodes"], found["reports"]) == (0, 0)
