"""External learners and environments give the same private counts simulated and over services.

Seeded noise is keyed by (run, batch, slot), so the equality is exact. See tests/system.
"""

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import SystemRandomness
from riffle.common.process.plugins import load_file
from riffle.common.protocol.descriptor import parse
from riffle.coordinator.batches.counts import private_counts, value_estimate
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec
from riffle.deploy.cli.options import RunOptions
from riffle.deploy.follow import run_to_end
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from riffle.experiments.per_user import SIMULATOR, Users, batch_histogram
from riffle.experiments.presets import Preset
from riffle.node_client.environments.registry import make
from tests.coordinator.world import SMALL as TINY
from tests.deploy.cli.calls import riffle
from tests.deploy.live import live_coordinator
from tests.node_client import world
from tests.system.agreement import RUN_ID, assert_equal_to_simulator
from tests.system.test_node_shuffler import (
    deposit,
    node_settings,
    running,
    sealed,
    shuffler_settings,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
OUTSIDE = "0d" * 16
OUTSIDE_LEARNER = f"{EXAMPLES}/rest_learner.py"
LEARNER = f"{EXAMPLES}/own_learner.py:ExploreThenCommit"
SMALL: dict[str, Any] = {"run_id": RUN_ID, "episodes": 200, "epsilon": 20.0, "beta": 1e-3}


def seeded(environment: str, learner: str) -> Preset:
    return RunOptions(env=environment, learner=learner).apply(test_seed=3, **SMALL)


def network_of(folder: Path, chosen: Preset) -> LoopbackNetwork:
    config = LoopbackConfig(
        folder=folder,
        environment=chosen.spec.environment,
        environment_parameters=chosen.environment,
        nodes=3,
        max_epsilon=chosen.spec.epsilon,
        max_beta=chosen.spec.beta,
        workers=1,
        test_entry=True,
        learners=chosen.learners,
    )
    return LoopbackNetwork(config)


def operator_of(network: LoopbackNetwork) -> Operator:
    client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
    return Operator(client)


@pytest.mark.long
def test_an_own_learner_and_environment_and_an_outside_learner(tmp_path: Path) -> None:
    environment = f"{EXAMPLES / 'own_environment.py'}:make"
    chosen = seeded(environment, LEARNER)
    assert chosen.spec.learner == "own-learner"
    assert chosen.spec.environment == "own_environment.py:make"
    with network_of(tmp_path, chosen) as network, operator_of(network) as operator:
        summary = run_to_end(operator, chosen, tmp_path, started=0.0)
        assert_simulated(operator, chosen)
        assert_the_command_agrees(operator, environment, policy_value=summary["policy_value"])
        by_hand = seeded(environment, "manual")
        spec = by_hand.spec.model_copy(update={"run_id": OUTSIDE})
        assert_outside_learner_agrees(network, operator, Preset(spec, by_hand.environment))
    assert summary["episodes"] == 200
    assert summary["regret"] is not None


def test_an_outside_learner_ends_when_its_batch_is_abandoned(tmp_path: Path) -> None:
    changes = {"learner": "manual", "batch_seconds": 1, "reissues": 0}
    with live_coordinator(tmp_path) as (folder, shuffler), Operator.of(folder) as operator:
        shuffler.fills = False
        run = operator.create_run(RunSpec.model_validate(TINY | changes))
        token = (folder / "operator" / "coordinator_token").read_text()
        url = (folder / "operator" / "coordinator_url").read_text()
        with (
            operator_client(folder, url, token) as api,
            pytest.raises(SystemExit, match="batch 0 is abandoned"),
        ):
            load_file(f"{OUTSIDE_LEARNER}:outside")(api, run)
        assert operator.run(run["id"])["state"] == "failed"


@pytest.mark.long
def test_a_gymnasium_environment(tmp_path: Path) -> None:
    environment = f"{EXAMPLES / 'own_gymnasium.py'}:make"
    chosen = seeded(environment, LEARNER)
    with network_of(tmp_path, chosen) as network, operator_of(network) as operator:
        summary = run_to_end(operator, chosen, tmp_path, started=0.0)
        assert_simulated(operator, chosen)
        assert_the_command_agrees(operator, environment, policy_value=None)
    assert summary["episodes"] == 200
    assert summary["regret"] is None, "nobody knows it"
    assert not (tmp_path / "regret.png").exists()


def test_an_app_drives_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = runpy.run_path(str(EXAMPLES / "own_app.py"))
    hints = {"environment": "hints-v1", "states": 2, "actions": 3, "horizon": 3, "data_slots": 3}
    hints |= {"policies": (((0, 1), (1, 2), (2, 0)),), "weights": (2**32,), "noise_slots": 120}
    people = [f"person-{number}@example.org" for number in range(world.N)]
    shown: list[str] = []

    async def show(user: str, hint: int) -> bool:
        shown.append(user)
        return hint == 1

    with running(shuffler_settings(tmp_path)) as client:
        settings = node_settings(tmp_path, client).model_dump(exclude_unset=True)
        (tmp_path / "users_key").write_text("5e" * 32)
        settings |= {"users_key_file": tmp_path / "users_key", "environment": "hints-v1"}
        del settings["simulated_users"]
        for name, value in settings.items():
            monkeypatch.setenv(f"RIFFLE_NODE_{name.upper()}", str(value))
        signed = deposit(client, **hints, episode_seconds=600)
        asyncio.run(app["main"](people, show))
        batch = parse(signed.descriptor.encode()).descriptor.batch_id
        assert sealed(client, batch)["reports"] == world.N
    assert sorted(shown) == sorted(3 * people)


def assert_simulated(operator: Operator, chosen: Preset) -> None:
    environment = make(chosen.spec.environment, **chosen.environment)
    assert_equal_to_simulator(operator, chosen.spec, environment, Registry(files=chosen.learners))


def assert_the_command_agrees(
    operator: Operator, environment: str, *, policy_value: float | None
) -> None:
    """With the same seeds `riffle simulate --per-user` prints the results of the run."""
    words = ["--env", environment, "--learner", LEARNER, "--episodes", "200", "--epsilon", "20",
             "--beta", "1e-3", "--run-id", RUN_ID, "--test-seed", "3"]  # fmt: skip
    printed = riffle("simulate", "--per-user", *words, "--seeds", "1", "--format", "json")
    assert printed.exit_code == 0, printed.stderr
    simulated, result = json.loads(printed.stdout), operator.result(RUN_ID)
    live = [operator.deployment(RUN_ID, d["index"]) for d in operator.deployments(RUN_ID)]
    assert [batch["batch_id"] for batch in simulated["batches"]] == [d["batch_id"] for d in live]
    assert [batch["counts"] for batch in simulated["batches"]] == [d["counts"] for d in live]
    assert simulated["policy"] == result["policy"]
    assert simulated["value_estimate_mean"] == result["value_estimate"]
    assert simulated["messages"] == result["messages_counted"]
    assert simulated["policy_switches"] == result["policy_switches"]
    assert simulated["policy_value_mean"] == policy_value


def assert_outside_learner_agrees(
    network: LoopbackNetwork, operator: Operator, chosen: Preset
) -> None:
    run = operator.create_run(chosen.spec)
    with operator_client(network.secrets, network.coordinator_url, network.operator_token) as api:
        policy = load_file(f"{OUTSIDE_LEARNER}:outside")(api, run)
    result = operator.result(OUTSIDE)
    assert (result["state"], result["episodes"]) == ("finished", 200)
    live = [operator.deployment(OUTSIDE, d["index"]) for d in operator.deployments(OUTSIDE)]
    simulated, spec = Simulated(chosen), chosen.spec
    learn = load_file(f"{OUTSIDE_LEARNER}:learn")
    assert policy == learn(simulated.deploy, spec.states, spec.actions, spec.horizon, spec.episodes)
    assert [d["value_estimate"]["value"] for d in live] == simulated.values
    for detail, counts in zip(live, simulated.transitions, strict=True):
        np.testing.assert_array_equal(detail["counts"]["transitions"], counts)


class Simulated:
    """Deploys by hand without services, user by user."""

    def __init__(self, chosen: Preset) -> None:
        self.spec: RunSpec = chosen.spec
        self.environment = make(chosen.spec.environment, **chosen.environment)
        self.values: list[float] = []
        self.transitions: list[Any] = []

    def deploy(self, policy: list[list[int]], episodes: int) -> float:
        index = len(self.values)
        asked = Deployment(index, "manual", Mixture.single(policy), episodes, None)
        issued = SIMULATOR.issue(OUTSIDE, self.spec, asked, index=index, step=index)
        histogram = batch_histogram(issued.descriptor, Users(self.environment))
        counts = private_counts(issued.descriptor, histogram)
        estimate = value_estimate(counts, self.spec.delta)
        assert estimate is not None
        self.values.append(estimate.value)
        self.transitions.append(counts.transitions)
        return estimate.value


@pytest.mark.parametrize(
    ("file", "most"),
    [("own_learner.py", 40), ("own_environment.py", 40), ("own_gymnasium.py", 40),
     ("own_app.py", 40), ("rest_learner.py", 60)],
)  # fmt: skip
def test_an_example_is_short_and_as_long_as_documented(file: str, most: int) -> None:
    lines = len((EXAMPLES / file).read_text().splitlines())
    assert lines <= most
    assert f"`examples/{file}` | {lines} |" in (EXAMPLES.parent / "docs" / "own.md").read_text()


def test_the_wrappers_of_the_documentation_make_environments(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "own.md").read_text()
    (block,) = re.findall(r"```python\n(# wrapped.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "wrapped.py").write_text(block)
    for name, X in (("pole", 9), ("blackjack", 65)):
        made = make(f"wrapped.py:{name}", folder=str(tmp_path))
        assert made.sizes.X == X
        state = made.reset(SystemRandomness())
        for _ in range(made.sizes.H):
            assert 0 <= state < X
            state, reward, over = made.step(0, SystemRandomness())
            assert made.reward_range[0] <= reward <= made.reward_range[1]
            if over:
                break
