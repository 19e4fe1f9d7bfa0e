"""A slow node against a live shuffler: whom it asks, and what the batch's status says.

The long variant holds a node's whole process to a share of one core, by stopping it most of the
time. RIFFLE_SLOW_NODE names that share in percent, as 8.
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import parse
from riffle.deploy.load.feed import constant_deployment, manual_spec
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator
from riffle.experiments.presets import preset
from riffle.node_client.main import serve
from riffle.node_client.pipeline import Totals
from riffle.node_client.sealing import SealingPool, SealKeys
from tests.node_client import world
from tests.system.test_node_shuffler import (
    COORDINATOR_TOKEN,
    call,
    deposit,
    node_settings,
    running,
    shuffler_settings,
)

LEASE_SECONDS = 2
PERCENT = os.environ.get("RIFFLE_SLOW_NODE")


@contextmanager
def sealing_takes(seconds: float) -> Iterator[None]:
    """Every report takes at least this long to seal, one after another."""
    seal, busy = SealingPool.seal, asyncio.Lock()

    async def slowly(pool: SealingPool, keys: SealKeys, messages: Ints) -> bytes:
        async with busy:
            await asyncio.sleep(seconds * len(messages))
            return await seal(pool, keys, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealingPool, "seal", slowly)
        yield


async def serve_until(settings: Any, client: httpx.Client, path: str, **wanted: Any) -> Totals:
    """Serves until the status that the coordinator sees has what is wanted."""
    stop, totals = asyncio.Event(), Totals()
    nodes = asyncio.create_task(serve(settings, stop, totals))
    try:
        async with asyncio.timeout(60):
            status: dict[str, Any] = {}
            while not wanted.items() <= status.items():
                await asyncio.sleep(0.1)
                answer = await asyncio.to_thread(call, client, "GET", path, COORDINATOR_TOKEN)
                status = answer.json()
    finally:
        stop.set()
        await nodes
    return totals


def served(folder: Path, seconds: float, **wanted: Any) -> Totals:
    with running(shuffler_settings(folder, lease_seconds=LEASE_SECONDS)) as client:
        signed = deposit(client)
        path = f"/batches/{parse(signed.descriptor.encode()).descriptor.batch_id}/status"
        settings = node_settings(folder, client)
        with sealing_takes(seconds):
            return asyncio.run(serve_until(settings, client, path, **wanted))


def test_a_slow_node_fills_a_batch_and_asks_nobody_in_vain(tmp_path: Path) -> None:
    totals = served(tmp_path, 0.1, state="sealed")
    assert totals.accepted == world.N
    assert totals.episodes <= 1.05 * world.N


def test_a_node_that_is_too_slow_asks_nobody_and_the_status_says_so(tmp_path: Path) -> None:
    totals = served(tmp_path, 0.9 * LEASE_SECONDS, state="open", declined=["too-slow"])
    assert totals == Totals()


@contextmanager
def held_to(percent: float, group: int) -> Iterator[None]:
    """Lets a process group run for this part of the time only."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            os.killpg(group, signal.SIGSTOP)
            over.wait(0.001 * (100 - percent))
            os.killpg(group, signal.SIGCONT)
            over.wait(0.001 * percent)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(PERCENT is None, reason="minutes; RIFFLE_SLOW_NODE=8 runs it")
def test_a_node_with_a_share_of_a_core_asks_hardly_anybody_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPAWN_WORKERS", "1")  # so that they are in the node's process group
    chosen, n = preset("demo"), 600
    config = LoopbackConfig(tmp_path, chosen.spec.environment, chosen.environment, nodes=1)
    with (
        LoopbackNetwork(config) as network,
        Operator.of(network.secrets, network.coordinator_url) as operator,
        held_to(float(PERCENT or 0), network.processes["node"].pid),
    ):
        spec = manual_spec(chosen.spec)
        run = operator.create_run(spec)["id"]
        operator.deploy(run, constant_deployment(spec, n))
        assert any(event["kind"] == "batch_counted" for event in operator.events(run))
    lines = (tmp_path / "logs" / "node.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"uploaded"' in line]
    assert sum(event["accepted"] for event in events) == n
    assert sum(event["reports"] for event in events) <= 1.05 * n
