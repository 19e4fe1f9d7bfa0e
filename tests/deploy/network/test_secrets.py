"""Secrets, enrolment at a real shuffler over TLS, and a whole network on loopback."""

import asyncio
import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from riffle.common.process.endpoint import failure_reason, hash_token, server_verification
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.service import GRACE_SECONDS
from riffle.coordinator.batches.shuffler_client import ShufflerClient
from riffle.deploy.cli.main import build
from riffle.deploy.load.feed import enrol_nodes
from riffle.deploy.network.certificates import LOOPBACK, make_authority
from riffle.deploy.network.doctor import check_service
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork, free_port
from riffle.deploy.network.secrets import (
    SHUFFLER_ID,
    TOKEN_FILE,
    enrol,
    enrol_node,
    find_node,
    init_network,
    operator_client,
    operator_token,
    shuffler_operator,
)
from riffle.deploy.operator import Operator
from tests.asking import taken_up

PREFIX = "RIFFLE_SHUFFLER_"


def credentials(secrets: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((secrets / "nodes" / "credentials.json").read_text())
    return rows


def accepted(client: httpx.Client, token: str) -> int:
    """Returns the status of a node's poll for open batches."""
    headers = {"Authorization": f"Bearer {token}"}
    return client.get("/v1/batches", headers=headers).status_code


# -- a shuffler over TLS ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shuffler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Secrets, and the URL of a shuffler that runs with them over TLS."""
    secrets, port = tmp_path_factory.mktemp("network"), free_port()
    init_network(secrets)
    mine = secrets / "shuffler"
    settings = {
        "PORT": port,
        "DATA_DIR": tmp_path_factory.mktemp("data"),
        "SHUFFLER_ID": SHUFFLER_ID,
        "STORAGE_KEY_FILE": secrets / "shuffler-storage" / "key",
        "SIGNING_KEY_FILE": mine / "signing_key",
        "COORDINATOR_KEY_FILE": mine / "coordinator_key",
        "COORDINATOR_TOKEN_HASH_FILE": mine / "coordinator_token_hash",
        "OPERATOR_TOKEN_HASH_FILE": mine / "operator_token_hash",
        "TLS_CERT_FILE": mine / "tls.pem",
        "TLS_KEY_FILE": mine / "tls.key",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "riffle.deploy.cli.main", "shuffler"],
        env=os.environ | {PREFIX + name: str(value) for name, value in settings.items()},
        stderr=subprocess.DEVNULL,
    )
    url = f"https://{LOOPBACK}:{port}"
    try:
        with operator_client(secrets, url, "none") as client:
            wait_for(client, process)
        yield secrets, url
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if client.get("/readyz").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.05)
    raise AssertionError("the shuffler does not start")


def test_nodes_are_enrolled_once_and_more_later(shuffler: tuple[Path, str]) -> None:
    secrets, url = shuffler
    enrol(secrets, url, ["me"], 2, 100)
    first, key = credentials(secrets), (secrets / "nodes" / "users_key").read_text()
    assert len(bytes.fromhex(key)) == 32
    enrol(secrets, url, ["me"], 2, 100)
    assert credentials(secrets) == first
    assert (secrets / "nodes" / "users_key").read_text() == key, "with another, all are new users"
    enrol(secrets, url, ["me"], 3, 100)
    assert credentials(secrets)[:2] == first
    assert len({node["token"] for node in credentials(secrets)}) == 3
    assert (secrets / "nodes" / "credentials.json").stat().st_mode & 0o777 == 0o600
    with operator_client(secrets, url, "none") as client:
        assert [accepted(client, node["token"]) for node in credentials(secrets)] == [200] * 3
        assert accepted(client, "another") == 401


