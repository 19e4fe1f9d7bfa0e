"""The benchmark of the page still measures what it says. Nothing here has to be fast."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from benchmarks.bench_page import FIRST, SHOWN, Load, measure


def test_the_benchmark_watches_contents_frames_and_tasks(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(runs=2, deployments=30, growing=0.5, after=0.1)
    looks = measure(browser, load, tmp_path / "store")
    assert len(looks) == 3
    for name, found in looks.items():
        assert found.paint > 0
        assert len(found.frames) > 1
        assert all(found.frames > 0)
        assert found.cpu[0][0] >= found.cpu[-1][0] > 0
        found.report(name)
    listed, run, _ = looks.values()
    assert set(listed.marks) == {FIRST[0]}
    assert set(run.marks) == {FIRST[1], "value chart"}
    for found in (listed, run):
        assert all(at > 0 for at in found.marks.values())
    assert capsys.readouterr().out.count("CPU of a task") == len(looks) * SHOWN
