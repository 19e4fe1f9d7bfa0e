"""The operator's commands on a live coordinator: list, show, log, stop, deploy, conservation."""

import csv
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import Result

from riffle.coordinator.specs import RunSpec
from riffle.deploy.follow import follow
from riffle.deploy.network.processes import lock_folder
from riffle.deploy.operator import Operator
from riffle.deploy.report import replace_csv, rows_of, write_settled_rows
from tests.coordinator.world import RUN, SMALL, FakeShuffler
from tests.deploy.cli.calls import riffle as call
from tests.deploy.live import live_coordinator

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorial.md"
HAND, OTHER = "1d" * 16, "1e" * 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, FakeShuffler]]:
    with live_coordinator(tmp_path_factory.mktemp("live")) as (network, shuffler):
        shuffler.expired = 0
        with Operator.of(network) as operator:
            operator.create_run(RunSpec.model_validate(SMALL))
            for run_id in (HAND, OTHER):
                operator.create_run(manual(run_id))
            list(operator.events(RUN))
        yield network, shuffler


@pytest.fixture
def network(world: tuple[Path, FakeShuffler]) -> Path:
    return world[0]


def manual(run_id: str) -> RunSpec:
    changes = {"run_id": run_id, "name": "by-hand", "learner": "manual", "episodes": 60}
    return RunSpec.model_validate(SMALL | changes)


def riffle(network: Path, *arguments: str) -> Result:
    return call(*arguments, "--network", str(network))


