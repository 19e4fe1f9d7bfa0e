"""Progress of long commands: a bar on a terminal, lines off it, nothing on stdout."""

import io
import itertools
import json
import queue
import re
from pathlib import Path

import pytest
from rich.console import Console

from riffle.deploy import output
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.output import steps
from tests.deploy.cli.calls import riffle

SIMULATED = {
    "sdp-pe": ("--episodes", "300", "--horizon", "2"),
    "ucbvi": ("--episodes", "100", "--horizon", "2"),
    "uob-lbps": ("--episodes", "60", "--param", "widths=1-2-1"),
}


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_LINE_SECONDS", "LINE_SECONDS"):
        monkeypatch.setattr(output, name, 0.0)
    monkeypatch.setattr(output, "SILENT_SECONDS", 3600.0)  # only steps, however long they take


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    monkeypatch.setattr(output, "progress", Console(file=screen, force_terminal=True, width=100))
    return screen


def test_steps_print_a_line_now_and_then_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    with steps("seeds", 10, clock=lambda: now) as shown:
        for _ in range(10):
            now += 2.0
            shown.step()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "seeds: 1 of 10",
        "seeds: 4 of 10, about 12 s left",
        "seeds: 7 of 10, about 6 s left",
        "seeds: 10 of 10",
    ]


def test_time_left_leaves_out_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes compile for 90 s; each then takes 5 s a seed."""
    now = 0.0
    with steps("seeds", 40, clock=lambda: now) as shown:
        for moment in (95.0, 95.1, *(100.0 + 5 * (i // 2) for i in range(38))):
            now = moment
            shown.step()
    lines = capsys.readouterr().err.splitlines()
    left = {
        int(n): int(s) for n, s in re.findall(r": (\d+) of 40, about (\d+) s", "\n".join(lines))
    }
    assert min(left) > 5
    for done, seconds in left.items():
        assert seconds == pytest.approx(2.5 * (40 - done), rel=0.35)


def test_long_step_prints_lines_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SILENT_SECONDS", 0.01)
    lines: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(output, "line", lines.put)
    times = itertools.chain([100.0, 100.5], itertools.repeat(107.0))
    with steps("seeds", 2, clock=lambda: next(times)) as shown:
        assert lines.get(timeout=60) == "seeds: 0 of 2 after 7 s"
        shown.step()
    assert lines.empty(), "the next line is due five seconds later"


def test_total_may_be_known_late(every_step: None, capsys: pytest.CaptureFixture[str]) -> None:
    with steps("runs") as shown:
        shown.step()
        shown.set_total(2)
        shown.step()
    assert capsys.readouterr().err.splitlines() == ["runs: 1", "runs: 2 of 2"]


def test_terminal_has_a_bar_and_no_lines(every_step: None, terminal: io.StringIO) -> None:
    with steps("seeds", 2) as shown:
        shown.step()
    assert "1/2" in terminal.getvalue()
    assert "of 2" not in terminal.getvalue()


@pytest.mark.parametrize("learner", SIMULATED)
def test_simulate_prints_its_progress(learner: str, every_step: None) -> None:
    words = ("--seeds", "2", "--workers", "1", "--format", "json")
    result = riffle("simulate", "--learner", learner, *SIMULATED[learner], *words)
    assert json.loads(result.stdout)["seeds"] == 2
    *announced, first, last = result.stderr.splitlines()
    assert (first, last) == ("seeds: 1 of 2", "seeds: 2 of 2")
    compiled = f"compiling {learner}, unless an earlier run did; this takes a while"
    assert announced == ([] if learner == "sdp-pe" else [compiled])


@pytest.mark.parametrize("learner", SIMULATED)
def test_simulate_has_a_bar_on_a_terminal(learner: str, terminal: io.StringIO) -> None:
    words = ("--seeds", "2", "--workers", "1", "--format", "json")
    result = riffle("simulate", "--learner", learner, *SIMULATED[learner], *words)
    assert json.loads(result.stdout)["seeds"] == 2
    assert "2/2" in terminal.getvalue()


def test_figures_print_their_progress(every_step: None, tmp_path: Path) -> None:
    words = ("sweep", "adversarial-full", "--quick", "--seeds", "1", "--workers", "1")
    result = riffle(*words, "--out", str(tmp_path), "--format", "json")
    json.loads(result.stdout)
    first, *printed = result.stderr.splitlines()
    total = int(first.removeprefix("runs to compute: "))
    assert printed[-1] == f"runs: {total} of {total}"
    assert len(printed) == total


def test_loopback_network_prints_that_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LoopbackNetwork(LoopbackConfig(tmp_path, "RiverSwim-v0", nodes=0, workers=1)):
        printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "starting the network\n")


@pytest.mark.parametrize(("encoding", "batches"), [("riffle", 300), ("one-envelope", 300)])
def test_audit_prints_its_progress(encoding: str, batches: int, every_step: None) -> None:
    words = ("--trials", "100", "--sealed", "0", "--users", "0", "--format", "json")
    result = riffle("audit", "--encoding", encoding, *words)
    json.loads(result.stdout)
    first, *printed = result.stderr.splitlines()
    assert first == f"attacking {encoding}, 100 batches a side"
    assert len(printed) == batches
    assert printed[-1] == f"batches: {batches} of {batches}"
