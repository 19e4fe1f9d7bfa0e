"""Two shufflers and two coordinators, live processes on PostgreSQL, of which one is killed
(SIGKILL) in every batch and started again: the counts are the simulator's, so those of a run that
nothing disturbed.

RIFFLE_REPLICAS_EPISODES makes the run longer.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest

from deploy.local import LocalNetwork
from deploy.network import operator_client
from deploy.operator import Operator
from tests.postgres import Cluster
from tests.system.agreement import (
    RUN_ID,
    assert_equal_to_simulator,
    seeded_network,
    seeded_spec,
)

EPISODES = int(os.environ.get("RIFFLE_REPLICAS_EPISODES", "300"))
VICTIMS = ("shuffler", "coordinator", "shuffler-2", "coordinator-2")


@pytest.fixture
def network(tmp_path: Path, cluster: Cluster) -> Iterator[LocalNetwork]:
    with ExitStack() as stack:
        urls = {
            f"{store}_store": stack.enter_context(cluster.database(store))
            for store in ("shuffler", "coordinator")
        }
        yield stack.enter_context(
            LocalNetwork(seeded_network(tmp_path, replicas=2, lease_seconds=3, **urls))
        )


def kill(network: LocalNetwork, victim: str) -> None:
    """Kill a process and start it again, while its other replica is there."""
    role, _, number = victim.partition("-")
    network.wait_ready(role if number else f"{role}-2")
    network.processes[victim].kill()
    network.processes[victim].wait()
    network.start(victim)


@pytest.mark.timeout(180 + EPISODES)
def test_one_killed_in_every_batch_changes_no_count(network: LocalNetwork) -> None:
    spec, victims, killed = seeded_spec(EPISODES), cycle(VICTIMS), set()
    client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
    with Operator(client) as operator:
        operator.create_run(spec)
        for event in operator.events(RUN_ID):
            if event["kind"] == "deployment_issued":
                victim = next(victims)
                kill(network, victim)
                killed.add(victim)
            last = event["kind"]
        assert last == "run_finished"
        assert killed == set(VICTIMS)
        assert_equal_to_simulator(operator, spec)
