"""An app's users against a live shuffler: interleaved events, and kills of the app's process.

RIFFLE_PARTICIPANT_USERS and RIFFLE_PARTICIPANT_KILLS make the test longer.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import RiffleError
from riffle.common.protocol.hpke import open_histogram
from riffle.coordinator.specs import MANUAL, RunSpec
from riffle.deploy.load.feed import constant_deployment
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.secrets import enrol
from riffle.deploy.operator import Operator
from riffle.node_client.episode import encode_episode
from riffle.node_client.ledger import NAME, Limit, PersonalLedger
from riffle.node_client.participant import Participant
from tests.node_client import world
from tests.system.test_node_shuffler import (
    COORDINATOR_TOKEN,
    call,
    deposit,
    node_settings,
    running,
    shuffler_settings,
)

USERS = int(os.environ.get("RIFFLE_PARTICIPANT_USERS", "24"))
KILLS = int(os.environ.get("RIFFLE_PARTICIPANT_KILLS", "1"))
APP = "import sys; from tests.system.test_participant import app; app(*sys.argv[1:])"
ROOT = Path(__file__).parents[2]
QUITTERS = 4
"""One user in this many gives up after the first step."""
Policy = tuple[tuple[int, ...], ...]
POLICY: Policy = ((1, 0, 1, 0), (0, 1, 1, 0))


def gives_up(number: int) -> bool:
    return number % QUITTERS == 1


async def person(participant: Participant, number: int) -> None:
    """A person's events, at random moments; what follows an action depends on who she is."""
    while True:
        try:
            lease = await participant.lease(f"person-{number}@example.org")
            break
        except RiffleError as error:
            if error.slug != "unavailable":
                return
            await asyncio.sleep(0.05)
    state = number % 4 if lease.state is None else lease.state
    for step in range(lease.step, world.SIZES.H):
        await asyncio.sleep(random.expovariate(20))
        following = (state + number) % 4
        lease.record(step, state, lease.act(step, state), float(number % 3 == 0), following)
        state = following
        if gives_up(number):
            lease.give_up()
            return
    await asyncio.sleep(random.expovariate(20))
    await lease.report()


def app(settings: str, users: str) -> None:
    """The app's process: it serves everybody at once and ends when all are done."""

    async def go() -> None:
        async with Participant(world.SIZES, **json.loads(settings)) as participant:
            people = [person(participant, number) for number in range(int(users))]
            await asyncio.gather(*people)

    asyncio.run(go())


