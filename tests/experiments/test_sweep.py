"""Jobs are stored as they end, continue after an interruption, and agree on every backend."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.experiments import sweep as sweep_module
from riffle.experiments.figures.catalogue import figures
from riffle.experiments.figures.write import Order, make
from riffle.experiments.research import grid
from riffle.experiments.sweep import Backend, Row, Rows, code_digest, compute, execute, sweep
from tests.experiments.figures.worlds import HERE, LINE, run_of, small_figure

JOBS = [(run, seed) for run in small_figure().runs for seed in range(2)]
ROOT = Path(__file__).parents[2]
DESK = f"{ROOT}/examples/own_environment.py:make"


def ignore(_: object) -> None:
    return None


class Interrupted(Exception):  # noqa: N818
    pass


def interrupt_after(count: int, done: list[Row] | None = None) -> Callable[[Row], None]:
    """Returns what raises Interrupted at the last of so many rows."""
    seen = [] if done is None else done

    def interrupt(row: Row) -> None:
        seen.append(row)
        if len(seen) == count:
            raise Interrupted

    return interrupt


def results(file: Path) -> dict[tuple[str, int], tuple[float, ...]]:
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    return {(d["key"], d["seed"]): _curve(d["result"]) for d in documents}


def _curve(result: dict[str, list[float]] | None) -> tuple[float, ...]:
    return () if result is None else tuple(result["cumulative"])


@pytest.mark.long
def test_every_catalogued_learner_can_be_computed() -> None:
    smallest = {run.learner: run for figure in figures(quick=True).values() for run in figure.runs}
    assert len(smallest) == 9
    small = {"uc-o-reps": "adversarial-full", "uob-lbps": "adversarial-bandit"}
    small["uniform"] = "adversarial-full"
    for learner, run in smallest.items():
        known = figures(quick=True)[small.get(str(learner), "fig7")].runs
        done = compute(next(r for r in known if r.learner == run.learner), 0)
        assert len(done.episodes) == len(done.cumulative) > 0
        assert done.constants
        assert (done.policy_switches is None) == (learner in small)


def test_a_refused_run_becomes_a_row_with_its_reason() -> None:
    row = execute("key", (run_of(LINE["SDP-PE, papers' noise"]), 0))
    assert row.reason is not None
    assert "messages" in row.reason
    assert row.result is None


def test_a_rerun_continues_where_it_stopped(tmp_path: Path) -> None:
    done: list[Row] = []
    file = tmp_path / "rows.jsonl"
    with pytest.raises(Interrupted):
        sweep(JOBS, Rows(file), HERE, interrupt_after(3, done))
    with file.open("a") as stream:
        stream.write('{"key": "cut sho')
    again: list[Row] = []
    sweep(JOBS, Rows(file), HERE, again.append)
    assert len(again) == len(JOBS) - 3
    assert not {row.identity for row in done} & {row.identity for row in again}
    whole = tmp_path / "whole.jsonl"
    sweep(JOBS, Rows(whole), HERE, ignore)
    assert results(file) == results(whole)


def test_rows_of_other_code_are_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    sweep(JOBS[:1], rows, HERE, ignore)
    monkeypatch.setattr(sweep_module, "code_digest", lambda: "other")
    with pytest.raises(LocalError, match="--force"):
        sweep(JOBS[:1], rows, HERE, ignore)
    sweep(JOBS[1:1], rows, HERE, ignore)  # not asked for: not in the way


def test_a_worker_with_other_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "code_digest", lambda: "other")
    worker = Row("key", 0, "its own")
    monkeypatch.setattr(sweep_module, "run_jobs", lambda *_, **__: iter([worker]))
    with pytest.raises(LocalError, match="a worker has other code"):
        sweep(JOBS, Rows(tmp_path / "rows.jsonl"), HERE, ignore)


def test_the_digest_names_code_not_this_machine() -> None:
    assert len(code_digest()) == 16
    assert code_digest() == code_digest()


def test_the_error_names_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(LocalError, match=r"needs dask: pip install 'riffle-rl\[experiments\]'"):
        sweep(JOBS, Rows(), Backend(1, "tcp://127.0.0.1:1"), ignore)
    monkeypatch.setitem(sys.modules, "riffle.coordinator.learning.ucbvi", None)
    monkeypatch.delattr("riffle.coordinator.learning.ucbvi", raising=False)
    with pytest.raises(LocalError, match=r"install riffle-rl\[experiments\]"):
        execute("key", (run_of(LINE["UCBVI, not private"]), 0))


def test_an_unreachable_scheduler_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "PATIENCE", 0.2)
    nobody = Backend(1, "tcp://127.0.0.1:1")
    with pytest.raises(LocalError, match="no Dask scheduler answers"):
        sweep(JOBS, Rows(tmp_path / "rows.jsonl"), nobody, ignore)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A real Dask cluster, as an operator starts it: a scheduler and two workers, processes."""
    address = tmp_path / "scheduler.json"
    scheduler = [
        sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port",
        "0", "--no-dashboard", "--scheduler-file", str(address),
    ]  # fmt: skip
    worker = [
        sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(address),
        "--nthreads", "1", "--no-dashboard", "--no-nanny",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "dask.log").open("w") as log:
        started = [
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
            for command in (scheduler, worker, worker)
        ]
        try:
            yield _address(address)
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(60)


def _address(file: Path) -> str:
    import time

    for _ in range(900):
        if file.exists() and file.read_text().strip():
            return str(json.loads(file.read_text())["address"])
        time.sleep(0.1)
    raise AssertionError("the Dask scheduler did not start")


@pytest.mark.long
def test_a_sweep_interrupted_twice_and_resumed_on_a_cluster_gives_the_same_files(
    tmp_path: Path, cluster: str
) -> None:
    learners = ["pe", "ucbvi-shuffle", f"{ROOT}/examples/own_learner.py:ExploreThenCommit"]
    river = ("RiverSwim-v0", {"horizon": 3})
    figure = grid({"river": river, "desk": DESK}, learners, [1.0, 4.0], 400, "shuffle")
    whole = Order((figure,), range(2), tmp_path / "whole", HERE)
    make(whole, ignore, ignore)
    parts = replace(whole, folder=tmp_path / "parts")
    for _ in range(2):
        with pytest.raises(Interrupted):
            make(parts, interrupt_after(4), ignore)
    left: list[int] = []
    (manifest,) = make(replace(parts, backend=Backend(1, cluster)), ignore, left.append)
    assert (left, manifest["backend"]["address"]) == ([20 - 8], cluster)
    for ending in (".csv", "-seeds.csv", ".md", ".svg", ".png"):
        one, other = (folder / f"sweep{ending}" for folder in (whole.folder, parts.folder))
        assert one.read_bytes() == other.read_bytes(), ending
