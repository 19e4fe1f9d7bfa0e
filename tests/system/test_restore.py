"""What docs/operations.md says of copies of a store, rehearsed on live processes with SQLite."""

import json
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import (
    enrol_node,
    operator_client,
    revoke_node,
    shuffler_operator,
)
from riffle.deploy.operator import Operator
from tests.system.agreement import assert_whole, seeded_network, seeded_spec

EPISODES = 200
Rows = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackNetwork]:
    folder = tmp_path_factory.mktemp("restore")
    with LoopbackNetwork(seeded_network(folder, lease_seconds=3)) as made:
        yield made


@pytest.fixture
def operator(network: LoopbackNetwork) -> Iterator[Operator]:
    client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
    with Operator(client) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def store(network: LoopbackNetwork, role: str) -> Path:
    return network.config.folder / "data" / role / f"{role}.sqlite"


def rows(file: Path, query: str) -> Rows:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(query).fetchall()


def online_copy(file: Path, copy: Path) -> None:
    """What `sqlite3 FILE ".backup COPY"` does."""
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def follow(network: LoopbackNetwork, run_id: str) -> str:
    client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
    with Operator(client) as operator:
        return str(list(operator.events(run_id))[-1]["kind"])


def stop(network: LoopbackNetwork, role: str) -> None:
    network.processes[role].terminate()
    assert network.processes[role].wait(60) == 0


def restore(file: Path, copy: Path) -> None:
    """As the page says: log and index of the store that is replaced go with it."""
    for old in file.parent.glob(f"{file.name}*"):
        old.unlink()
    shutil.copyfile(copy, file)


def refusal(network: LoopbackNetwork, role: str) -> str:
    """Starts a service that does not start; returns the sentence that it ends with."""
    network.start(role)
    with pytest.raises(LocalError, match="ended with code 4"):
        network.wait_ready(role)
    line = (network.config.folder / "logs" / f"{role}.log").read_text().splitlines()[-1]
    event = json.loads(line)
    assert (event["level"], event["event"]) == ("error", "ended")
    return str(event["detail"])


def accept(patch: pytest.MonkeyPatch, sentence: str) -> None:
    """Sets the variable that a refusal names."""
    found = re.search(r"or set (RIFFLE_\w+)=(\d+)", sentence)
    assert found, sentence
    patch.setenv(*found.groups())


def test_an_older_copy_of_the_coordinators_store_fails_the_run_and_releases_nothing_again(
    network: LoopbackNetwork, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, file = seeded_spec(EPISODES), store(network, "coordinator")
    run_id, older, newer = spec.run_id or "", tmp_path / "older", tmp_path / "newer"
    nodes = network.processes["node"]
    nodes.send_signal(signal.SIGSTOP)
    try:
        operator.create_run(spec)
        until(lambda: operator.deployment(run_id, 0)["state"] == "open")
        online_copy(file, older)
    finally:
        nodes.send_signal(signal.SIGCONT)
    following = ThreadPoolExecutor(1).submit(follow, network, run_id)
    until(lambda: operator.deployment(run_id, 0)["acknowledged"])
    stop(network, "coordinator")
    online_copy(file, newer)
    released = "SELECT batch_id, messages_sha256 FROM batches WHERE messages_sha256 IS NOT NULL"
    before = rows(store(network, "shuffler"), released)
    restore(file, older)
    sentence = refusal(network, "coordinator")
    assert "empty or an older copy" in sentence
    accept(monkeypatch, sentence)
    network.start("coordinator")
    network.wait_ready("coordinator")
    log = (network.config.folder / "logs" / "coordinator.log").read_text()
    assert '"level": "error", "service": "coordinator", "event": "older-store-accepted"' in log
    until(lambda: operator.run(run_id)["state"] != "running")
    run = operator.run(run_id)
    assert run["state"] == "failed"
    assert "is this an older copy of the store?" in run["message"]
    assert following.result(60) != "run_finished", "a follower ends, though it saw later events"
    spent = 'SELECT run_id, "index" FROM ledger'
    assert rows(file, spent) == []
    assert rows(newer, spent)[0] == (run_id, 0)
    assert rows(store(network, "shuffler"), released) == before != []


def test_a_copy_of_the_stopped_shufflers_store_goes_on(
    network: LoopbackNetwork, operator: Operator, tmp_path: Path
) -> None:
    spec = seeded_spec(EPISODES, run_id="7a" * 16)
    file, copy = store(network, "shuffler"), tmp_path / "copy"
    operator.create_run(spec)
    until(lambda: operator.deployment(spec.run_id or "", 0)["state"] == "counted")
    stop(network, "shuffler")
    online_copy(file, copy)
    restore(file, copy)
    network.start("shuffler")
    list(operator.events(spec.run_id or ""))
    assert_whole(operator, spec)


def test_an_emptied_or_older_shuffler_is_refused_and_revokes_nothing_back(
    network: LoopbackNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, older, newest = store(network, "shuffler"), tmp_path / "older", tmp_path / "newest"
    revoked = "SELECT revoked_at IS NOT NULL FROM nodes WHERE name = 'dishonest'"
    with shuffler_operator(network.secrets, network.shuffler_url) as client:
        node = enrol_node(client, "dishonest", "owner", 9)
        online_copy(file, older)
        revoke_node(client, node.node_id)
    stop(network, "shuffler")
    online_copy(file, newest)
    for old in file.parent.glob(f"{file.name}*"):
        old.unlink()
    assert "its head is 0" in refusal(network, "shuffler")
    restore(file, older)
    assert "who was revoked" in refusal(network, "shuffler")
    restore(file, newest)
    network.start("shuffler")
    network.wait_ready("shuffler")
    assert rows(file, revoked) == [(1,)]
    stop(network, "shuffler")
    restore(file, older)
    accept(monkeypatch, refusal(network, "shuffler"))  # the head moved on since
    network.start("shuffler")
    network.wait_ready("shuffler")
    log = (network.config.folder / "logs" / "shuffler.log").read_text()
    assert '"event": "older-store-accepted"' in log
