"""`riffle simulate --per-user`: environments without probabilities, failures, seeds, refusals.

tests/examples and tests/system check that its counts equal those of the services.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from riffle.deploy import output
from tests.deploy.cli.calls import document, riffle
from tests.examples.marks import MISTAKES, line_after

ROOT = Path(__file__).parents[2]
BRIDGE = f"{ROOT}/examples/own_gymnasium.py:make"
LEARNER = ("--learner", f"{ROOT}/examples/own_learner.py:ExploreThenCommit")
SMALL = ("--episodes", "200", "--epsilon", "20", "--beta", "1e-3")
ONE = ("--seeds", "1", "--format", "json")
RIVER = ("--horizon", "3", "--episodes", "300", "--epsilon", "8", "--beta", "1e-3")


def per_user(*words: str) -> Result:
    return riffle("simulate", "--per-user", *words)


def numbers(*words: str) -> dict[str, Any]:
    return document(per_user(*words))


def test_an_environment_without_probabilities_is_simulated() -> None:
    plain = riffle("simulate", "--env", BRIDGE, *LEARNER, *SMALL)
    assert plain.exit_code == 3
    assert "--per-user" in plain.stderr.splitlines()[-1]
    result = per_user("--env", BRIDGE, *LEARNER, *SMALL, *ONE)
    values = json.loads(result.stdout)
    unknown = {"regret_mean", "regret_ci", "regret_ceiling", "optimal_value", "policy_value_mean",
               "policy_value_min", "share_within_5_percent"}  # fmt: skip
    assert {key for key in unknown if values[key] is not None} == set()
    assert "no regret and no exact values" in result.stderr
    assert (values["episodes"], values["policy_switches"]) == (200, 1)
    assert 0 < values["reward_mean"] < 1
    assert values["episodes_failed"] == 0
    assert values["first_failure"] is None


def test_regret_is_known_if_the_probabilities_are() -> None:
    values = numbers(*RIVER, *ONE)
    assert 0 <= values["regret_mean"] <= values["regret_ceiling"]
    assert values["share_optimal_survives"] in (0.0, 1.0)
    assert sum(batch["n"] for batch in values["batches"]) == 300
    assert values["run_id"] == "0" * 32
    assert values["test_seed"] == 0
    text = per_user(*RIVER, "--seeds", "1").stdout
    assert "regret_mean" in text
    assert "transitions" not in text, "counts are for programs"


def test_seeds_differ_and_processes_change_nothing() -> None:
    words = (*RIVER, "--seeds", "2", "--format", "json")
    one, two = (numbers(*words, "--workers", w) for w in ("1", "2"))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    second = numbers(*RIVER, *ONE, "--test-seed", "1")
    first = numbers(*RIVER, *ONE)
    assert first["batches"] == one["batches"] != second["batches"]


@pytest.mark.parametrize("trust", ["local", "central"])
def test_every_trust_model(trust: str) -> None:
    assert numbers(*RIVER, *ONE, "--trust", trust)["trust"] == trust


@pytest.mark.parametrize(
    ("name", "written"),
    [("FailingWorld", "FailingWorld"), ("failing_gymnasium", "FailingGymnasium")],
)
def test_a_failed_episode_is_counted_and_its_error_shown(name: str, written: str) -> None:
    """Its report is noise, as over the services, but the environment's author learns the error."""
    values = numbers("--env", f"{MISTAKES}:{name}", *LEARNER, *SMALL, *ONE)
    assert 0 < values["episodes_failed"] < 200
    place = re.escape(line_after(f"class {written}("))
    assert re.fullmatch(rf"KeyError: \d {place}", values["first_failure"])


def test_a_command_of_which_every_episode_fails_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "from riffle import Sizes\n"
        "class Wrong:\n"
        "    sizes, reward_range, absorbing = Sizes(2, 2, 2), (0.0, 1.0), None\n"
        "    def reset(self, randomness): return 0\n"
        "    def step(self, action, randomness): return 1, 2.0, False\n"
    )
    result = per_user("--env", f"{tmp_path}/wrong.py:Wrong", *LEARNER, *SMALL, *ONE)
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1].startswith(
        "riffle: every episode failed, the first with ValueError: a reward of 2"
    )


def test_the_command_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(output, "SILENT_SECONDS", 3600.0)
    monkeypatch.setattr("riffle.experiments.per_user.PROGRESS_EVERY", 100)
    first, *lines = per_user(*RIVER, "--seeds", "2", "--workers", "1").stderr.splitlines()
    assert first == "episodes: 100 of 600"
    assert all(re.fullmatch(r"episodes: \d00 of 600(, about \d+ s left)?", text) for text in lines)
    assert lines[-1] == "episodes: 600 of 600"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--per-user", "--learner", "ucbvi"], "--per-user is not for ucbvi"),
        (["--per-user", "--learner", "uob-lbps"], "--per-user is not for uob-lbps"),
        (["--test-seed", "1"], "--test-seed is for --per-user"),
        (["--run-id", "0" * 32], "--run-id is for --per-user"),
        (["--per-user", "--run-id", "mine"], "run_id"),
        (["--per-user", "--test-seed", "-1"], "test_seed"),
        (["--per-user", "--episodes", "20"], "n="),
    ],
)
def test_unsuitable_options_are_refused(words: list[str], says: str) -> None:
    result = riffle("simulate", *words)
    assert result.exit_code == 3
    assert says in result.stderr.splitlines()[-1]
