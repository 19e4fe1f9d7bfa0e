"""One GET without a token: does a service answer, and what?

Proxy variables of the environment are ignored, here and by every client of Riffle's: a request goes
where the caller pointed it, and a bearer token to nobody else.

What processes use, read from /proc: processor time, waiting for a processor, memory.

A service is its process with the pools it started. Of the process itself the main thread, which
runs the event loop, is told from its other threads (store, checks, planning), and from the pool
(cryptography), so that a service's time can be split without a word from the service.

A thread that is always running or waiting for a processor is saturated, however many others share
its processor: `Usage.demand` counts both, in processors. Linux only.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from riffle.common.process.endpoint import trusted
from riffle.common.protocol.errors import LocalError

SECONDS = 5.0


def get(url: str, ca_file: Path | None = None) -> httpx.Response:
    """The answer to GET ``url``; https is checked against ``ca_file`` or the system's authorities.

    Raises:
        httpx.HTTPError: nothing answers.
        LocalError: ``invalid-spec``, it is no address.
    """
    with httpx.Client(verify=trusted(ca_file), trust_env=False, timeout=SECONDS) as client:
        try:
            return client.get(url)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            detail = f"{url!r} is no address: it must be http://host:port or https://host:port"
            raise LocalError("invalid-spec", detail) from error


PROC = Path("/proc")
NANO = 1e-9
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ALL_THREADS = 2
"""Of a process's clocks, the one of the processor time of all its threads (CPUCLOCK_SCHED)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One role's use since its processes started; seconds and bytes.

    ``waited`` is time a thread of the process could have run and no processor was free, and
    ``pool_waited`` the same of its pool.
    """

    at: float
    main: float = 0.0
    threads: float = 0.0
    pool: float = 0.0
    waited: float = 0.0
    pool_waited: float = 0.0
    rss: int = 0

    def since(self, before: "Usage") -> "Usage":
        """Use between two readings; memory as it is now."""
        return Usage(
            self.at - before.at,
            self.main - before.main,
            max(0.0, self.threads - before.threads),
            max(0.0, self.pool - before.pool),
            max(0.0, self.waited - before.waited),
            max(0.0, self.pool_waited - before.pool_waited),
            self.rss,
        )

    @property
    def own(self) -> float:
        """Processor seconds of the process without its pool."""
        return self.main + self.threads

    @property
    def total(self) -> float:
        """Processor seconds of all."""
        return self.own + self.pool

    @property
    def demand(self) -> float:
        """Of an interval: processors that the process would have used, had it had them to itself.

        One is the most that an interpreter's threads reach, but for what they do without its lock.
        """
        return (self.own + self.waited) / self.at if self.at > 0 else 0.0

    @property
    def pool_demand(self) -> float:
        """The same of the pool, all its processes together."""
        return (self.pool + self.pool_waited) / self.at if self.at > 0 else 0.0


def read_usage(pids: Iterable[int]) -> dict[int, Usage]:
    """Use of each of these processes with its descendants; without those that have ended."""
    children = _children()
    found: dict[int, Usage] = {}
    for pid in pids:
        try:
            found[pid] = _usage(pid, children)
        except (OSError, ValueError, IndexError):  # it ended while it was read
            continue
    return found


def busy_by_core() -> dict[int, tuple[float, float]]:
    """Core -> seconds it was busy, and seconds in all, since the machine started."""
    found = {}
    for line in (PROC / "stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(value) * _TICK for value in values[:8]]  # guests are in user already
            idle = ticks[3] + ticks[4]
            found[int(name[3:])] = (sum(ticks) - idle, sum(ticks))
    return found


def _usage(pid: int, children: dict[int, list[int]]) -> Usage:
    main = _main_seconds(pid)
    pool = list(_descendants(pid, children))
    return Usage(
        at=time.monotonic(),
        main=main,
        threads=max(0.0, _seconds(PROC / str(pid)) - main),
        pool=sum(_quiet(_seconds, one) for one in pool),
        waited=_waited(PROC / str(pid)),
        pool_waited=sum(_quiet(_waited, one) for one in pool),
        rss=sum(int(_quiet(_rss, one)) for one in (PROC / str(pid), *pool)),
    )


def _quiet(read: Callable[[Path], float], folder: Path) -> float:
    """What is read, or nothing of a process that has ended."""
    try:
        return read(folder)
    except (OSError, ValueError, IndexError):
        return 0.0


def _descendants(pid: int, children: dict[int, list[int]]) -> Iterator[Path]:
    for child in children.get(pid, ()):
        yield PROC / str(child)
        yield from _descendants(child, children)


def _seconds(process: Path) -> float:
    """User and system time of a process, its threads that have ended among them.

    By its clock as clock_getcpuclockid(3) names it, which shows nanoseconds where /proc shows
    hundredths of a second.
    """
    return time.clock_gettime((~int(process.name) << 3) | _ALL_THREADS)


def _main_seconds(pid: int) -> float:
    """User and system time of a process's main thread."""
    return NANO * int((PROC / f"{pid}/task/{pid}/schedstat").read_text().split()[0])


def _waited(folder: Path) -> float:
    """Seconds that threads waited for a processor."""
    return NANO * sum(
        int((task / "schedstat").read_text().split()[1]) for task in (folder / "task").iterdir()
    )


def _rss(folder: Path) -> float:
    return float(int((folder / "statm").read_text().split()[1]) * _PAGE)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            found[parent].append(int(folder.name))
    return found


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Treat what ends a program as Ctrl-C, so that what it started is ended too.

    That is SIGTERM, and at a terminal its end and Ctrl-\\. What is ignored, as under ``nohup``,
    stays so. For main threads.
    """
    ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in ends}
    before = {number: how for number, how in before.items() if how is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Note Ctrl-C, or what is treated as such, where it must not fall between two lines.

    The second one interrupts all the same. For main threads.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    interrupts = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is signal.default_int_handler
    ]
    for number in interrupts:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number in interrupts:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def held_signals() -> Iterator[None]:
    """Let Ctrl-C, or what is treated as such, wait until the block is over. For main threads."""
    with noted_signals() as noted:
        yield
    if noted:
        raise KeyboardInterrupt
