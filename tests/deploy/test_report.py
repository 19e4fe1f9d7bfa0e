"""Files of a run, from a small run of a real coordinator over a shuffler in memory."""

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import Sizes
from riffle.deploy.report import FinishedRun, manifest, plot_regret, summary, write
from riffle.node_client.environments.tabular import random_mdp
from tests.coordinator.calls import Api
from tests.coordinator.world import RUN, SMALL

MDP = random_mdp(Sizes(2, 2, 2), seed=3)
ALL_POLICIES = [np.reshape(actions, (2, 2)) for actions in product((0, 1), repeat=4)]
SEEDS = {"learner": 0, "test": None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    with ExitStack() as stack:
        api = Api(tmp_path_factory.mktemp("data"), stack)
        api.finish()
        yield FinishedRun(
            run=api.get(f"/{RUN}"),
            result=api.get(f"/{RUN}/result"),
            deployments=api.get(f"/{RUN}/deployments")["deployments"],
            stages=api.get(f"/{RUN}/stages")["stages"],
            ledger=api.get(f"/{RUN}/ledger"),
        )


def value_of(policy: Any) -> float:
    """V^pi by adding up all trajectories' probabilities, forwards: no planning is trusted here."""
    d, total = MDP.d1, 0.0
    for h in range(2):
        total += sum(d[x] * MDP.r[h, x, policy[h][x]] for x in range(2))
        d = np.array([sum(d[x] * MDP.P[h, x, policy[h][x], y] for x in range(2)) for y in range(2)])
    return float(total)


def loss_of(deployment: dict[str, Any]) -> float:
    """V* - V of a deployed mixture, an episode."""
    mixture = deployment["mixture"]
    values = [value_of(policy) for policy in mixture["policies"]]
    return max(map(value_of, ALL_POLICIES)) - float(np.dot(mixture["probabilities"], values))


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_summary_of_a_run(finished: FinishedRun) -> None:
    answer = summary(finished, MDP, wall_seconds=1.5)
    crude, fine = finished.deployments
    assert answer["state"] == "finished"
    assert (answer["episodes"], answer["reports_accepted"]) == (42, 40)
    assert answer["messages_forwarded"] == answer["messages_counted"] > 0
    assert answer["regret"] == pytest.approx(21 * loss_of(crude) + 21 * loss_of(fine))
    assert answer["regret"] > 0
    assert answer["optimal_value"] == pytest.approx(max(map(value_of, ALL_POLICIES)))
    assert answer["policy_value"] == pytest.approx(value_of(answer["policy"]))
    share = answer["policy_value"] / answer["optimal_value"]
    assert answer["policy_value_share"] == pytest.approx(share)
    assert (answer["epsilon"], answer["beta"]) == (finished.ledger["epsilon"], 0.01)
    assert (answer["policy_switches"], answer["wall_seconds"]) == (1, 1.5)


@pytest.mark.parametrize(
    ("state", "executed", "episodes"),
    [("abandoned", 0, 0), ("abandoned", 5, 5), ("rejected", 0, 20), ("rejected", 30, 30)],
)
def test_episodes_of_failed_batches_count(
    finished: FinishedRun, state: str, executed: int, episodes: int
) -> None:
    crude, fine = finished.deployments
    changed = crude | {"state": state, "episodes_executed": executed}
    curve = replace(finished, deployments=[changed, fine]).regret(MDP)
    assert curve.total == pytest.approx(episodes * loss_of(crude) + 21 * loss_of(fine))


def test_all_files_are_written(finished: FinishedRun, tmp_path: Path) -> None:
    document = write(tmp_path, finished, MDP, 1.0, SEEDS)
    assert {file.name for file in tmp_path.iterdir()} == {
        "summary.json",
        "stages.csv",
        "ledger.csv",
        "deployments.csv",
        "regret.png",
        "manifest.json",
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == document
    assert [
        (row["index"], row["n"], row["state"]) for row in rows(tmp_path / "deployments.csv")
    ] == [
        ("0", "20", "counted"),
        ("1", "20", "counted"),
    ]
    (stage,) = rows(tmp_path / "stages.csv")
    assert (stage["L_b"], stage["active_after"]) == ("20", "1")
    spent = rows(tmp_path / "ledger.csv")
    assert [float(row["epsilon_upper"]) for row in spent] == [
        entry["epsilon_upper"] for entry in finished.ledger["entries"]
    ]
    picture = (tmp_path / "regret.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 10_000


def test_run_without_stages_has_an_empty_table(finished: FinishedRun, tmp_path: Path) -> None:
    write(tmp_path, replace(finished, stages=[]), MDP, 1.0, SEEDS)
    assert rows(tmp_path / "stages.csv") == []
    assert (tmp_path / "stages.csv").read_text().startswith("deployment,stage,L_b,episodes,")


def test_manifest_is_enough_to_repeat_the_run(finished: FinishedRun) -> None:
    answer = json.loads(json.dumps(manifest(finished, SEEDS)))
    assert answer["seeds"] == SEEDS
    assert answer["constants"] == {"name": "tiny"}
    assert {"riffle-rl", "numpy", "cryptography"} <= answer["versions"].keys()
    given = {key: value for key, value in SMALL.items() if key != "run_id"}
    assert given.items() <= answer["spec"].items()


def test_regret_is_plotted_without_a_finite_epsilon(finished: FinishedRun, tmp_path: Path) -> None:
    document = summary(finished, MDP, 1.0) | {"epsilon": "Infinity"}
    plot_regret(tmp_path / "regret.png", finished.regret(MDP), document)
    assert (tmp_path / "regret.png").stat().st_size > 0
