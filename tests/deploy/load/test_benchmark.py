"""The throughput benchmark: its arithmetic, and a small run on live services."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from riffle.coordinator.batches.issue import calibrated
from riffle.deploy.load import benchmark
from riffle.deploy.load.benchmark import (
    Primitive,
    Split,
    batch_for,
    disturbance,
    measure_primitive,
    missed_bars,
    run_benchmark,
    summarize,
)
from riffle.deploy.network.processes import Usage
from riffle.experiments.presets import preset, riverswim_run

US = 1e-6
MEETING_SECONDS = 60.0


def test_time_is_split_by_purpose() -> None:
    used = {
        "node": Usage(1.0, main=1, threads=2, pool=50),
        "shuffler": Usage(1.0, main=3, threads=7),
        "coordinator": Usage(1.0, main=4, threads=5, pool=40),
    }
    assert Split.of(used, 6.0) == Split(crypto=96, http=8, store=1, episodes=2, coordinator=5)


def test_rates_are_those_of_one_batch() -> None:
    split = Split(crypto=1.35, http=0.25, store=0.15, episodes=0.1, coordinator=0.02)
    row = {"n": 100, "messages": 100, "timings": {"waiting": 0.5}}
    before, after = Primitive(80 * US, 50 * US, 14e3), Primitive(0, 30 * US, 16e3)
    result = summarize(row, 0.8, split, 0.1, (before, after), 2)
    assert result["messages_a_second"] == 12_500
    assert result["share_of_primitive"] == pytest.approx(12_500 / 15_000)
    assert result["share_by_core_time"] == pytest.approx(80 * US * 10_000 / 1.87)
    # 0.25 less the nodes' 0.1 in the event loops, 0.15 and 0.02: over 10,000 messages
    assert result["server_us_a_message"] == pytest.approx(32.0)
    assert missed_bars(result) == [
        "share_of_primitive 0.833 < 0.85",
        "server_us_a_message 32.0 > 1.5",
    ]
    good = {"share_of_primitive": 0.85, "server_us_a_message": 1.5}
    assert missed_bars(good) == []
    assert "before and 16,000 after" in str(disturbance(result))
    assert disturbance(result | {"primitive_before": 14_600}) is None


@pytest.mark.parametrize("messages", [100_000, 300_000])
def test_the_batch_is_the_smallest_with_enough_messages(messages: int) -> None:
    """With a dishonest fraction, n L grows in steps only."""
    spec = preset("riverswim").spec.model_copy(update={"dishonest_fraction": 0.0})
    n = batch_for(spec, messages)
    assert n * calibrated(spec, n, None).padding.messages >= messages
    assert (n - 1) * calibrated(spec, n - 1, None).padding.messages < messages


def work_when_all_began(folder: Path, jobs: int, work: Callable[[Any], Any], job: Any) -> Any:
    """Does the work once every job was begun by its own process; ``folder`` has their names."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + MEETING_SECONDS
    while len(list(folder.iterdir())) < jobs:
        assert time.monotonic() < deadline, "one process did the work of several"
        time.sleep(0.01)
    return work(job)


def test_the_primitive_is_measured_on_every_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    class Meeting(ProcessPoolExecutor):
        def map(self, fn: Callable[[Any], Any], *jobs: Iterable[Any], **_: Any) -> Iterator[Any]:
            (listed,) = map(list, jobs)
            folders.append(tmp_path / str(len(folders)))
            folders[-1].mkdir()
            return super().map(partial(work_when_all_began, folders[-1], len(listed), fn), listed)

    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", Meeting)
    monkeypatch.setattr(benchmark, "PRIMITIVE_SECONDS", 0.6)
    result = measure_primitive(2, 2)
    warm, measured = ({file.name for file in folder.iterdir()} for folder in folders)
    assert warm == measured
    assert len(measured) == 2
    assert str(os.getpid()) not in measured
    assert 10 * US < result.open < 2_000 * US
    assert result.seal > result.open
    assert (
        0 < result.rate < 4 / (result.seal + result.open)
    )  # two processes, of which one may be slow


def test_one_process_uses_at_most_one_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark, "PRIMITIVE_SECONDS", 0.2)
    result = measure_primitive(2, 1)
    assert 0 < result.rate <= 1.01 / (result.seal + result.open)


@pytest.mark.long
def test_a_small_run_reports_where_the_time_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "PRIMITIVE_SECONDS", 0.3)
    monkeypatch.setattr(benchmark, "WARM_EPISODES", 300)
    result = run_benchmark(
        1_000, tmp_path, 1, riverswim_run("wire", horizon=2, episodes=1, epsilon=4.0)
    )
    assert result["messages"] == result["reports"] * result["messages_a_report"] >= 1_000
    assert result["share_of_primitive"] > 0  # rates of two moments: no bar for a test
    assert result["share_by_core_time"] > 0
    assert set(result["wall_seconds"]) >= {"waiting", "fetching", "opening", "planning"}
    assert min(result["core_us_a_message"].values()) >= 0
