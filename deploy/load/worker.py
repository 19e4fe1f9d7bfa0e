"""A process of the generator: an event loop with its share of the nodes, and a sealing process.

It says when it is ready, begins when it is told, sends its tally twice a second and once more when
it is done. It ends with whoever started it, and leaves Ctrl-C to it.
"""

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import uvloop

from riffle.common.endpoint import trusted
from riffle.common.workers import SPAWN
from riffle.deploy.load.fleet import Fleet, members
from riffle.deploy.load.schedule import Times
from riffle.deploy.load.tally import Tally
from riffle.node_client.sealing import SealingPool
from riffle.node_client.settings import Credential, Settings

TOLD_SECONDS = 0.5
SEALERS = 1


@dataclass(frozen=True, slots=True)
class Share:
    """What one process does: nodes, times in seconds from the start, processors it may use."""

    settings: Settings
    credentials: Sequence[Credential]
    times: Times
    cores: frozenset[int]
    presealed: bool


@dataclass(frozen=True, slots=True)
class Worker:
    """A process and the way to speak with it."""

    process: BaseProcess
    pipe: "Connection[object, object]"


def start(share: Share) -> Worker:
    """Start a process; it answers True when it is ready and then waits for the starting time."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_work, args=(share, theirs), daemon=False)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _work(share: Share, pipe: "Connection[object, object]") -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # of a terminal: the parent's
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, share.cores)
    tally = Tally()
    with contextlib.suppress(EOFError, OSError), SealingPool(SEALERS) as pool:
        uvloop.run(_serve(share, pool, pipe, tally))
        pipe.send(tally)
    pipe.close()


async def _serve(
    share: Share, pool: SealingPool, pipe: "Connection[object, object]", tally: Tally
) -> None:
    settings = share.settings
    environment = settings.make_environment()
    verify = trusted(settings.ca_file)
    context = verify if isinstance(verify, ssl.SSLContext) else ssl.create_default_context()
    fleet = Fleet(
        nodes=members(share.credentials, settings.shuffler_url, context, tally),
        demands=settings.demands(environment),
        environment=environment,
        seal=pool.seal,
        tally=tally,
        presealed=share.presealed,
    )
    pipe.send(True)
    begin = await asyncio.to_thread(pipe.recv)
    if not isinstance(begin, float):  # told to leave before it began
        await fleet.close()
        return
    stop = asyncio.Event()
    listening = asyncio.create_task(_listen(pipe, stop))
    telling = asyncio.create_task(_tell(pipe, tally))
    try:
        await fleet.run([begin + float(when) for when in share.times], stop)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        pipe.send(None)  # answered, which ends the thread that listens
        await listening
        await fleet.close()


async def _listen(pipe: "Connection[object, object]", stop: asyncio.Event) -> None:
    """Whatever is said, or that nobody is there any more, means stop."""
    with contextlib.suppress(EOFError, OSError):
        await asyncio.to_thread(pipe.recv)
    stop.set()


async def _tell(pipe: "Connection[object, object]", tally: Tally) -> None:
    while True:
        await asyncio.sleep(TOLD_SECONDS)
        pipe.send(tally)
