"""Operating-system helpers for commands and networks: folder locks, signals, probes, resource use.

A service is its process and the pools that it started. Resource use is read from /proc (Linux).
"""

import fcntl
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from riffle.common.process.endpoint import server_verification
from riffle.common.protocol.errors import LocalError

LOCK = ".lock"
PROC = Path("/proc")
PROBE_SECONDS = 5.0
NANO = 1e-9
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ALL_THREADS = 2  # CPUCLOCK_SCHED: the processor time of all threads of a process
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def make_folder(folder: Path) -> Path:
    """Makes a folder if it is missing, and returns it.

    Raises LocalError ``wrong-state`` if a file has the name of this folder or of a parent folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        paths = (folder, *folder.parents)
        file = next((path for path in paths if os.path.lexists(path) and not path.is_dir()), folder)
        raise LocalError(
            "wrong-state",
            f"{file} is a file where a folder is needed; move it away, or choose another folder",
        ) from None
    return folder


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Locks ``folder`` against all other commands; makes the folder if it is missing.

    Yields the lock's file descriptor. The lock ends with the last process that inherits it. Raises
    LocalError ``unavailable`` if the folder is in use, and the errors of `make_folder`.
    """
    lock = make_folder(folder) / LOCK
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LocalError(
                "unavailable",
                f"{folder} is in use: a network is up in it, or another command writes there"
                f"{_holders(lock)}; stop it, or choose another --out",
            ) from None
        yield file.fileno()


def is_locked(folder: Path) -> bool:
    """Returns whether a process holds the lock of ``folder``. Makes no file and changes none."""
    try:
        with (folder / LOCK).open("rb") as file:  # shared: callers do not exclude each other
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never locked, or not readable for us
        return False
    return False


def _holders(lock: Path) -> str:
    """Names the visible processes that hold a lock, such as a network left by a killed command."""
    pids = set()
    for descriptor in PROC.glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if descriptor.samefile(lock):
                pids.add(int(descriptor.parts[2]))
    numbers = ", ".join(map(str, sorted(pids - {os.getpid()})))
    return f" (processes {numbers})" if numbers else ""


def probe(url: str, ca_file: Path | None = None) -> httpx.Response:
    """Returns the answer to a GET of ``url``, sent without a token.

    A certificate is verified against ``ca_file`` or, without it, the system's authorities. Raises
    httpx.HTTPError if nothing answers, LocalError if ``url`` is not an address.
    """
    with httpx.Client(
        verify=server_verification(ca_file), trust_env=False, timeout=PROBE_SECONDS
    ) as client:
        try:
            return client.get(url)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            detail = f"{url!r} is no address: it must be http://host:port or https://host:port"
            raise LocalError("invalid-spec", detail) from error


@contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Treats SIGTERM, SIGHUP and SIGQUIT like Ctrl-C, so that child processes are ended too.

    Signals that are ignored, as under ``nohup``, stay ignored. Use it in the main thread.
    """
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    with _handled(heeded, signal.default_int_handler):
        yield


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Records Ctrl-C (or a signal treated like Ctrl-C) instead of raising KeyboardInterrupt.

    A second signal still interrupts. Use it in the main thread.
    """
    recorded: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        if recorded:
            signal.default_int_handler(number, frame)
        recorded.append(number)

    candidates = (signal.SIGINT, *_ENDING)
    interrupts = [n for n in candidates if signal.getsignal(n) is signal.default_int_handler]
    with _handled(interrupts, record):
        yield recorded


@contextmanager
def _handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Gives signals another handler during the block."""
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in earlier.items():
            signal.signal(number, former)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delays Ctrl-C, and signals treated like Ctrl-C, until the block ends. Main thread only."""
    with record_signals() as recorded:
        yield
    if recorded:
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a service has used since its processes started, in seconds and bytes.

    ``main``, ``threads`` and ``pool`` are the processor time of the main thread (event loop), the
    other threads, and the pools. ``waited`` (all threads) and ``pool_waited`` (the pools) are
    the time spent waiting for a free processor. ``at`` is the time of the reading (monotonic).
    """

    at: float
    main: float = 0.0
    threads: float = 0.0
    pool: float = 0.0
    waited: float = 0.0
    pool_waited: float = 0.0
    rss: int = 0

    def since(self, before: "Usage") -> "Usage":
        """Returns the use between two readings, with the current memory."""
        names = ("at", "main", "threads", "pool", "waited", "pool_waited")
        times = {name: max(0.0, getattr(self, name) - getattr(before, name)) for name in names}
        return Usage(**times, rss=self.rss)

    @property
    def own(self) -> float:
        """The processor seconds of the service's process, without its worker pools."""
        return self.main + self.threads

    @property
    def total(self) -> float:
        """The processor seconds of the process and its pool."""
        return self.own + self.pool

    @property
    def demand(self) -> float:
        """The processors that the process would have used if no other process had competed.

        A Python process's threads use at most one processor, except while they release the GIL.
        """
        return (self.own + self.waited) / self.at if self.at > 0 else 0.0

    @property
    def pool_demand(self) -> float:
        """The `demand` of all processes of the pool together."""
        return (self.pool + self.pool_waited) / self.at if self.at > 0 else 0.0


def read_usage(pids: Iterable[int]) -> dict[int, Usage]:
    """Returns the use of each process with its descendants; omits processes that have ended."""
    children = _children()
    usage: dict[int, Usage] = {}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):  # the process ended meanwhile
            usage[pid] = _usage(pid, children)
    return usage


def busy_by_core() -> dict[int, tuple[float, float]]:
    """Returns, by core, (seconds busy, seconds in all) since the machine started."""
    times = {}
    for line in (PROC / "stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(value) * _TICK for value in values[:8]]  # user time includes guest time
            idle = ticks[3] + ticks[4]
            times[int(name[3:])] = (sum(ticks) - idle, sum(ticks))
    return times


def _usage(pid: int, children: dict[int, list[int]]) -> Usage:
    main = NANO * int((PROC / f"{pid}/task/{pid}/schedstat").read_text().split()[0])
    pool = list(_descendants(pid, children))
    return Usage(
        at=time.monotonic(),
        main=main,
        threads=max(0.0, _seconds(PROC / str(pid)) - main),
        pool=sum(_read_or_zero(_seconds, process) for process in pool),
        waited=_waited(PROC / str(pid)),
        pool_waited=sum(_read_or_zero(_waited, process) for process in pool),
        rss=sum(int(_read_or_zero(_rss, process)) for process in (PROC / str(pid), *pool)),
    )


def _read_or_zero(read: Callable[[Path], float], process: Path) -> float:
    """Returns ``read(process)``, or zero if the process has ended."""
    try:
        return read(process)
    except (OSError, ValueError, IndexError):
        return 0.0


def _descendants(pid: int, children: dict[int, list[int]]) -> Iterator[Path]:
    for child in children.get(pid, ()):
        yield PROC / str(child)
        yield from _descendants(child, children)


def _seconds(process: Path) -> float:
    """Returns user and system time of a process, including threads that have ended.

    Reads the process's clock (clock_getcpuclockid(3)): /proc has only hundredths of a second.
    """
    return time.clock_gettime((~int(process.name) << 3) | _ALL_THREADS)


def _waited(process: Path) -> float:
    """Returns the seconds that a process's threads waited for a processor."""
    tasks = (process / "task").iterdir()
    return NANO * sum(int((task / "schedstat").read_text().split()[1]) for task in tasks)


def _rss(process: Path) -> float:
    return float(int((process / "statm").read_text().split()[1]) * _PAGE)


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children[parent].append(int(folder.name))
    return children
