"""SIGKILL at random instants of live runs changes no count.

Whoever is killed (one role, or all three at once) is started again at once and may be killed again
before it is ready. Every run must end with the counts of the undisturbed one, every batch counted
once, and every message that was accepted handed over. ``RIFFLE_KILLS`` says how many processes are
killed, in as many runs as that takes, with both aggregations in turn; ``RIFFLE_KILLS_SEED``
repeats a campaign's choices, though not the instants, which the machine decides.
"""

import os
import random
import time
from itertools import cycle
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from tests.system.agreement import AGGREGATIONS, assert_whole, seeded_network, seeded_spec

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("RIFFLE_KILLS", "2"))
SEED = int(os.environ.get("RIFFLE_KILLS_SEED", str(time.time_ns() % 10**6)))
ROLES = ("shuffler", "coordinator", "node")
LONGEST_LIFE_SECONDS = 1.5
EPISODES = 600


def kill(network: LoopbackNetwork, victims: list[str]) -> None:
    for victim in victims:
        network.processes[victim].kill()
    for victim in victims:
        network.processes[victim].wait()
    for victim in victims:
        network.start(victim)


def running(operator: Operator, run_id: str) -> bool:
    """Whether a run goes on; a coordinator that was just killed cannot have ended it."""
    try:
        return bool(operator.run(run_id)["state"] == "running")
    except LocalError:
        return True


def disturb(network: LoopbackNetwork, operator: Operator, run_id: str, most: int) -> int:
    """Kill until the run is over or ``most`` processes were killed; how many were."""
    draws = random.Random(f"{SEED} {run_id}")
    killed = 0
    while killed < most and running(operator, run_id):
        time.sleep(draws.uniform(0.0, LONGEST_LIFE_SECONDS))
        victims = list(ROLES) if draws.random() < 0.1 else [draws.choice(ROLES)]
        kill(network, victims[: most - killed])
        killed += len(victims[: most - killed])
        if draws.random() < 0.7:
            network.wait_ready("coordinator")
    return killed


def test_kills_at_random_instants_change_no_count(tmp_path: Path) -> None:
    print(f"RIFFLE_KILLS_SEED={SEED}")
    killed = runs = 0
    with LoopbackNetwork(seeded_network(tmp_path, lease_seconds=3)) as network:
        client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
        with Operator(client) as operator:
            for aggregation in cycle(AGGREGATIONS):
                if killed >= KILLS and runs >= len(AGGREGATIONS):
                    break
                run_id = f"{runs:032x}"
                spec = seeded_spec(EPISODES, run_id=run_id, aggregation=aggregation)
                operator.create_run(spec)
                most = KILLS - killed if runs else -(-KILLS // 2)
                disturbed = disturb(network, operator, run_id, most)
                network.wait_ready("coordinator")
                network.wait_ready("shuffler")  # whose record is compared
                assert_whole(operator, spec)
                killed, runs = killed + disturbed, runs + 1
                print(f"run {runs}: {disturbed} kills, {killed} in all", flush=True)
