"""The processes that generate load: their schedule of reports, and measurements during the load.

Arrivals are an open loop (docs/load.md). A generator that waited for answers would send too few
requests during a stall, and so hide the stall (coordinated omission).

A process says when it is ready, begins on command, and sends its tally twice a second and once more
at the end. It ends when its parent ends.
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
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import uvloop

from riffle.common.process.endpoint import server_verification
from riffle.common.process.workers import SPAWN
from riffle.common.protocol.errors import LocalError
from riffle.deploy.load.fleet import Fleet, Tally, load_node, merge
from riffle.deploy.network.processes import Usage, busy_by_core, read_usage, record_signals
from riffle.node_client.sealing import SealingPool
from riffle.node_client.settings import Credential, Settings

Arrivals = Literal["poisson", "constant"]
Times = npt.NDArray[np.float64]
Pipe: TypeAlias = "Connection[object, object]"

TALLY_SECONDS = 0.5
SEALERS = 1
START_SECONDS = 120.0
HEAD_START = 0.5
GRACE_SECONDS = 45.0  # after the last arrival; more than a node's patience
LEAVE_SECONDS = 10.0
MOST_SAMPLES = 600


def schedule(kind: Arrivals, rate: float, seconds: float, rng: np.random.Generator) -> Times:
    """Returns the times at which reports are due: ascending, in seconds, all below ``seconds``.

    ``constant``: a report every 1/rate seconds. ``poisson``: independent exponential gaps of mean
    1/rate, as between reports of many independent people.
    """
    if kind == "constant":
        return np.arange(int(np.ceil(rate * seconds)), dtype=np.float64) / rate
    # Enough gaps for all but one schedule in 10^15: the mean number plus eight standard deviations.
    mean = rate * seconds
    times = np.cumsum(rng.exponential(1 / rate, int(mean + 8 * np.sqrt(mean) + 8)))
    return times[times < seconds]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One process's nodes, its report times (seconds from the start), and its processors."""

    settings: Settings
    credentials: Sequence[Credential]
    times: Times
    cores: frozenset[int]


@dataclass(frozen=True, slots=True)
class GeneratorProcess:
    """A process of the generator and the pipe to it."""

    process: BaseProcess
    pipe: Pipe


def start_process(assignment: Assignment) -> GeneratorProcess:
    """Starts a process, which sends True when it is ready and then waits for the starting time."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_generate, args=(assignment, theirs), daemon=False)
    process.start()
    theirs.close()
    return GeneratorProcess(process, ours)


def _generate(assignment: Assignment, pipe: Pipe) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the parent handles these
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, assignment.cores)
    tally = Tally()
    with contextlib.suppress(EOFError, OSError), SealingPool(SEALERS) as pool:
        uvloop.run(_run_fleet(assignment, pool, pipe, tally))
        pipe.send(tally)
    pipe.close()


async def _run_fleet(assignment: Assignment, pool: SealingPool, pipe: Pipe, tally: Tally) -> None:
    settings = assignment.settings
    environment = settings.make_environment()
    verify = server_verification(settings.ca_file)
    context = verify if isinstance(verify, ssl.SSLContext) else ssl.create_default_context()
    fleet = Fleet(
        nodes=[
            load_node(credential.token, settings.shuffler_url, context, tally)
            for credential in assignment.credentials
        ],
        demands=settings.demands(environment),
        environment=environment,
        seal=pool.seal,
        tally=tally,
    )
    await fleet.warm_up()
    pipe.send(True)
    begin = await asyncio.to_thread(pipe.recv)
    if not isinstance(begin, float):  # told to end before it began
        await fleet.close()
        return
    stop = asyncio.Event()
    listening = asyncio.create_task(_wait_for_stop(pipe, stop))
    sending = asyncio.create_task(_send_tallies(pipe, tally))
    try:
        await fleet.run([begin + float(when) for when in assignment.times], stop)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        pipe.send(None)  # the parent answers, which ends the listening thread
        await listening
        await fleet.close()


async def _wait_for_stop(pipe: Pipe, stop: asyncio.Event) -> None:
    """Sets ``stop`` at any message, or when the parent ends."""
    with contextlib.suppress(EOFError, OSError):
        await asyncio.to_thread(pipe.recv)
    stop.set()


async def _send_tallies(pipe: Pipe, tally: Tally) -> None:
    while True:
        await asyncio.sleep(TALLY_SECONDS)
        pipe.send(tally)


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements ``at`` seconds after the load began. ``use`` has each role and ``generator i``.
    ``cores`` has for each processor the seconds in which it was busy, and the total seconds."""

    at: float
    tally: Tally
    use: dict[str, Usage]
    cores: dict[int, tuple[float, float]] = field(default_factory=dict)


