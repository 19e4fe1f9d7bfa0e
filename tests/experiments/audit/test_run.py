"""`riffle audit` prints one document with a verdict and an exit code; a seed repeats it."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from riffle.deploy.cli.main import build
from riffle.experiments.audit.run import Effort, run
from riffle.experiments.audit.world import Setting

QUICK = ["--sealed", "0", "--users", "0", "--format", "json"]
KEYS = {
    "encoding",
    "epsilon_claimed",
    "epsilon_lower_bound",
    "beta_claimed",
    "beta_lower_bound",
    "trials_a_side",
    "threshold_epsilon",
    "threshold_beta",
    "confidence",
    "verdict",
}


def audit(*arguments: str) -> Result:
    return CliRunner().invoke(build(["audit"]), ["audit", *arguments])


def document(result: Result) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_riffle_is_not_refuted() -> None:
    result = audit(
        "--trials", "200", "--seed", "5", "--sealed", "20", "--users", "30", "--format", "json"
    )
    assert result.exit_code == 0, result.stderr
    values = document(result)
    assert values.keys() >= KEYS
    assert values["verdict"] == "not refuted"
    assert values["sealed_trials"] == 40
    assert values["observer"]["padding"] == "on"
    assert values["observer_without_padding"]["padding"].startswith("off")
    assert "seeded (5)" in values["randomness"]


def test_sums_are_not_refuted() -> None:
    quick = ("--trials", "150", "--seed", "5", "--sealed", "20", "--users", "30")
    values = document(audit("--aggregation", "sums", *quick, "--format", "json"))
    assert (values["aggregation"], values["padded_messages"]) == ("sums", 1)
    assert values["verdict"] == "not refuted"
    assert values["sealed_trials"] == 40
    assert "observer" not in values, "the length of a vector cannot depend on data"


def test_broken_encodings_end_with_exit_code_1() -> None:
    result = audit("--encoding", "paper-numbers", "--trials", "2000", *QUICK)
    assert result.exit_code == 1
    values = document(result)
    assert values["verdict"] == "violated"
    assert len(values["attacks"]) == 2
    assert audit("--encoding", "one-envelope", "--trials", "200", *QUICK).exit_code == 1


def test_text_has_one_row_for_each_number() -> None:
    result = audit("--encoding", "paper-numbers", "--trials", "500")
    assert result.exit_code == 1
    assert "attacks.1.verdict" in result.stdout


def test_a_seed_repeats_an_audit() -> None:
    setting, effort = Setting(seed=7), Effort(150, sealed=0, users=0)
    one, other = (run("riffle", setting, effort) for _ in range(2))
    assert {k: v for k, v in one.items() if k != "seconds"} == {
        k: v for k, v in other.items() if k != "seconds"
    }


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--epsilon", "0"], 3, "epsilon must lie"),
        (["--beta", "1"], 3, "beta must lie"),
        (["--trials", "5"], 3, "at least 100 trials"),
        (["--trials", "9" * 30], 3, "at most 1000000000 trials"),
        (["--trials", "100", "--sealed", "9" * 30], 3, "at most 1000000000 trials"),
        (["--trials", "100", "--seed", "-1"], 3, "a seed must not be negative, got -1"),
        (["--sealed", "-1"], 3, "must not be negative"),
        (["--encoding", "sums"], 2, "encoding"),
        (["--aggregation", "sums", "--encoding", "one-envelope"], 3, "'sums' is for the encoding"),
    ],
)
def test_invalid_options_are_refused_with_the_reason(
    arguments: list[str], code: int, says: str
) -> None:
    result = audit(*arguments)
    assert result.exit_code == code
    assert says in result.stderr