def test_a_revoked_node_is_replaced_and_never_counted(shuffler: tuple[Path, str]) -> None:
    """Finding D7: the commands of the shuffler's operator, without an address."""
    secrets, url = shuffler
    (secrets / "operator" / "shuffler_url").write_text(url)

    def operate(*words: str) -> Any:
        command = ["network", *words, "--format", "json"]
        result = CliRunner().invoke(build(command), command)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def enrolled(nodes: int) -> int:
        clinic = ("--owner", "clinic", "--users", "7e1", "--nodes", str(nodes))
        return int(operate("enrol", str(secrets), *clinic)["enrolled"])

    assert (enrolled(2), enrolled(2)) == (2, 0)
    command = [
        "network",
        "enrol",
        str(secrets),
        "--owner",
        "clinic",
        "--nodes",
        "9",
        "--users",
        "0",
    ]
    refused = CliRunner().invoke(build(command), command)
    assert (refused.exit_code, "or equal to 1, not 0" in refused.stderr) == (3, True)
    revoked = operate("revoke", "clinic-1", str(secrets))
    assert revoked["owner"] == "clinic"
    assert enrolled(1) == 0
    assert revoked["node_id"] not in {node["node_id"] for node in credentials(secrets)}
    assert enrolled(2) == 1, "two valid ones, not two credentials"
    own = ("enrol", str(secrets), "--owner", "other", "--users", "7", "--credentials")
    assert operate(*own, str(secrets / "other.json"))["enrolled"] == 1
    assert "other" not in {node["owner"] for node in credentials(secrets)}
    assert [node["owner"] for node in json.loads((secrets / "other.json").read_text())] == ["other"]
    mine = [node["node_id"] for node in credentials(secrets) if node["owner"] == "clinic"]
    assert len(mine) == 2 and revoked["node_id"] not in mine
    listed = operate("nodes", str(secrets))
    assert 70 in {node["users"] for node in listed["nodes"]}
    clinic = [node for node in listed["nodes"] if node["owner"] == "clinic"]
    clinic.sort(key=lambda node: node["name"])
    assert [node["name"] for node in clinic] == ["clinic-1", "clinic-2", "clinic-3"]
    assert [node["revoked_at"] is None for node in clinic] == [False, True, True]
    assert listed["users_left"] == sum(
        node["users_left"] for node in listed["nodes"] if node["revoked_at"] is None
    )
    with shuffler_operator(secrets) as client:
        assert find_node(client, mine[0][:20]).name == "clinic-2"
        for text, reason in (
            ("", "no node is called ''"),
            ("clinic-9", "'clinic-9'; see riffle network nodes"),
        ):
            with pytest.raises(LocalError) as caught:
                find_node(client, text)
            assert reason in caught.value.detail
            assert "did you mean" not in caught.value.detail, "a revocation is for good"
    for words, text in (
        (("revoke", "clinic-1"), "revoked already, at 20"),
        (("enrol", "--owner", "other", "--users", "7"), "enrolled 1 node: other has 1 valid node"),
        (
            ("enrol", "--owner", "other", "--users", "7"),
            "enrolled none: other has 1 valid node already; for another, --nodes 2",
        ),
    ):
        command = ["network", *words, str(secrets)]
        result = CliRunner().invoke(build(command), command)
        assert (result.exit_code, text in result.stderr) == (0, True), result.stderr


def test_no_token_opens_two_services(tmp_path: Path) -> None:
    """Finding A6: what one service is shown must not open the other."""
    init_network(tmp_path)
    clear = [file for file in tmp_path.glob("*/*_token") if file.is_file()]
    hashes = {file: file.read_text().strip() for file in tmp_path.glob("*/*_token_hash")}
    assert len(clear) == len(hashes) == len(set(hashes.values())) == 5
    for file in clear:
        opened = [at for at, known in hashes.items() if known == hash_token(file.read_text())]
        assert len(opened) == 1, file


def test_a_folder_without_a_token_is_reported_with_a_hint_at_the_network(tmp_path: Path) -> None:
    """In its first second ``riffle up`` has written no token; another one would be wrong there."""
    with pytest.raises(LocalError, match=r"or not yet .riffle up says when it is.") as caught:
        operator_token(tmp_path / "network", TOKEN_FILE)
    assert f"init {tmp_path}" not in caught.value.detail
    init_network(tmp_path / "network")
    with pytest.raises(LocalError, match=f"; the network's folder is {tmp_path / 'network'}$"):
        operator_token(tmp_path, TOKEN_FILE)