def document(network: Path, *arguments: str) -> Any:
    result = riffle(network, *arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def rows(result: Result) -> list[dict[str, str]]:
    assert result.exit_code == 0, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


def test_list_in_every_format(network: Path) -> None:
    assert [run["id"] for run in document(network, "list")["runs"]][:3] == [RUN, HAND, OTHER]
    first = rows(riffle(network, "list", "--format", "csv"))[0]
    assert (first["id"], first["state"], first["episodes"]) == (RUN, "finished", "40")
    assert first["trust"] == "shuffle"
    text = riffle(network, "list").stdout
    assert "by-hand" in text
    assert "finished" in text


def test_health_answers_in_json(network: Path) -> None:
    url = (network / "operator" / "coordinator_url").read_text() + "/readyz"
    result = call("health", url, "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"url": url, "ready": True, "status": 200}
    assert call("health", url).stdout == "ready\n"
    refused = call("health", url.replace("readyz", "nothing"), "--format", "json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["status"] == 404


def test_enrolment_reports_the_address_of_another_service(network: Path) -> None:
    url = (network / "operator" / "coordinator_url").read_text()
    result = call(
        "network", "enrol", str(network), "--shuffler-url", url, "--owner", "me", "--users", "1"
    )
    assert result.exit_code == 4
    assert f"is not the shuffler at {url}" in result.stderr


def test_follow_prints_lines_off_a_terminal(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Operator.of(network) as operator:
        follow(operator, RUN, 40, tmp_path)
        rows = operator.deployments(RUN)
        stages = operator.stages(RUN)
    lines = capsys.readouterr().err.splitlines()
    settled = [text for text in lines if text.startswith("batch ")]
    assert len(settled) == len(rows)
    assert settled[-1] == f"batch {rows[-1]['index']} counted: 40 of 40 episodes"
    assert [text for text in lines if text.startswith("stage ")] == [
        f"stage {row['stage']} finished, active policies: {row['active_after']}" for row in stages
    ]


@pytest.mark.parametrize("words", [RUN, RUN[:5], "small"])
def test_run_is_named_by_id_its_beginning_or_name(network: Path, words: str) -> None:
    assert document(network, "show", words)["run"]["id"] == RUN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "there is no run ''"),
        ("smal1", "did you mean 'small'?"),
        ("by-hand", f"may mean 2 runs; say which of {HAND}"),
    ],
)
def test_ambiguous_or_unknown_run_is_explained(network: Path, words: str, message: str) -> None:
    for command in ("show", "log", "stop", "conservation"):
        result = riffle(network, command, words)
        assert result.exit_code == 3
        assert message in result.stderr


def test_show_a_run_and_its_tables(network: Path) -> None:
    text = riffle(network, "show", "small").stdout
    assert "policy, step 1: 0 0" in text
    assert "finished" in text
    assert re.search(r"suspicious_batches\W+0", text)
    shown = document(network, "show", "small")
    assert shown["result"]["episodes"] == 40
    first = rows(riffle(network, "show", "small", "--format", "csv"))
    assert first[0]["epsilon"] == str(shown["result"]["epsilon"])
    for name, count in (("deployments", 2), ("stages", 1), ("ledger", 2)):
        assert len(document(network, "show", "small", "--table", name)[name]) == count
        table = rows(riffle(network, "show", "small", "--table", name, "--format", "csv"))
        assert len(table) == count
        assert name != "ledger" or {row["suspicious"] for row in table} == {"False"}
    text = riffle(network, "show", "small", "--table", "ledger").stdout
    assert re.search(r" 20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ ", text), "times are for people"
    assert "e+09" not in text
    assert "mixture" not in riffle(network, "show", "small", "--table", "deployments").stdout


def test_manual_run_shows_no_remaining_time(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Operator.of(network) as operator:
        run = operator.create_run(manual("22" * 16))["id"]
        operator.wait(run, operator.deploy(run, {"policy": [[1, 1]] * 2, "episodes": 20})["index"])
        operator.stop(run)
        follow(operator, run, 60, tmp_path, by_hand=True)
    assert capsys.readouterr().err.splitlines() == ["batch 0 counted: 20 of 60 episodes"]


def test_log_prints_every_event_and_ends(network: Path) -> None:
    text = riffle(network, "log", "small").stdout.splitlines()
    assert "run_started" in text[0]
    assert "run_finished" in text[-1]
    followed = riffle(network, "log", "small", "--follow", "--format", "json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in followed][-1] == "run_finished"
    assert len(followed) == len(text)
    # The log of a run that goes on has the events so far.
    assert "run_started" in riffle(network, "log", HAND[:4]).stdout


def test_deploy_by_hand_and_stop(network: Path, tmp_path: Path) -> None:
    always = document(network, "deploy", HAND, "--episodes", "20", "--always", "1", "--wait")
    assert always["state"] == "counted"
    assert always["mixture"]["policies"] == [[[1, 1], [1, 1]]]
    assert abs(always["value_estimate"]["value"]) < 2
    file = tmp_path / "summary.json"
    file.write_text(json.dumps({"policy": [[0, 1], [1, 0]], "regret": 3}))
    by_file = document(network, "deploy", HAND, "--episodes", "20", "--policy", str(file), "--wait")
    assert by_file["mixture"]["policies"] == [[[0, 1], [1, 0]]]
    mixed = '{"policies": [[[0, 0], [0, 0]], [[1, 1], [1, 1]]], "probabilities": [0.25, 0.75]}'
    text = riffle(network, "deploy", HAND, "--episodes", "20", "--policy", mixed, "--wait")
    assert "value_estimate.radius" in text.stdout, text.stderr
    assert text.stderr == "waiting for the batch to fill and be counted\n"
    assert document(network, "show", HAND)["run"]["state"] == "finished"

    once = riffle(network, "deploy", OTHER, "--episodes", "20", "--always", "1")
    assert f"riffle show {OTHER} --network {network} has the best value" in once.stderr

    stopped = riffle(network, "stop", OTHER)
    assert "is stopped" in stopped.stdout
    assert document(network, "show", OTHER)["run"]["state"] == "stopped"
    followed = riffle(network, "log", OTHER, "--follow")
    assert "run_stopped" in followed.stdout.splitlines()[-1]
    assert followed.exit_code == 1, "--follow reports how the run ended"
    assert riffle(network, "log", OTHER).exit_code == 0, "the events so far are printed"
    assert riffle(network, "stop", HAND).exit_code == 3


def test_last_deployment_prints_where_the_results_will_be(network: Path) -> None:
    """The network of ``riffle up`` ends with its run, so that riffle show has no answer."""
    with Operator.of(network) as operator:
        ids = [operator.create_run(manual(f"3{i}" * 16))["id"] for i in range(3)]
    words = ("--episodes", "60", "--always", "1")
    elsewhere = riffle(network, "deploy", ids[0], *words).stderr
    assert f"it ends; riffle show {ids[0]} --network {network} has its result" in elsewhere
    with lock_folder(network.parent):
        of_up = riffle(network, "deploy", ids[1], *words).stderr
    assert f"riffle up's own run writes its results into {network.parent}" in of_up
    assert f"of any other, riffle show {ids[1]} --network {network} has the result" in of_up
    # The lock's file stays, without a lock.
    after = riffle(network, "deploy", ids[2], *words).stderr
    assert f"it ends; riffle show {ids[2]} --network {network} has its result" in after
    assert "riffle up" not in after


def test_stopped_run_ends_with_exit_code_1(network: Path, tmp_path: Path) -> None:
    def stop() -> None:
        with Operator.of(network) as operator:
            while not (ids := [r["id"] for r in operator.runs() if r["name"] == "stopped"]):
                time.sleep(0.05)
            operator.stop(ids[0])

    thread = threading.Thread(target=stop)
    thread.start()
    words = ("--learner", "manual", "--name", "stopped", "--out", str(tmp_path / "out"))
    result = riffle(network, "run", *words)
    thread.join()
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("did not finish: it was stopped")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--always", "2"], "action outside 0..1"),
        (["--policy", "[[0, 1]]"], "shape"),
        (["--policy", "{}"], "neither policy nor policies"),
        (["--policy", "[[0,"], "not JSON"),
        (["--policy", "[" * 100_000], "not JSON"),
        (["--policy", "[[0, 1], [0, 1]]", "--always", "1"], "give either --policy or --always"),
        (["--always", "1", "--layer", "2"], "layer"),
    ],
)
def test_wrong_deployment_is_refused(network: Path, arguments: list[str], message: str) -> None:
    result = riffle(network, "deploy", OTHER, "--episodes", "20", *arguments)
    assert result.exit_code == 3
    assert message in result.stderr


def test_file_without_a_policy_is_refused(network: Path, tmp_path: Path) -> None:
    for content, message in ((b"5", "neither policy nor policies"), (b"\xff", "not JSON")):
        (tmp_path / "policy.json").write_bytes(content)
        arguments = ["--episodes", "20", "--policy", str(tmp_path / "policy.json")]
        result = riffle(network, "deploy", OTHER, *arguments)
        assert result.exit_code == 3
        assert message in result.stderr


def test_conservation_accounts_for_every_message(
    world: tuple[Path, FakeShuffler], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, _ = world
    answer = document(network, "conservation", "small")
    assert "shuffler_messages_held" in riffle(network, "conservation", "small").stdout
    assert answer["balanced"] is True
    batches = rows(riffle(network, "conservation", "small", "--format", "csv"))
    assert [row["opened"] for row in batches] == [
        row["shuffler_messages_forwarded"] for row in batches
    ]
    for balanced, code in ((True, 0), (False, 1), (None, 1)):
        found = answer | {"balanced": balanced}
        monkeypatch.setattr(Operator, "conservation", lambda self, run_id, found=found: found)
        assert riffle(network, "conservation", "small").exit_code == code


def test_growing_files_become_the_final_files(network: Path, tmp_path: Path) -> None:
    with Operator.of(network) as operator:
        source = Partial(operator)
        for source.shown in (0, 1, 1, 2):
            write_settled_rows(tmp_path, cast("Operator", source), RUN)
            lines = [file.read_text().count("\n") for file in sorted(tmp_path.iterdir())]
            assert lines[:2] == [source.shown + 1] * 2 if source.shown else not lines
        for table in ("deployments", "stages", "ledger"):
            grown = (tmp_path / f"{table}.csv").read_text()
            replace_csv(tmp_path / f"{table}.csv", rows_of(operator, RUN, table))
            assert grown == (tmp_path / f"{table}.csv").read_text()


def test_tutorial_s_client_and_commands(network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tutorial's Python deploys half of a run's episodes, commands do the rest."""
    (block,) = re.findall(r"```python\n([^`]*Operator\.of.*?)```", TUTORIAL.read_text(), re.DOTALL)
    block = block.replace("runs/hand/network", str(network)).replace("300", "100")
    sizes = {"states": 2, "actions": 2, "horizon": 3, "episodes": 200, "epsilon": 50.0}
    changes = {"run_id": None, "name": "demo", "learner": "manual", **sizes}
    with Operator.of(network) as operator:
        operator.create_run(RunSpec.model_validate(SMALL | changes))
    exec(block)  # noqa: S102  (our own page)
    assert "'confidence': 0.95" in capsys.readouterr().out
    deploy = "deploy demo --always 1 --episodes 100 --wait"
    for command in ("list", deploy, "log demo --follow", "conservation demo"):
        result = riffle(network, *command.split())
        assert result.exit_code == 0, result.stderr
        assert result.stdout


class Partial:
    """An operator's client that shows the first batches only, as while a run goes on."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.shown = 0

    def deployments(self, run_id: str) -> list[dict[str, Any]]:
        answers = self._operator.deployments(run_id)
        at = [row["settled_at"] if i < self.shown else None for i, row in enumerate(answers)]
        return [row | {"settled_at": when} for row, when in zip(answers, at, strict=True)]

    def stages(self, run_id: str) -> list[dict[str, Any]]:
        return self._operator.stages(run_id) if self.shown == 2 else []

    def ledger(self, run_id: str) -> dict[str, Any]:
        return {"entries": self._operator.ledger(run_id)["entries"][: self.shown]}
