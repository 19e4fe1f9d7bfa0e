"""Requests go where the caller pointed them, whatever proxies the environment names."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from riffle.deploy.network import processes
from riffle.deploy.network.secrets import init_network, operator_client


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Starts a listener that the environment names as proxy; yields what it receives."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            received.append(connection.recv(4096))

    threading.Thread(target=listen, daemon=True).start()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
    yield received
    listener.close()


def test_a_token_reaches_no_proxy(proxy: list[bytes], tmp_path: Path) -> None:
    init_network(tmp_path)
    with (
        operator_client(tmp_path, "http://127.0.0.1:1", "SECRET") as client,
        pytest.raises(httpx.ConnectError),
    ):
        client.get("/v1/runs")
    assert proxy == []


def test_a_probe_asks_no_proxy(proxy: list[bytes]) -> None:
    with pytest.raises(httpx.ConnectError):
        processes.probe("http://127.0.0.1:1/readyz")
    assert proxy == []