def test_the_coordinator_trusts_its_networks_ca_and_no_other(shuffler: tuple[Path, str]) -> None:
    secrets, url = shuffler
    token = (secrets / "coordinator" / "shuffler_token").read_text()

    async def ready(ca_file: Path | None) -> str:
        api = ShufflerClient.connect(url, token, server_verification(ca_file))
        try:
            return await api.identity()
        finally:
            await api.close()

    async def fetch(ca_file: Path | None) -> None:
        api = ShufflerClient.connect(url, token, server_verification(ca_file))
        try:
            await api.messages("ab" * 16, 1)
        finally:
            await api.close()

    own = secrets / "coordinator" / "ca.pem"
    assert asyncio.run(ready(own)) == SHUFFLER_ID
    with pytest.raises(RemoteError, match="batch"):
        asyncio.run(fetch(own))
    for ask in (ready, fetch):
        with pytest.raises(LocalError, match="does not answer"):
            asyncio.run(ask(None))


def test_a_refused_enrolment_is_reported_and_changes_nothing(
    shuffler: tuple[Path, str], tmp_path: Path
) -> None:
    secrets, url = shuffler
    init_network(tmp_path)  # another network's operator
    (tmp_path / "operator" / "ca.pem").write_text((secrets / "operator" / "ca.pem").read_text())
    with pytest.raises(RemoteError, match=r"the shuffler at .* refused: .*token") as caught:
        enrol(tmp_path, url, ["me"], 1, 100)
    assert caught.value.slug == "unauthorized"
    assert not (tmp_path / "nodes" / "credentials.json").exists()


def test_a_shuffler_that_is_away_is_reported(tmp_path: Path) -> None:
    init_network(tmp_path)
    with pytest.raises(LocalError, match=r"the shuffler at .* does not answer") as caught:
        enrol(tmp_path, f"https://{LOOPBACK}:{free_port()}", ["me"], 1, 100)
    assert caught.value.slug == "unavailable"


def test_a_wrong_address_is_explained(shuffler: tuple[Path, str], tmp_path: Path) -> None:
    """Each fault has its own sentence, and none of them is a library's."""
    secrets, url = shuffler
    port = int(url.rsplit(":", 1)[1])
    with plain_listener() as plain:
        for address, reason in (
            (f"http://{LOOPBACK}:{port}", "is its address https:// instead of http://?"),
            (f"https://{LOOPBACK}:{plain}", "it does not speak TLS; is its address http://"),
            (f"https://{LOOPBACK}:1", "nothing accepts connections there"),
        ):
            with pytest.raises(LocalError, match="does not answer") as caught:
                enrol(secrets, address, ["me"], 9, 100)
            assert reason in caught.value.detail
    strange = make_authority(datetime.datetime.now(datetime.UTC)).pem
    (tmp_path / "ca.pem").write_text(strange)
    for ca_file in (None, tmp_path / "ca.pem"):
        (finding,) = check_service(url, ca_file)
        assert "certificate is from an unknown authority" in finding.detail
    asked = CliRunner().invoke(build(["health"]), ["health", f"{url}/readyz"])
    assert (asked.exit_code, "name it with --ca FILE" in asked.stderr) == (4, True)
    mismatch = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] verify failed: IP mismatch")
    assert failure_reason(mismatch) == "its certificate does not name this host"


