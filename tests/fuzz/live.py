"""Both services on loopback over real HTTP, a run by hand, and nodes that do what a test says."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI

from riffle.common.process.endpoint import server_verification
from riffle.common.process.workers import SPAWN
from riffle.common.protocol.descriptor import Context, SignedDescriptor, parse
from riffle.common.protocol.signatures import batch_id
from riffle.coordinator.app import create_app as coordinator_app
from riffle.node_client.episode import slot_report
from riffle.node_client.sealing import SealKeys, seal_reports
from riffle.shuffler.app import create_app as shuffler_app
from riffle.shuffler.app import release_polls
from tests.coordinator import world as coordinators
from tests.shuffler import world as shufflers
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN

SPEC: dict[str, Any] = {**coordinators.SMALL, "learner": "manual", "episodes": 400}
POLICY = [[0, 1], [1, 0]]
TOKENS = {"shuffler": OPERATOR_TOKEN, "coordinator": coordinators.TOKEN}


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app under uvicorn in a thread; its URL."""
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            if not hasattr(app.state, "coordinator"):
                release_polls(app)
            else:
                app.state.coordinator.signals.close()
            server.should_exit = True
            thread.join()


@dataclass
class Batch:
    """A batch as a node knows it."""

    signed: SignedDescriptor
    context: Context = field(init=False)
    keys: SealKeys = field(init=False)

    def __post_init__(self) -> None:
        self.context = parse(self.signed.descriptor.encode())
        self.keys = SealKeys.of(self.context, bytes.fromhex(self.signed.batch_key))

    @property
    def id(self) -> str:
        return self.context.descriptor.batch_id

    @property
    def n(self) -> int:
        return self.context.descriptor.n

    def honest(self, environment: Any, slot: int = 0) -> bytes:
        """A sealed report as a deployed node makes it."""
        plan = self.context.descriptor
        return self.sealed(slot_report(plan, environment, slot)[1])

    def sealed(self, symbols: Any) -> bytes:
        """A sealed report of these L symbols."""
        return seal_reports(self.keys, np.asarray(symbols)[None])


@dataclass
class Clock:
    """The shuffler's clock: as many seconds ahead as a test says."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass
class Network:
    """A shuffler, a coordinator and an enrolled node."""

    shuffler: str
    coordinator: str
    folder: Path
    clock: Clock
    node: str = ""
    """The node's token."""
    _numbers: Iterator[int] = field(default_factory=count)

    def call(
        self, service: str, method: str, path: str, token: str | None = None, **rest: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token or TOKENS[service]}"} | rest.pop("headers", {})
        url = f"{getattr(self, service)}/v1{path}"
        return httpx.request(
            method, url, headers=headers, timeout=30, verify=server_verification(None), **rest
        )

    def ask(self, service: str, method: str, path: str, **rest: Any) -> Any:
        """The answer to a call that must succeed."""
        answer = self.call(service, method, path, **rest)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def enrol(self, users: int = 10_000) -> str:
        body = {"name": "a node", "owner": f"owner-{next(self._numbers)}", "users": users}
        return str(self.ask("shuffler", "POST", "/nodes", json=body)["token"])

    def users(self, count: int) -> list[str]:
        """Users who were not asked before."""
        return [shufflers.user(next(self._numbers)) for _ in range(count)]

    def run(self, **changes: Any) -> str:
        """A new run's id."""
        run = secrets.token_hex(16)
        self.ask("coordinator", "POST", "/runs", json={**SPEC, "run_id": run, **changes})
        return run

    def deploy(self, run: str | None = None, episodes: int = 20) -> Batch:
        """Deploy by hand, in a run of its own unless told; the batch once nodes can have it."""
        run, body = run or self.run(), {"policy": POLICY, "episodes": episodes}
        index = self.ask("coordinator", "POST", f"/runs/{run}/deployments", json=body)["index"]
        return self.batch(batch_id(run, index))

    def batch(self, wanted: str) -> Batch:
        answer = self.until(
            lambda: self.call("shuffler", "GET", f"/batches/{wanted}", self.node),
            lambda found: found.is_success,
        )
        return Batch(SignedDescriptor.model_validate_json(answer.content))

    def leases(self, batch: Batch, users: list[str], token: str | None = None) -> list[str]:
        path = f"/batches/{batch.id}/leases"
        found = self.ask("shuffler", "POST", path, token=token or self.node, json={"users": users})
        assert not found["refused"], found
        return [lease["lease"] for lease in found["leases"]]

    def upload(
        self, batch: Batch, leases: list[str], reports: list[bytes], token: str | None = None
    ) -> list[str]:
        """Outcomes of the frames."""
        pairs = zip(leases, reports, strict=True)
        body = b"".join(bytes.fromhex(lease) + report for lease, report in pairs)
        path = f"/batches/{batch.id}/reports"
        found = self.ask("shuffler", "POST", path, token=token or self.node, content=body)
        return [result["outcome"] for result in found["results"]]

    def fill(self, batch: Batch, reports: list[bytes]) -> None:
        """Upload reports of new users, by as many owners as their share of a batch takes."""
        slots = batch.context.descriptor.owner_slots
        for part in (reports[i : i + slots] for i in range(0, len(reports), slots)):
            token, users = self.enrol(), self.users(len(part))
            accepted = self.upload(batch, self.leases(batch, users, token), part, token)
            assert accepted == ["accepted"] * len(part)

    def settled(self, batch: Batch) -> dict[str, Any]:
        """A deployment once it is counted or rejected."""
        d = batch.context.descriptor
        path = f"/runs/{d.run_id}/deployments/{d.deployment}"
        found: dict[str, Any] = self.until(
            lambda: self.ask("coordinator", "GET", path),
            lambda answer: answer["state"] in ("counted", "rejected"),
        )
        return found

    def until(self, look: Any, right: Any) -> Any:
        deadline = time.monotonic() + 60
        while not right(found := look()):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found


@contextmanager
def network(folder: Path, **shuffler_settings: Any) -> Iterator[Network]:
    """Both services, their stores in ``folder``; no run yet."""
    demands = {"max_beta": coordinators.SMALL["beta"], **shuffler_settings}
    clock = Clock()
    shuffler = shuffler_app(shufflers.settings(folder, **demands), clock)
    with serving(shuffler) as url:
        share = shuffler_settings.get("max_owner_share", 1.0)
        settings = coordinators.settings(
            folder / "coordinator", shuffler_url=url, max_owner_share=share
        )
        settings.shuffler_token_file.write_text(COORDINATOR_TOKEN)
        app = coordinator_app(
            settings, registry=coordinators.registry(), analyzer=coordinators.analyzer()
        )
        with serving(app) as other:
            made = Network(url, other, folder, clock)
            made.node = made.enrol()
            yield made


@contextmanager
def network_apart(folder: Path, **shuffler_settings: Any) -> Iterator[tuple[Network, int]]:
    """The same in a process of its own, whose memory holds nothing of a test's; and its id."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(there, folder, shuffler_settings))
    process.start()
    there.close()
    try:
        made: Network = here.recv()  # EOFError if it does not come up
        assert process.pid is not None
        yield made, process.pid
    finally:
        here.close()
        process.join()


def _serve(end: Connection, folder: Path, shuffler_settings: dict[str, Any]) -> None:
    """Until the other end of the pipe is closed."""
    with network(folder, **shuffler_settings) as made:
        end.send(made)
        end.poll(None)
