"""Strangers who send endless heads and half requests to both services stop nobody.

The services' memory stays flat, half-sent requests are gone after the deadline, and the run that
goes on meanwhile ends with the simulator's counts. ``RIFFLE_STRANGERS_SECONDS`` and
``RIFFLE_STRANGERS_HALF_SENT`` prolong the attack; the times that other callers wait are printed.
"""

import os
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from riffle.common.process.endpoint import server_verification
from riffle.common.process.workers import SPAWN
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from tests.system import strangers
from tests.system.agreement import assert_whole, seeded_network, seeded_spec

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("RIFFLE_STRANGERS_SECONDS", "3"))
HALF_SENT = int(os.environ.get("RIFFLE_STRANGERS_HALF_SENT", "300"))
DEADLINE = 2.0 if SECONDS < 10 else 10.0
MOST_GROWTH = 20 << 20
EPISODES = 150


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch(threading.Thread):
    """Asks a service whether it lives, over a connection of its own each time."""

    def __init__(self, url: str, pid: int) -> None:
        super().__init__(daemon=True)
        self.url, self.pid = url, pid
        self.before = self.peak = resident(pid)
        self.waits: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        usual = server_verification(None)
        while not self.over.wait(0.1):
            began = time.monotonic()
            assert httpx.get(f"{self.url}/livez", timeout=30, verify=usual).status_code == 200
            self.waits.append(time.monotonic() - began)
            self.peak = max(self.peak, resident(self.pid))


def test_strangers_take_no_memory_and_lose_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("SHUFFLER", "COORDINATOR"):
        monkeypatch.setenv(f"RIFFLE_{role}_HEAD_SECONDS", str(DEADLINE))
    with LoopbackNetwork(seeded_network(tmp_path)) as network:
        client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
        with Operator(client) as operator:
            for run_id in ("00" * 16, "11" * 16):  # the first makes the services warm
                if run_id != "00" * 16:
                    watches, attack = attacked(network)
                operator.create_run(seeded_spec(EPISODES, run_id=run_id))
                while operator.run(run_id)["state"] == "running":
                    time.sleep(0.1)
                assert_whole(operator, seeded_spec(EPISODES, run_id=run_id))
            left = attack.recv()
            for watch in watches:
                watch.over.set()
                watch.join()
                growth = watch.peak - watch.before
                wait = statistics.median(watch.waits)
                print(f"{watch.url}: +{growth / 2**20:.1f} MiB, /livez {1e3 * wait:.0f} ms")
                assert growth < MOST_GROWTH
    assert left == 0, "half-sent requests are open after the deadline"


def attacked(network: LoopbackNetwork) -> tuple[list[Watch], "Connection[object, int]"]:
    urls = {"shuffler": network.shuffler_url, "coordinator": network.coordinator_url}
    ports = tuple(urlsplit(url).port or 0 for url in urls.values())
    watches = [Watch(url, network.processes[name].pid) for name, url in urls.items()]
    attack, theirs = SPAWN.Pipe()
    plan = strangers.Attack(ports, SECONDS, HALF_SENT, DEADLINE)
    SPAWN.Process(target=strangers.run, args=(plan, theirs), daemon=True).start()
    for watch in watches:
        watch.start()
    return watches, attack
