"""Many nodes of one process against a shuffler in memory."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.registry import make
from riffle.node_client.pipeline import Pipeline, Totals
from riffle.node_client.runner import NodeState, Runner
from riffle.node_client.sealing import SealKeys, seal_reports
from riffle.node_client.settings import Credential
from riffle.node_client.shuffler_client import Backoff, ShufflerClient
from riffle.node_client.users import Users
from tests.node_client import world
from tests.node_client.fake_shuffler import FakeShuffler

QUICK = Backoff(base=0.001, cap=0.01, attempts=4, clock=lambda: world.NOW)


class Failing:
    """An environment that raises at every step."""

    sizes = world.SIZES
    reward_range = (0.0, 1.0)
    absorbing = None

    def reset(self, randomness: Any) -> int:
        return 0

    def step(self, action: int, randomness: Any) -> tuple[int, float, bool]:
        raise RuntimeError("SECRET-OF-A-USER")


def node_ids(count: int) -> list[str]:
    return [f"{i:032x}" for i in range(count)]


def shuffler(nodes: int = 4, **settings: Any) -> FakeShuffler:
    return FakeShuffler({f"token-{name}": name for name in node_ids(nodes)}, **settings)


async def in_thread(keys: SealKeys, messages: Ints) -> bytes:
    return await asyncio.to_thread(seal_reports, keys, messages)


def read_users(file: Path | None) -> dict[str, list[str]]:
    try:
        users: dict[str, list[str]] = json.loads(file.read_text() if file else "{}")
    except ValueError:
        raise LocalError("invalid-spec", "no list of users") from None
    return users


async def serve(
    fake: FakeShuffler,
    state: Path,
    *,
    nodes: int = 4,
    until: Callable[[], bool] | None = None,
    environment: Any = None,
    people: dict[str, list[str]] | None = None,
    file: Path | None = None,
    seal: Any = in_thread,
    clock: Callable[[], float] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    pins: Callable[[], frozenset[str] | None] = lambda: None,
    users: Users | None = None,
    totals: Totals | None = None,
    pause: float = 0.01,
    **changes: Any,
) -> tuple[Totals, Runner]:
    """Run nodes until every batch is full, or ``until`` holds."""
    totals, stop = totals or Totals(), asyncio.Event()
    users = users or Users(state, read_users(file) if file else people)
    demands = world.demands(**changes)
    client = ShufflerClient(fake.client(), QUICK)
    pipeline = Pipeline(
        environment=environment or make("RiverSwim-v0", states=4, horizon=2),
        seal=seal,
        shuffler=client,
        users=users,
        totals=totals,
        capacity=asyncio.Semaphore(3),
        test_entry=demands.test_entry,
        clock=clock or fake.clock,
        monotonic=monotonic,
    )
    credentials = [Credential(node_id=name, token=f"token-{name}") for name in node_ids(nodes)]
    runner = Runner(
        nodes=deque(map(NodeState, credentials)),
        demands=demands,
        pipeline=pipeline,
        users_a_request=8,
        users_file=file,
        read_users=lambda: read_users(file),
        pins=pins,
        pause=pause,
    )

    async def watch() -> None:
        while not (until or fake.full)():
            await asyncio.sleep(0.01)
        stop.set()

    watcher = asyncio.create_task(watch())
    try:
        async with asyncio.timeout(30):
            await runner.run(stop)
    finally:
        watcher.cancel()
        users.close()
        await client.http.aclose()
    return totals, runner
