"""Two shufflers and two coordinators, live processes on PostgreSQL, of which one is killed
(SIGKILL) while each batch fills and started again: the counts are the simulator's, so those of a
run that nothing disturbed.

Nodes are held (SIGSTOP) from the sealing of a batch until the next victim's turn, and coordinators
from a batch's opening until its kill, so that a batch is never over before.
RIFFLE_REPLICAS_EPISODES makes the run longer, RIFFLE_REPLICAS_SUMS plays it with sums, too.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select

from riffle.common.mechanism.parameters import Aggregation
from riffle.coordinator.store.schema import deployments, runs
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from riffle.shuffler.store.schema import batches
from tests.postgres import Cluster
from tests.system.agreement import (
    AGGREGATIONS,
    RUN_ID,
    assert_equal_to_simulator,
    seeded_network,
    seeded_spec,
)

pytestmark = pytest.mark.long

EPISODES = int(os.environ.get("RIFFLE_REPLICAS_EPISODES", "300"))
PLAYED = AGGREGATIONS if "RIFFLE_REPLICAS_SUMS" in os.environ else AGGREGATIONS[:1]
VICTIMS = ("shuffler", "coordinator", "shuffler-2", "coordinator-2")
COORDINATORS = VICTIMS[1::2]


class Scene:
    """A network of two replicas of each service, and what their databases say of a batch."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.network = network
        self.coordinator = create_engine(network.config.coordinator_store)
        self.shuffler = create_engine(network.config.shuffler_store)

    def state(self, index: int) -> str:
        """A batch's state at the coordinator; "" before it is issued, "over" when acknowledged."""
        columns = deployments.c
        query = select(columns.state, columns.acknowledged).where(columns["index"] == index)
        with self.coordinator.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return ""
        return "over" if row.acknowledged else str(row.state)

    def open_or_ended(self, index: int) -> bool:
        if self.state(index) == "open":
            return True
        with self.coordinator.connect() as connection:
            return connection.scalar(select(runs.c.state)) != "running"

    def sealed(self, index: int) -> bool:
        return self.state(index) not in ("issued", "open")

    def has_reports(self, index: int) -> bool:
        query = select(batches.c.reports).order_by(batches.c.deposited).offset(index).limit(1)
        with self.shuffler.connect() as connection:
            return bool(connection.scalar(query))

    def send(self, number: signal.Signals, *names: str) -> None:
        for name in names:
            self.network.processes[name].send_signal(number)

    def kill(self, victim: str) -> None:
        process = self.network.processes[victim]
        process.kill()
        process.wait()

    def wait_for_the_other(self, victim: str) -> None:
        role, _, number = victim.partition("-")
        self.network.wait_ready(role if number else f"{role}-2")


@pytest.fixture
def scene(tmp_path: Path, cluster: Cluster) -> Iterator[Scene]:
    with ExitStack() as stack:
        urls = {
            f"{store}_store": stack.enter_context(cluster.database(store))
            for store in ("shuffler", "coordinator")
        }
        config = seeded_network(tmp_path, replicas=2, lease_seconds=3, **urls)
        made = Scene(stack.enter_context(LoopbackNetwork(config)))
        stack.callback(made.coordinator.dispose)
        stack.callback(made.shuffler.dispose)
        stack.callback(made.send, signal.SIGCONT, "node", *COORDINATORS)
        yield made


def until(condition: Callable[[int], bool], index: int) -> None:
    deadline = time.monotonic() + 120
    while not condition(index):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timeout(600 + EPISODES)
@pytest.mark.parametrize("aggregation", PLAYED)
def test_one_killed_in_every_batch_changes_no_count(scene: Scene, aggregation: Aggregation) -> None:
    spec, network = seeded_spec(EPISODES, aggregation=aggregation), scene.network
    killed: list[str] = []
    client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
    with Operator(client) as operator:
        scene.send(signal.SIGSTOP, "node")
        operator.create_run(spec)
        for index, victim in zip(count(), cycle(VICTIMS), strict=False):
            until(scene.open_or_ended, index)
            if not scene.state(index):
                break
            scene.wait_for_the_other(victim)
            scene.send(signal.SIGSTOP, *COORDINATORS)
            scene.send(signal.SIGCONT, "node")
            until(scene.has_reports, index)
            scene.kill(victim)
            assert scene.state(index) == "open", "it was too late"
            scene.send(signal.SIGCONT, *COORDINATORS)
            network.start(victim)
            killed.append(victim)
            until(scene.sealed, index)
            scene.send(signal.SIGSTOP, "node")
        assert len(killed) == len(operator.deployments(RUN_ID))
        assert set(killed) == set(VICTIMS)
        assert_equal_to_simulator(operator, spec)
