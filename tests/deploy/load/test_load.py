"""``riffle load`` on its own network: every report is a real one, and the summary is written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from riffle.deploy.cli.main import build
from riffle.deploy.load.html_page import certainty
from riffle.deploy.load.run import LoadConfig, cores

pytestmark = pytest.mark.long

SHORT = ("--nodes", "2", "--rate", "1", "--duration", "5")


def command(out: Path, *arguments: str) -> list[str]:
    return ["load", "--out", str(out), "--format", "json", *arguments]


def run_load(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    words = command(out, *arguments)
    done = subprocess.run(
        [sys.executable, "-m", "riffle.deploy.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_every_due_report_is_decided_and_batches_are_counted(tmp_path: Path) -> None:
    arguments = ("--nodes", "9", "--rate", "60", "--duration", "4", "--processes", "2")
    way = ("--batch", "150", "--arrivals", "constant", "--aggregation", "sums")
    code, summary = run_load(tmp_path, *arguments, *way)
    reports, limit = summary["reports"], summary["verdict"]["limit"]
    assert code == (0 if limit == "none" else 1)
    assert reports["started"] == 240
    assert reports["accepted"] + sum(reports["rejected"].values()) == 240
    assert reports["undecided"] == 0
    assert reports["accepted"] >= 150
    counted = [batch for batch in summary["batches"] if batch["state"] == "counted"]
    assert sum(batch["reports"] for batch in counted) <= reports["accepted"]
    assert counted
    assert summary["evidence"]["filled"] >= len(counted)
    assert set(summary["processes"]) == {"shuffler", "coordinator", "generator 1", "generator 2"}
    assert not [answer for answer in reports["answers"] if not answer.endswith("429")]
    assert "<dt>Next<dd>" in (tmp_path / "load.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_an_interrupt_ends_the_load_with_its_summary(tmp_path: Path) -> None:
    out, stderr = tmp_path / "out", tmp_path / "stderr"
    arguments = command(out, "--nodes", "3", "--rate", "3", "--duration", "600", "--batch", "300")
    program = [sys.executable, "-m", "riffle.deploy.cli.main", *arguments]
    with (
        stderr.open("w") as screen,
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=screen, text=True) as process,
    ):
        deadline = time.monotonic() + 120
        while "loading for" not in stderr.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        summary = json.loads(process.stdout.read())
    assert process.returncode == 130
    assert summary["interrupted"]
    assert 0 < summary["reports"]["started"] < 100
    if summary["verdict"]["limit"] == "none":
        assert "no batch filled" in certainty(summary)
    assert summary["reports"]["undecided"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--nodes", "2", "--rate", "1", "--duration", "5", "--processes", "3"], 3, "2 nodes"),
        (["--nodes", "2", "--rate", "1e6", "--duration", "60"], 3, "more than 10000000 reports"),
        (
            ["--nodes", "2", "--rate", "1", "--duration", "5", "--service-cores", "x"],
            3,
            "processors are a list such as 0,1, not 'x'",
        ),
        (["--nodes", "0", "--rate", "1", "--duration", "5"], 2, "nodes"),
        (["--nodes", "2", "--rate", "1", "--duration", "5", "--seed", "-1"], 2, "seed"),
    ],
)
def test_an_impossible_load_is_refused(
    tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    arguments = command(tmp_path, *arguments)
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == code
    assert text in result.stderr


@pytest.mark.parametrize("option", ["--shuffler-url", "--coordinator-url"])
def test_addresses_are_refused_without_their_network(tmp_path: Path, option: str) -> None:
    arguments = command(tmp_path / "out", *SHORT, option, "http://127.0.0.1:1")
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == 2
    assert result.stderr == f"riffle: {option} is for a network that is up: give --network, too\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("--workers", "2"), ("--service-cores", "0")])
def test_options_of_an_own_network_are_refused_with_another(
    tmp_path: Path, option: str, value: str
) -> None:
    arguments = command(tmp_path / "out", *SHORT, "--network", "runs/demo/network", option, value)
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == 2
    assert result.stderr == (f"riffle: {option} is for a new network, not for that of --network\n")
    assert not list(tmp_path.iterdir())


def test_a_search_for_the_capacity_spares_a_network_that_is_up(tmp_path: Path) -> None:
    arguments = command(tmp_path / "out", *SHORT, "--find-capacity", "--network", str(tmp_path))
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == 2
    assert "--find-capacity would overload the network" in result.stderr
    assert not list(tmp_path.iterdir())


def test_earlier_results_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    arguments = command(tmp_path, "--nodes", "2", "--rate", "1", "--duration", "5")
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == 3
    assert "--force" in result.stderr


def test_processors_are_named_as_a_list() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert cores(None) == frozenset()
    assert cores(",".join(map(str, mine))) == frozenset(mine)
    with pytest.raises(ValueError, match="a list such as 0,1"):
        cores("0;1")
    with pytest.raises(ValueError, match="this machine has"):
        cores("4096")


def test_a_batch_is_a_quarter_of_all_reports_within_bounds(tmp_path: Path) -> None:
    sizes = [
        LoadConfig(tmp_path, nodes=2, rate=rate, seconds=100).reports_a_batch
        for rate in (1, 100, 10_000)
    ]
    assert sizes == [300, 2_500, 10_000]
    assert LoadConfig(tmp_path, 2, 1, 1, batch=7).reports_a_batch == 7
