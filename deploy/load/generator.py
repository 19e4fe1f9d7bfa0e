"""When reports arrive: an open loop. Pure.

Times are fixed before the first request. A generator that waits for an answer before it asks again
omits, while the server stalls, just the requests that would have waited (coordinated omission);
here every report is due at its time, and its latency counts from there.

A process of the generator: an event loop with its share of the nodes, and a sealing process.

It says when it is ready, begins when it is told, sends its tally twice a second and once more when
it is done. It ends with whoever started it, and leaves Ctrl-C to it.

The generator's processes as one: started, told to begin, watched, ended.
"""

import asyncio
import contextlib
import os
import signal
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import uvloop

from riffle.common.process.endpoint import server_verification
from riffle.common.process.workers import SPAWN
from riffle.common.protocol.errors import LocalError
from riffle.deploy.load.fleet import Fleet, members
from riffle.deploy.load.tally import Tally, merged
from riffle.deploy.network.processes import Usage, busy_by_core, read_usage, record_signals
from riffle.node_client.sealing import SealingPool
from riffle.node_client.settings import Credential, Settings

Arrivals = Literal["poisson", "constant"]
Times = npt.NDArray[np.float64]


def schedule(kind: Arrivals, rate: float, seconds: float, rng: np.random.Generator) -> Times:
    """Seconds from the start at which reports are due, ascending, all below ``seconds``.

    ``constant``: every 1/rate. ``poisson``: independent exponential gaps of mean 1/rate, as of many
    people who do not know of each other.
    """
    if kind == "constant":
        return np.arange(int(np.ceil(rate * seconds)), dtype=np.float64) / rate
    # Enough gaps for all but one schedule in 10^15: the mean and eight deviations.
    mean = rate * seconds
    times = np.cumsum(rng.exponential(1 / rate, int(mean + 8 * np.sqrt(mean) + 8)))
    return times[times < seconds]


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
    verify = server_verification(settings.ca_file)
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


START_SECONDS = 120.0
HEAD_START = 0.5
GRACE_SECONDS = 45.0
"""How long after the last arrival reports may still end; longer than a node's patience."""

LEAVE_SECONDS = 10.0
MOST_SAMPLES = 600


@dataclass(frozen=True, slots=True)
class Sample:
    """The load at one moment, seconds after its start; use by name of role or ``generator i``."""

    at: float
    tally: Tally
    use: dict[str, Usage]
    cores: dict[int, tuple[float, float]] = field(default_factory=dict)


class Crew:
    """Processes that generate load. Use as a context manager; they leave with it.

    Raises:
        LocalError: ``unavailable``: one of them does not start.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = shares
        self.processes: list[Worker] = []
        self._tallies = [Tally() for _ in shares]
        self._done: set[int] = set()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def _start(self) -> None:
        for share in self._shares:
            self.processes.append(start(share))
        deadline = time.monotonic() + START_SECONDS
        for worker in self.processes:
            try:
                ready = worker.pipe.poll(max(0.0, deadline - time.monotonic()))
                ready = ready and worker.pipe.recv() is True
            except EOFError:
                ready = False
            if not ready:
                raise LocalError("unavailable", "a process of the generator did not start")

    def __exit__(self, *_: object) -> None:
        self.end()

    def watch(
        self, seconds: float, pids: dict[str, int], show: Callable[[Sample, Sample], None]
    ) -> tuple[list[Sample], bool]:
        """Begin, and look every now and then until all is decided; whether it was interrupted.

        ``show`` gets the newest sample and the one before it.
        """
        begin = time.monotonic() + HEAD_START
        pids = pids | {
            f"generator {i + 1}": w.process.pid or 0 for i, w in enumerate(self.processes)
        }
        samples = [self._sample(begin, pids)]
        for worker in self.processes:
            worker.pipe.send(begin)
        pause, told = max(1.0, seconds / MOST_SAMPLES), False
        with record_signals() as noted:
            while len(self._done) < len(self.processes) and not self._overdue(begin, seconds):
                if noted and not told:
                    told = True
                    self._stop()
                self._listen(pause, noted)
                samples.append(self._sample(begin, pids))
                show(samples[-1], samples[-2])
            return samples, bool(noted)

    def end(self) -> None:
        """End every process, politely first."""
        self._stop()
        deadline = time.monotonic() + LEAVE_SECONDS
        for worker in self.processes:
            worker.process.join(max(0.1, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _overdue(self, begin: float, seconds: float) -> bool:
        return time.monotonic() > begin + seconds + GRACE_SECONDS

    def _listen(self, pause: float, noted: list[int]) -> None:
        """Take what the processes say for so many seconds, or until a signal is noted."""
        until, before = time.monotonic() + pause, len(noted)
        while (left := until - time.monotonic()) > 0 and len(self._done) < len(self.processes):
            if len(noted) > before:
                return
            for i, worker in enumerate(self.processes):
                if i not in self._done and worker.pipe.poll(min(left, 0.05)):
                    self._take(i, worker)

    def _take(self, i: int, worker: Worker) -> None:
        try:
            said = worker.pipe.recv()
        except (EOFError, OSError):
            self._done.add(i)
            return
        if isinstance(said, Tally):
            self._tallies[i] = said
        elif said is None:  # all is decided; its answer ends the thread that listens there
            worker.pipe.send(None)

    def _stop(self) -> None:
        for i, worker in enumerate(self.processes):
            if i not in self._done:
                try:
                    worker.pipe.send(None)
                except (OSError, ValueError):
                    self._done.add(i)

    def _sample(self, begin: float, pids: dict[str, int]) -> Sample:
        found = read_usage(pids.values())
        use = {name: found[pid] for name, pid in pids.items() if pid in found}
        return Sample(time.monotonic() - begin, merged(self._tallies), use, busy_by_core())
