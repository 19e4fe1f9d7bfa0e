"""A figure's files are complete, show what is missing, and are never overwritten."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from riffle.common.protocol.errors import LocalError
from riffle.experiments.figures.catalogue import Curve, Figure, Kind
from riffle.experiments.figures.draw import (
    Series,
    caption,
    draw,
    gather,
    legend_label,
    merge_constants,
)
from riffle.experiments.figures.write import make, table
from riffle.experiments.regret import SeedResult
from riffle.experiments.sweep import Row, Rows
from tests.experiments.figures.worlds import LINE, SHOWN, forced, order, run_of, small_figure

PNG_LIMIT = 100_000


def ignore(_: object) -> None:
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("figures")
    make(order(path), ignore, ignore)
    yield path


def rows(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return list(csv.DictReader(stream))


def test_all_files_are_there(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {
        "rows.jsonl", "small.csv", "small-seeds.csv", "small.png", "small.svg", "small.md",
        "small.json",
    }  # fmt: skip
    assert (folder / "small.png").stat().st_size < PNG_LIMIT


def test_the_bands_are_those_of_the_seeds(folder: Path) -> None:
    label = "UCBVI-JDP"
    totals = [float(r["regret"]) for r in rows(folder / "small-seeds.csv") if r["curve"] == label]
    last = [r for r in rows(folder / "small.csv") if r["curve"] == label][-1]
    assert float(last["x"]) == 300
    assert float(last["mean"]) == pytest.approx(np.mean(totals))
    assert float(last["low"]) <= float(last["mean"]) <= float(last["high"])


def test_missing_results_are_in_table_manifest_and_picture(folder: Path) -> None:
    text = (folder / "small.md").read_text()
    assert "| SDP-PE, papers' noise | not computed |" in text
    assert "2 of 2 seeds: n=" in text.partition("## Not computed")[2]
    assert "not computed, see the table" in (folder / "small.svg").read_text()
    manifest = json.loads((folder / "small.json").read_text())
    curves = {curve["label"]: curve for curve in manifest["curves"]}
    assert list(curves) == list(SHOWN)
    assert "messages" in curves["SDP-PE, papers' noise"]["missing"][0]
    assert not curves["PE, not private"]["missing"]


def test_the_legend_names_curves_and_the_caption_has_their_constants(folder: Path) -> None:
    text = (folder / "small.md").read_text().partition("## Constants")[2]
    assert "bonus_scale=0.1" in text
    assert "noise=gaussian" in text
    manifest = json.loads((folder / "small.json").read_text())
    computed = [curve for curve in manifest["curves"] if not curve["missing"]]
    assert len(computed) == 3
    assert all(curve["constants"] for curve in computed)
    assert {"code", "versions", "seeds", "bands", "backend"} <= manifest.keys()
    assert "noise=gaussian" in (folder / "small.svg").read_text()


def test_finished_figures_are_not_overwritten(folder: Path) -> None:
    before = (folder / "small.json").read_bytes()
    with pytest.raises(LocalError, match="already has small"):
        make(order(folder), ignore, ignore)
    assert (folder / "small.json").read_bytes() == before


def test_more_seeds_or_another_figure_reuse_results(folder: Path) -> None:
    remaining: list[int] = []
    make(order(folder, small_figure("same")), ignore, remaining.append)
    make(order(folder, small_figure("more"), seeds=3), ignore, remaining.append)
    assert remaining == [0, len(SHOWN)]


def test_force_computes_again(tmp_path: Path) -> None:
    remaining: list[int] = []
    first_order = order(tmp_path, seeds=1)
    make(first_order, ignore, remaining.append)
    first = (tmp_path / "small.csv").read_bytes()
    make(forced(first_order), ignore, remaining.append)
    assert remaining == [len(SHOWN), len(SHOWN)]
    assert (tmp_path / "small.csv").read_bytes() == first
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(SHOWN)


def test_one_seed_has_no_band_in_picture_and_table(folder: Path, tmp_path: Path) -> None:
    make(order(tmp_path, small_figure("single"), seeds=1), ignore, ignore)
    assert "1 seed, so no band" in (tmp_path / "single.svg").read_text()
    picture, _, text = (tmp_path / "single.md").read_text().partition(".png)")
    assert picture.endswith("](single")
    assert "Regret at the end of the run, of one seed." in text
    assert "[" not in text.partition("## Constants")[0]
    assert "2 seeds; band:" in (folder / "small.svg").read_text()


def test_constants_that_differ_between_points_are_listed_in_their_order() -> None:
    assert merge_constants(
        [{"K": 1, "delta": 0.05, "seed": 3}, {"K": 2, "delta": 0.05, "seed": 4}]
    ) == {
        "K": "1 / 2",
        "delta": "0.05",
    }
    assert merge_constants([]) == {}


def example_figure(tmp_path: Path, kind: Kind) -> tuple[Figure, tuple[Series, ...]]:
    """Two curves at two points; the second lacks one seed at one of them."""
    lines = [LINE["UCBVI-JDP"], LINE["SDP-PE"]]
    curves = tuple(
        Curve(line, (run_of(line, 0.5), run_of(line, 2.0)), (0.5, 2.0), ((9.0, "too slow"),))
        for line in lines
    )
    store = Rows(tmp_path / "rows.jsonl")
    for i, curve in enumerate(curves):
        for j, run in enumerate(curve.runs):
            for seed in range(2):
                total, V, switches = 10.0 * (i + 1) + seed, 50.0 / run.K, i * 100 + j
                result = SeedResult(seed, total, V, 0.99 * V, switches, 0, 0.1, [], {"c": j},
                                    episodes=(1.0, 2.0), cumulative=(1.0, total))  # fmt: skip
                row = Row(run.key, seed, "code", result=result)
                if (i, j, seed) == (1, 1, 1):
                    row = Row(run.key, seed, "code", "no")
                store.append(row)
    figure = Figure("made-up", "Made up", kind, curves)
    return figure, gather(figure, store, range(2))


@pytest.mark.parametrize("kind", ["epsilon", "episodes", "switches"])
def test_every_kind_of_figure_is_drawn(tmp_path: Path, kind: Kind) -> None:
    figure, series = example_figure(tmp_path, kind)
    draw(figure, series, range(2), tmp_path / "drawn")
    first = (tmp_path / "drawn.svg").read_bytes()
    assert all(legend_label(curve).encode() in first for curve in series)
    draw(figure, series, range(2), tmp_path / "drawn")
    assert (tmp_path / "drawn.svg").read_bytes() == first


def test_switches_without_results_are_drawn_and_the_caption_says_so(tmp_path: Path) -> None:
    line = LINE["SDP-PE"]
    figure = Figure("empty", "Empty", "switches", (Curve(line, (run_of(line),), (1.0,)),))
    series = gather(figure, Rows(tmp_path / "rows.jsonl"), range(2))
    draw(figure, series, range(2), tmp_path / "empty")
    assert "SDP-PE (not computed, see the table)." in caption(figure, series)


def test_panels_share_a_legend_and_a_caption(tmp_path: Path) -> None:
    figure, series = example_figure(tmp_path, "episodes")
    panels = tuple(
        replace(curve, line=replace(curve.line, label=f"mine; {name}", panel=name))
        for curve, name in zip(series, ("left", "right"), strict=True)
    )
    draw(figure, panels, range(2), tmp_path / "panels")
    drawn = (tmp_path / "panels.svg").read_text()
    assert all(text in drawn for text in ("<!-- left -->", "<!-- right -->", "<!-- mine -->"))
    assert "mine; left" not in drawn


def test_the_caption_says_once_what_curves_share(tmp_path: Path) -> None:
    figure, series = example_figure(tmp_path, "episodes")
    one, other = (
        replace(curve, constants={"eta": "0.1", "scale": scale})
        for curve, scale in zip(series, "12", strict=True)
    )
    figure = replace(figure, note="A note.")
    assert caption(figure, (one, other)) == (
        "A note.\nEvery curve that has them: eta=0.1. UCBVI-JDP: scale=1. SDP-PE: scale=2."
    )


def test_a_table_counts_seeds_and_names_absent_points(tmp_path: Path) -> None:
    figure, series = example_figure(tmp_path, "epsilon")
    text = table(figure, series, range(2))
    assert "| SDP-PE | 20 [14, 27] | 20 | 100 / 101 | 100% |" in text
    assert "| SDP-PE | 2: 1 of 2 seeds: no |" in text
    assert "| SDP-PE | 9: too slow |" in text
    assert "c=0 / 1" in text