@contextmanager
def plain_listener() -> Iterator[int]:
    """Answers whatever comes in as a server without TLS does; yields its port."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("url", ["http://10.0.0.1:8401", "https://a:1,http://b:2", "nowhere"])
def test_a_token_is_sent_over_tls_or_to_this_machine_only(url: str, tmp_path: Path) -> None:
    init_network(tmp_path)
    with pytest.raises(
        ValueError, match=r"address must be https, not 'http://(10|b)|not 'nowhere'"
    ):
        enrol(tmp_path, url, ["me"], 1, 100)
    with pytest.raises(ValueError, match="the address"):
        enrol_nodes(tmp_path, url, 1, lambda: None)
    with pytest.raises(ValueError, match="the address"):
        Operator.of(tmp_path, url)


def test_damaged_secrets_are_named(tmp_path: Path) -> None:
    init_network(tmp_path)
    file = tmp_path / "nodes" / "credentials.json"
    for content in ("{", "{}", '[{"node_id": "x", "token": "SECRET"}]'):
        file.write_text(content)
        with pytest.raises(LocalError, match=r"credentials\.json: ") as caught:
            enrol(tmp_path, "http://127.0.0.1:1", ["me"], 1, 100)
        assert "SECRET" not in caught.value.detail
    file = tmp_path / "shuffler-storage" / "key"
    file.write_text("none")
    with pytest.raises(LocalError, match=f"{file} must be 32 bytes as 64 hex"):
        init_network(tmp_path)


def test_an_answer_that_is_no_enrolment_is_reported_without_its_token() -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(201, json={"token": "SECRET"}))
    with (
        httpx.Client(base_url="http://shuffler", transport=answer) as client,
        pytest.raises(LocalError, match="not the shuffler") as caught,
    ):
        enrol_node(client, "node-1", "me", 1)
    assert "SECRET" not in str(caught.value)


# -- a network on loopback -------------------------------------------------------------------------


def config(folder: Path, **changes: Any) -> LoopbackConfig:
    small: dict[str, Any] = {
        "environment": "RiverSwim-v0",
        "environment_parameters": {"states": 3, "horizon": 2},
        "nodes": 2,
        "workers": 1,
    }
    return LoopbackConfig(folder=folder, **small | changes)


@contextmanager
def long_poll(network: LoopbackNetwork) -> Iterator[None]:
    """Waits for a batch at the shuffler, and is answered before the shuffler ends."""
    headers = {"Authorization": f"Bearer {credentials(network.secrets)[0]['token']}"}
    with httpx.Client(base_url=network.shuffler_url, headers=headers, timeout=60) as client:
        answer = taken_up(client, "/v1/batches", wait=30, accepting=1)
        yield
        assert answer.result().json() == {"batches": [], "lease_seconds": 120}


def test_a_network_starts_and_stops_in_order(tmp_path: Path) -> None:
    with LoopbackNetwork(config(tmp_path)) as network:
        network.check_alive()
        assert set(network.processes) == {"shuffler", "coordinator", "node"}
        url, token = network.coordinator_url, network.operator_token
        with operator_client(network.secrets, url, token) as operator:
            assert operator.get("/v1/runs").json() == {"runs": []}
            assert set(operator.get("/readyz").json().values()) == {"ok"}
        with operator_client(network.secrets, network.shuffler_url, "none") as client:
            assert [accepted(client, node["token"]) for node in credentials(network.secrets)] == [
                200,
                200,
            ]
        assert "serving" in network.last_line("node")
        with long_poll(network):
            started = time.monotonic()
            network.stop()
            assert time.monotonic() - started < GRACE_SECONDS
    assert [process.returncode for process in network.processes.values()] == [0, 0, 0]
    for role in network.processes:
        assert "Traceback" not in (tmp_path / "logs" / f"{role}.log").read_text()


def test_a_process_that_ends_is_reported_with_its_last_line(tmp_path: Path) -> None:
    network = LoopbackNetwork(config(tmp_path, environment="RiverSwin-v0"))
    init_network(network.secrets)
    (tmp_path / "logs").mkdir()
    enrolled = [{"node_id": "ab" * 16, "token": "t"}]
    (network.secrets / "nodes" / "credentials.json").write_text(json.dumps(enrolled))
    network.start("node")
    network.processes["node"].wait(60)
    with pytest.raises(LocalError, match=r"the node ended with code 3: .*did you mean") as caught:
        network.check_alive()
    assert caught.value.slug == "unavailable"
    network.stop()