def run_killed(settings: dict[str, Any], kills: int) -> int:
    """Runs the app, killing it ``kills`` times at random instants; returns how often it ran."""
    draws, command = random.Random(5), [sys.executable, "-c", APP, json.dumps(settings), str(USERS)]
    for run in range(kills + 1):
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            process.wait(None if run == kills else 1.2 + draws.uniform(0, 0.012 * USERS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return run + 1
    raise AssertionError("the app failed")


def truth(users: int = USERS, policy: Policy = POLICY) -> Any:
    """The counts of those who do not give up, each once."""
    counts = np.zeros((world.SIZES.H, 4, 2, 4, 2), dtype=np.int64)
    for number in range(users):
        state = number % 4
        for step in range(0 if gives_up(number) else world.SIZES.H):
            following = (state + number) % 4
            counts[step, state, policy[step][state], following, int(number % 3 == 0)] += 1
            state = following
    return counts


def test_an_app_that_is_killed_again_and_again_reports_everybody_once(tmp_path: Path) -> None:
    with running(shuffler_settings(tmp_path)) as client:
        made = node_settings(tmp_path, client)
        (tmp_path / "users_key").write_text("5e" * 32)
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in made.model_dump(exclude_unset=True).items()
            if name not in {"simulated_users", "states", "horizon"}
        } | {"users_key_file": str(tmp_path / "users_key")}
        signed = deposit(
            client,
            n=USERS,
            test_seed=5,
            policies=(POLICY,),
            weights=(2**32,),
            episode_seconds=600,
            expires_at=int(time.time()) + 1_800,
        )
        context = parse(signed.descriptor.encode())
        d = context.descriptor
        runs = run_killed(settings, KILLS)
        status = call(client, "GET", f"/batches/{d.batch_id}/status", COORDINATOR_TOKEN).json()
        assert (status["state"], status["episodes"]) == ("sealed", USERS), runs
        body = call(client, "GET", f"/batches/{d.batch_id}/messages", COORDINATOR_TOKEN).content
    C = d.layout.counters
    histogram, failed = open_histogram(
        world.ANALYZER.private, context.message_info, body, d.layout.width, C
    )
    plan = d
    noise = [encode_episode(plan, None, slot, test_entry=True) for slot in range(USERS)]
    assert failed == []
    counted = histogram[:C] - np.bincount(np.concatenate(noise), minlength=C + 1)[:C]
    assert np.array_equal(counted, truth().ravel())


# With a coordinator

PEOPLE = 60
SPEC = RunSpec(
    name="hints",
    learner=MANUAL,
    environment="hints-v1",
    states=4,
    actions=2,
    horizon=2,
    start=(0.25,) * 4,
    episodes=2 * PEOPLE,
    epsilon=4.0,
    beta=1e-3,
    dishonest_fraction=0.0,
    batch_seconds=3_600,
    episode_seconds=600,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackNetwork]:
    """A coordinator and a shuffler without nodes, on each kind of database."""
    with ExitStack() as stack:
        stores: dict[str, Any] = {}
        if request.param == "postgresql":
            cluster = request.getfixturevalue("cluster")
            for name in ("shuffler", "coordinator"):
                stores[f"{name}_store"] = stack.enter_context(cluster.database(name))
        demands: dict[str, Any] = {"max_epsilon": SPEC.epsilon, "max_beta": SPEC.beta, "workers": 1}
        config = LoopbackConfig(tmp_path, SPEC.environment, nodes=0, **demands, **stores)
        network = stack.enter_context(LoopbackNetwork(config))
        enrol(network.secrets, network.shuffler_url, ["app"], 2, 1_000)
        yield network


def test_people_fill_a_live_batch_and_their_ledger_refuses_the_next(
    services: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, files = services.config.folder, services.secrets / "nodes"
    for variable, value in services.environment("node").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("RIFFLE_NODE_SIMULATED_USERS")
    settings: dict[str, Any] = {
        "users_key_file": files / "users_key",
        "ledger_file": folder / "ledger.sqlite",
        "lifetime_epsilon": SPEC.epsilon,
    }

    async def take_part(state_dir: Path, deploy: Callable[[], object]) -> list[object]:
        async with Participant(world.SIZES, **settings, state_dir=state_dir) as participant:
            await asyncio.to_thread(deploy)
            people = (person(participant, number) for number in range(PEOPLE))
            return await asyncio.gather(*people)

    with Operator.of(services.secrets, services.coordinator_url) as operator:
        run = operator.create_run(SPEC)["id"]
        deployment = constant_deployment(SPEC, PEOPLE)
        asyncio.run(take_part(folder / "one", lambda: operator.deploy(run, deployment)))
        assert operator.wait(run, 0)["state"] == "counted"
        counts = operator.deployment(run, 0)["counts"]
        # Another app of the same owner, which knows nothing of the first but the ledger.
        asyncio.run(take_part(folder / "two", lambda: operator.deploy(run, deployment)))
        assert operator.deployment(run, 1)["state"] == "open"
        spent = operator.ledger(run)["entries"]
        operator.stop(run)
    expected = truth(PEOPLE, ((0,) * 4,) * 2).sum(axis=-1)
    noise = np.array(counts["transitions"]) - expected
    # A binomial of this variance is within 7 standard deviations, but for a chance of 1e-9 a cell.
    assert np.abs(noise).max() <= 7 * counts["transition_variance"] ** 0.5 + 1
    heads = HeadFolder(files, NAME)
    limit = Limit(SPEC.epsilon, SPEC.beta)
    histories = PersonalLedger(settings["ledger_file"], heads, limit).histories()
    assert len(histories) == PEOPLE
    for history in histories.values():
        ((_, charge),) = history
        assert charge.batch_id == spent[0]["batch_id"]
        assert limit.spent([charge]) == spent[0]["epsilon_upper"]
