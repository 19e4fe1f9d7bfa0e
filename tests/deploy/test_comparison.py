"""The three trust models side by side: a live small comparison, and its refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.main import build
from deploy.comparison import SEES, TRUST_MODELS

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
    assert list(rows) == list(TRUST_MODELS) == list(SEES)
    shuffle, local, central = rows["shuffle"], rows["local"], rows["central"]
    assert central["noise"] < shuffle["noise"] < local["noise"], "what less trust costs"
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


@pytest.mark.parametrize("name", ["ucbvi-ldp", "nobody"])
def test_learners_that_no_network_runs_are_refused_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    code, _, err = compare("--learner", name, "--out", str(tmp_path))
    assert code == 3
    assert "learner" in err
    assert not list(tmp_path.iterdir())
