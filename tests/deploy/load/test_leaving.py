"""An interrupted or terminated load test leaves no process and no run behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from riffle.deploy.load import generator
from riffle.deploy.load.feed import Feeder, manual_spec
from riffle.deploy.load.generator import Assignment, Generator, GeneratorProcess
from riffle.deploy.load.run import LoadConfig, loopback_target
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import lock_folder
from riffle.deploy.operator import Operator
from riffle.deploy.output import Exit
from riffle.experiments.presets import preset

pytestmark = pytest.mark.long


def process(double: object) -> GeneratorProcess:
    """A generator's process whose process and pipe are both ``double``."""
    return GeneratorProcess(cast("Any", double), cast("Any", double))


class Interrupted:
    """A process and its pipe, which stays silent until Ctrl-C."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.joined = False

    def poll(self, _: float) -> bool:
        raise KeyboardInterrupt

    def send(self, message: object) -> None:
        self.sent.append(message)

    def join(self, _: float | None = None) -> None:
        self.joined = True

    def is_alive(self) -> bool:
        return not self.joined


def test_started_processes_are_stopped_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Interrupted(), Interrupted()]
    started = iter([process(member) for member in members])
    monkeypatch.setattr(generator, "start_process", lambda _: next(started))
    with pytest.raises(KeyboardInterrupt), Generator(cast("list[Assignment]", [None, None])):
        pass
    assert [(member.sent, member.joined) for member in members] == [([None], True)] * 2


class Ending:
    """A process that ends just as Ctrl-C is typed, and its pipe."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.polls = 0

    def poll(self, _: float) -> bool:
        self.polls += 1
        if self.polls > 1:
            os.kill(os.getpid(), signal.SIGINT)
        return True

    def recv(self) -> bool:
        if self.polls > 1:
            raise EOFError
        return True

    def send(self, _: object) -> None:
        pass

    def join(self, _: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


def test_an_interrupt_in_the_last_moment_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = process(Ending())
    monkeypatch.setattr(generator, "start_process", lambda _: ending)
    with Generator(cast("list[Assignment]", [None])) as load:
        samples, interrupted = load.watch(600, {}, lambda *_: None)
    assert interrupted
    assert len(samples) == 2


def test_an_interrupt_ends_the_settling() -> None:
    feeder = Feeder(lambda: cast("Operator", None), manual_spec(preset("demo").spec), 100)
    feeder.settle(600, [signal.SIGINT])  # asks nobody, and returns


@pytest.mark.parametrize("again", [False, True])
def test_a_second_signal_ends_a_network_at_once(again: bool, tmp_path: Path) -> None:
    """A service that does not stop is killed after a while, or at the second signal."""

    class Deaf:
        killed = waited = False

        def poll(self) -> int | None:
            return -9 if self.killed else None

        def terminate(self) -> None:
            pass

        def wait(self, seconds: float | None = None) -> int:
            if self.killed:
                return -9
            if again:
                raise KeyboardInterrupt
            raise subprocess.TimeoutExpired("deaf", seconds or 0)

        def kill(self) -> None:
            self.killed = True

    network = LoopbackNetwork(LoopbackConfig(tmp_path, "RiverSwim-v0", {}, nodes=0))
    deaf = [Deaf(), Deaf()]
    network.processes = cast("Any", dict(zip(("shuffler", "coordinator"), deaf, strict=True)))
    with pytest.raises(KeyboardInterrupt) if again else contextlib.nullcontext():
        network.stop()
    assert [one.killed for one in deaf] == [True, True]


def test_created_runs_are_stopped_when_the_next_fails() -> None:
    class Half:
        """An operator whose second run is never created."""

        stopped: list[str] = []  # noqa: RUF012 -- of all that are connected

        def __enter__(self) -> "Half":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def create_run(self, spec: Any) -> dict[str, str]:
            if spec.name == "load-2":
                raise KeyboardInterrupt
            return {"id": "one"}

        def stop(self, run_id: str) -> None:
            self.stopped.append(run_id)

    feeder = Feeder(lambda: cast("Operator", Half()), manual_spec(preset("demo").spec), 100)
    with pytest.raises(KeyboardInterrupt), feeder:
        pass
    assert Half.stopped == ["one"]


def test_runs_of_a_killed_load_are_stopped(tmp_path: Path) -> None:
    config = LoadConfig(tmp_path, nodes=1, rate=1, seconds=1, workers=1)
    with lock_folder(tmp_path) as lock:
        with loopback_target(config, lock) as target, target.operator() as operator:
            left = operator.create_run(manual_spec(preset("riverswim").spec))["id"]
        with loopback_target(config, lock) as target, target.operator() as operator:
            assert [(run["id"], run["state"]) for run in operator.runs()] == [(left, "stopped")]


def test_an_interrupt_at_a_terminal_ends_the_load_not_the_summary(tmp_path: Path) -> None:
    """A terminal interrupts its whole foreground group: the network must outlive the load."""
    arguments = ["load", "--nodes", "2", "--rate", "5", "--duration", "60", "--out", str(tmp_path)]
    program = [sys.executable, "-m", "riffle.deploy.cli.main", *arguments]
    pipe, nobody = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(program, stdout=nobody, stderr=pipe, start_new_session=True) as load:
        assert load.stderr is not None
        assert any(b"loading for 60 s" in line for line in load.stderr)
        time.sleep(3)  # in the middle of the load; without a terminal nothing more is printed
        os.killpg(load.pid, signal.SIGINT)
        load.stderr.read()
    with lock_folder(tmp_path):
        assert load.returncode == Exit.INTERRUPTED
    assert "it was interrupted" in (tmp_path / "load.html").read_text()


@pytest.mark.parametrize("phase", ["2 nodes", "loading for 60 s"])
def test_a_termination_ends_the_network_too(phase: str, tmp_path: Path) -> None:
    """The network's processes hold the lock of its folder until the last of them ends."""
    arguments = ["load", "--nodes", "2", "--rate", "1", "--duration", "60", "--out", str(tmp_path)]
    program = [sys.executable, "-m", "riffle.deploy.cli.main", *arguments]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as load:
        assert load.stderr is not None
        assert any(phase in line.decode() for line in load.stderr)
        load.terminate()
        load.stderr.read()
    with lock_folder(tmp_path):
        assert load.returncode == Exit.INTERRUPTED
