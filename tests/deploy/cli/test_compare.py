"""The three trust models side by side: a live small comparison, and its refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import RunSpec
from riffle.deploy.cli.main import build
from riffle.deploy.follow import TRUST_MODELS, VIEWS
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator
from riffle.experiments.presets import Preset, preset

pytestmark = pytest.mark.long

SMALL = ["--param", "states=3", "--horizon", "3", "--episodes", "300", "--epsilon", "4"]
SMALL += ["--beta", "1e-3", "--option", "first_stage=60", "--nodes", "3"]


def compare(*arguments: str) -> tuple[int, str, str]:
    words = ["compare", *arguments]
    result = CliRunner().invoke(build(words), words)
    return result.exit_code, result.stdout, result.stderr


def test_three_runs_on_one_network(tmp_path: Path) -> None:
    code, out, err = compare(*SMALL, "--out", str(tmp_path), "--format", "json")
    assert code == 0, err
    rows = {row["trust"]: row for row in json.loads(out)["models"]}
    assert list(rows) == list(TRUST_MODELS) == list(VIEWS)
    shuffle, local, central = rows["shuffle"], rows["local"], rows["central"]
    assert central["noise"] < shuffle["noise"] < local["noise"], "less trust costs more noise"
    assert local["messages_a_report"] == central["messages_a_report"] == 1
    assert shuffle["messages_a_report"] > 3
    assert shuffle["bytes_a_report"] > max(local["bytes_a_report"], central["bytes_a_report"]) > 96
    for trust, row in rows.items():
        assert 3.5 < row["epsilon"] <= 4.0
        assert json.loads((tmp_path / trust / "summary.json").read_text())["trust"] == trust
    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(out)["models"]
    code, _, err = compare(*SMALL, "--out", str(tmp_path))
    assert code == 3
    assert "comparison.json exists" in err


def start_unfinished(folder: Path) -> str:
    """Starts a run and leaves it unfinished, as an interrupted command does; returns its id."""
    config = LoopbackConfig(folder, "RiverSwim-v0", nodes=0, workers=1)
    with LoopbackNetwork(config) as network, Operator.of(network.secrets) as operator:
        return str(operator.create_run(preset("demo").spec)["id"])


@pytest.mark.parametrize("name", ["shuffle/summary.json", "local/stages.csv", "central/regret.png"])
def test_results_of_an_interrupted_comparison_are_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    code, _, err = compare(*SMALL, "--out", str(tmp_path))
    assert code == 3
    assert f"{name} exists" in err
    assert (tmp_path / name).read_text() == "mine"


def test_unfinished_run_is_stopped_before_the_comparison_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def begin(operator: Operator, _: Preset, out: Path) -> list[dict[str, str]]:
        seen.extend((run["id"], run["state"]) for run in operator.runs())
        assert not (out / "local" / "stages.csv").exists()
        return []

    unfinished = start_unfinished(tmp_path)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "stages.csv").write_text("of an earlier one")
    monkeypatch.setattr("riffle.deploy.cli.up.compare", begin)
    code, _, err = compare(*SMALL, "--out", str(tmp_path), "--force", "--format", "json")
    assert code == 0, err
    assert seen == [(unfinished, "stopped")]
    assert f"stopped run {unfinished}" in err


def test_comparison_uses_the_given_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[RunSpec] = []
    monkeypatch.setattr(Registry, "build", lambda _, spec: built.append(spec))
    (tmp_path / "comparison.json").write_text("[]")  # nothing is started
    assert compare("--constants", "paper", "--out", str(tmp_path))[0] == 3
    assert [spec.constants for spec in built] == ["paper"] * 3


@pytest.mark.parametrize("name", ["ucbvi-ldp", "nobody"])
def test_learner_of_no_network_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    code, _, err = compare("--learner", name, "--out", str(tmp_path))
    assert code == 3
    assert "learner" in err
    assert not list(tmp_path.iterdir())
