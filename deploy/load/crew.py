"""The generator's processes as one: started, told to begin, watched, ended."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from riffle.common.errors import LocalError
from riffle.deploy.load.tally import Tally, merged
from riffle.deploy.load.worker import Share, Worker, start
from riffle.deploy.processes import Usage, busy_by_core, noted_signals, read_usage

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
        with noted_signals() as noted:
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