class Generator:
    """All processes that generate load. Use as a context manager: they end with the context.

    Raises LocalError ``unavailable`` if a process does not start.
    """

    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self._assignments = assignments
        self.processes: list[GeneratorProcess] = []
        self._tallies = [Tally() for _ in assignments]
        self._done: set[int] = set()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self.end)
            self._start()
            stack.pop_all()
        return self

    def _start(self) -> None:
        for assignment in self._assignments:
            self.processes.append(start_process(assignment))
        deadline = time.monotonic() + START_SECONDS
        for member in self.processes:
            try:
                ready = member.pipe.poll(max(0.0, deadline - time.monotonic()))
                ready = ready and member.pipe.recv() is True
            except EOFError:
                ready = False
            if not ready:
                raise LocalError("unavailable", "a process of the generator did not start")

    def __exit__(self, *_: object) -> None:
        self.end()

    def watch(
        self, seconds: float, pids: dict[str, int], show: Callable[[Sample, Sample], None]
    ) -> tuple[list[Sample], bool]:
        """Begins the load and samples it until all reports are decided.

        ``show`` gets each sample and the previous one. Returns the samples, and whether a signal
        interrupted the load.
        """
        begin = time.monotonic() + HEAD_START
        pids = pids | {
            f"generator {i + 1}": member.process.pid or 0 for i, member in enumerate(self.processes)
        }
        samples = [self._sample(begin, pids)]
        for member in self.processes:
            member.pipe.send(begin)
        pause, stopped = max(1.0, seconds / MOST_SAMPLES), False
        deadline = begin + seconds + GRACE_SECONDS
        with record_signals() as signals:
            while len(self._done) < len(self.processes) and time.monotonic() <= deadline:
                if signals and not stopped:
                    stopped = True
                    self._stop()
                self._receive(pause, signals)
                samples.append(self._sample(begin, pids))
                show(samples[-1], samples[-2])
            return samples, bool(signals)

    def end(self) -> None:
        """Ends every process: asks it to stop, and kills it if it does not stop."""
        self._stop()
        deadline = time.monotonic() + LEAVE_SECONDS
        for member in self.processes:
            member.process.join(max(0.1, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()

    def _receive(self, pause: float, signals: list[int]) -> None:
        """Receives messages from the processes for ``pause`` seconds, or until the next signal."""
        until, known = time.monotonic() + pause, len(signals)
        while (left := until - time.monotonic()) > 0 and len(self._done) < len(self.processes):
            if len(signals) > known:
                return
            for i, member in enumerate(self.processes):
                if i not in self._done and member.pipe.poll(min(left, 0.05)):
                    self._receive_one(i, member.pipe)

    def _receive_one(self, i: int, pipe: Pipe) -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            self._done.add(i)
            return
        if isinstance(message, Tally):
            self._tallies[i] = message
        elif message is None:  # all reports are decided; the answer ends the listening thread
            pipe.send(None)

    def _stop(self) -> None:
        for i, member in enumerate(self.processes):
            if i not in self._done:
                try:
                    member.pipe.send(None)
                except (OSError, ValueError):
                    self._done.add(i)

    def _sample(self, begin: float, pids: dict[str, int]) -> Sample:
        usage = read_usage(pids.values())
        use = {name: usage[pid] for name, pid in pids.items() if pid in usage}
        return Sample(time.monotonic() - begin, merge(self._tallies), use, busy_by_core())
