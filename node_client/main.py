"""Runs the nodes of one process until SIGTERM or SIGINT."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

from riffle.common.process.tracing import export_spans
from riffle.common.protocol.verification import read_pins
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.pipeline import Pipeline, Seal, Totals
from riffle.node_client.runner import NodeState, OnStart, Runner
from riffle.node_client.sealing import SealingPool
from riffle.node_client.settings import Settings
from riffle.node_client.shuffler_client import Backoff, ShufflerClient, open_client
from riffle.node_client.trust import Demands
from riffle.node_client.users import Users

# One chunk is being encoded, one waits, one is being sealed, and one is being uploaded.
CHUNKS_ON_THEIR_WAY = 4
WORKERS_A_CHUNK = 8


def run(settings: Settings, *, on_start: OnStart = None) -> Totals:
    """Serves until a signal, then delivers the reports in progress; returns counts of reports.

    Calls ``on_start`` when all files are read and the shuffler has answered. Raises a LocalError
    that names the setting, file or credential that is not usable.
    """
    with export_spans("node"):
        return asyncio.run(_run_until_signal(settings, on_start))


async def serve(
    settings: Settings, stop: asyncio.Event, totals: Totals, on_start: OnStart = None
) -> None:
    """Serves until ``stop`` is set; counts reports in ``totals``. Raises the errors of `run`."""
    environment = settings.make_environment()
    with SealingPool(settings.workers) as pool:
        demands = settings.demands(environment)
        async with open_nodes(settings, demands, environment, pool.seal, totals) as runner:
            runner.on_start = on_start
            await runner.run(stop)


@asynccontextmanager
async def open_nodes(
    settings: Settings,
    demands: Demands,
    environment: Environment | None,
    seal: Seal,
    totals: Totals,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Runner]:
    """Yields a `Runner` whose record of users and HTTP client are open. Raises as `run` does."""
    users = Users(settings.state_dir, settings.users(), settings.users_key, settings.ledger())
    chunks = CHUNKS_ON_THEIR_WAY + settings.workers // WORKERS_A_CHUNK
    with closing(users):
        async with open_client(settings.shuffler_url, settings.ca_file) as client:
            pipeline = Pipeline(
                environment=environment,
                seal=seal,
                shuffler=ShufflerClient(client, Backoff(clock=clock)),
                users=users,
                totals=totals,
                capacity=asyncio.Semaphore(chunks),
                test_entry=settings.test_entry and settings.loopback,
                episode_share=settings.episode_share,
                clock=clock,
            )
            yield Runner(
                nodes=deque(NodeState(credential) for credential in settings.credentials()),
                demands=demands,
                pipeline=pipeline,
                users_a_request=settings.users_a_request,
                users_file=settings.users_file,
                read_users=settings.users,
                pins=lambda: read_pins(settings.analyzer_keys_file),
            )


async def _run_until_signal(settings: Settings, on_start: OnStart) -> Totals:
    stop, totals = asyncio.Event(), Totals()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop, totals, on_start)
    return totals
