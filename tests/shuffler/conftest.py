"""A shuffler behind an in-memory transport, and the requests of its callers."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any

import httpx2 as httpx  # starlette's test client returns its responses
import pytest
from fastapi.testclient import TestClient

from riffle.common.protocol.descriptor import SignedDescriptor
from riffle.common.protocol.wire import DIGEST_HEADER, Lease
from riffle.shuffler.app import create_app
from riffle.shuffler.core import Shuffler
from riffle.shuffler.settings import Settings
from tests.common.descriptors import ONE_MESSAGE
from tests.shuffler.world import (
    BETA,
    COORDINATOR_TOKEN,
    EPSILON,
    OPERATOR_TOKEN,
    Batch,
    FakeClock,
    descriptor_bytes,
    settings,
    signature,
    user,
)


class Api:
    """A running shuffler. ``restart`` stops it and starts another on the same directory."""

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        store_url: str | None = None,
        aggregation: str = "messages",
    ) -> None:
        self.directory = directory
        self.fields = ONE_MESSAGE.get(aggregation, {})
        self.clock = FakeClock()
        self._stack = stack
        self._changes: dict[str, Any] = {"store_url": store_url}
        self.client = self._start()
        self.node_id, self.token = self.enrol(1_000, "owner")

    def replica(self, stack: ExitStack) -> "Api":
        """A second shuffler on the same store, secrets and clock, with the same node as caller."""
        other = copy(self)
        other._stack = stack
        other.client = other._start()
        return other

    @property
    def settings(self) -> Settings:
        return settings(self.directory, **self._changes)

    @property
    def core(self) -> Shuffler:
        """The shuffler behind the routes."""
        found: Shuffler = self.client.app.state.shuffler  # type: ignore[attr-defined]
        return found

    def has_waiting(self) -> None:
        """Returns once a long poll waits."""
        until(lambda: self.core.changes._waiters.taken > 0)

    def _start(self) -> TestClient:
        app = create_app(self.settings, self.clock)
        return self._stack.enter_context(TestClient(app, raise_server_exceptions=False))

    def restart(self, **changes: Any) -> None:
        self._stack.close()
        self._changes = self._changes | changes
        self.client = self._start()

    def call(self, method: str, path: str, token: str | None, **rest: Any) -> httpx.Response:
        headers = rest.pop("headers", {})
        if token is not None:
            headers = headers | {"Authorization": f"Bearer {token}"}
        return self.client.request(method, f"/v1{path}", headers=headers, **rest)

    def enrol(self, users: int, owner: str | None = None) -> tuple[str, str]:
        """Enrols a node of this owner, or of a new one."""
        body = {"name": "a node", "owner": owner or secrets.token_hex(8), "users": users}
        answer = self.call("POST", "/nodes", OPERATOR_TOKEN, json=body).json()
        return answer["node_id"], answer["token"]

    def put(self, data: bytes, **rest: Any) -> httpx.Response:
        batch_id = rest.pop("batch_id", None) or Batch(data, b"").batch_id
        headers = rest.pop("headers", {"Riffle-Signature": signature(data)})
        token = rest.pop("token", COORDINATOR_TOKEN)
        return self.call("PUT", f"/batches/{batch_id}", token, content=data, headers=headers)

    def deposit(self, n: int = 4, deployment: int = 0, **changes: Any) -> Batch:
        data = descriptor_bytes(n, deployment, **self.fields | changes)
        answer = self.put(data)
        assert answer.status_code == 201, answer.text
        signed = SignedDescriptor.model_validate_json(answer.content)
        return Batch(data, bytes.fromhex(signed.batch_key))

    def deposit_shared(self, share: float, n: int = 8, **changes: Any) -> Batch:
        """A batch whose noise is enough for 4: at n = 8, up to half of them may be silent."""
        guarantee = {"epsilon": EPSILON, "beta": BETA, "dishonest_fraction": share}
        return self.deposit(n, owner_share=share, guarantee=guarantee, **changes)

    def lease(self, batch: Batch, users: list[str], token: str | None = None) -> httpx.Response:
        path = f"/batches/{batch.batch_id}/leases"
        return self.call("POST", path, token or self.token, json={"users": users})

    def leases(self, batch: Batch, users: list[str], token: str | None = None) -> list[Lease]:
        answer = self.lease(batch, users, token).json()
        assert not answer["refused"], answer
        return [Lease(**lease) for lease in answer["leases"]]

    def upload(
        self, batch: Batch, frames: list[tuple[str, bytes]], token: str | None = None
    ) -> httpx.Response:
        body = b"".join(bytes.fromhex(lease) + report for lease, report in frames)
        path = f"/batches/{batch.batch_id}/reports"
        return self.call("POST", path, token or self.token, content=body)

    def outcomes(
        self, batch: Batch, frames: list[tuple[str, bytes]], token: str | None = None
    ) -> list[str]:
        answer = self.upload(batch, frames, token)
        assert answer.status_code == 200, answer.text
        return [result["outcome"] for result in answer.json()["results"]]

    def fill(self, batch: Batch, first_user: int = 0) -> list[bytes]:
        """Fill a batch; returns every message that was sent in, in the order of the users."""
        n = batch.context.descriptor.n
        users = [user(first_user + i) for i in range(n)]
        sent = [batch.messages() for _ in range(n)]
        frames = [
            (lease.lease, batch.report(messages))
            for lease, messages in zip(self.leases(batch, users), sent, strict=True)
        ]
        assert self.outcomes(batch, frames) == ["accepted"] * n
        return batch.rows(b"".join(sent))

    def status(self, batch: Batch, token: str = OPERATOR_TOKEN, **query: Any) -> dict[str, Any]:
        path = f"/batches/{batch.batch_id}/status"
        answer: dict[str, Any] = self.call("GET", path, token, params=query).json()
        return answer

    def abandon(self, batch: Batch, token: str = COORDINATOR_TOKEN) -> httpx.Response:
        return self.call("POST", f"/batches/{batch.batch_id}/abandon", token)

    def messages(self, batch: Batch) -> httpx.Response:
        return self.call("GET", f"/batches/{batch.batch_id}/messages", COORDINATOR_TOKEN)

    def acknowledge(self, batch: Batch, sha256: str) -> httpx.Response:
        path = f"/batches/{batch.batch_id}/acknowledgement"
        return self.call("POST", path, COORDINATOR_TOKEN, json={"messages_sha256": sha256})

    def finish(self, batch: Batch) -> list[bytes]:
        """Take a sealed batch's messages, acknowledge them, return them."""
        answer = self.messages(batch)
        assert answer.status_code == 200, answer.text
        done = self.acknowledge(batch, answer.headers[DIGEST_HEADER])
        assert done.json()["state"] == "erased", done.text
        return batch.rows(answer.content)


def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def only_signals_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps waiters from checking again by themselves."""
    for pause in ("RECHECK_SECONDS", "IDLE_RECHECK_SECONDS"):
        monkeypatch.setattr(f"riffle.shuffler.waiting.{pause}", 3_600.0)


both_engines = pytest.mark.parametrize("store_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def store_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """A PostgreSQL database where a test asks for it; else the default, a file of SQLite's."""
    if getattr(request, "param", "sqlite") == "sqlite":
        yield None
        return
    with request.getfixturevalue("cluster").database("shuffler") as url:
        yield url


both_aggregations = pytest.mark.parametrize("aggregation", ["messages", "sums"], indirect=True)


@pytest.fixture
def aggregation(request: pytest.FixtureRequest) -> str:
    """The aggregation of batches that `Api.deposit` makes."""
    return str(getattr(request, "param", "messages"))


@pytest.fixture
def api(tmp_path: Path, store_url: str | None, aggregation: str) -> Iterator[Api]:
    with ExitStack() as stack:
        yield Api(tmp_path, stack, store_url, aggregation)


def problem(answer: httpx.Response) -> str:
    """Slug of a problem document."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"]).rpartition(":")[2]
