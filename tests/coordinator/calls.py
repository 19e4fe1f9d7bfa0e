"""A running coordinator behind a test client."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from riffle.common.protocol.errors import URN
from riffle.coordinator.app import create_app
from tests.coordinator.world import RUN, SMALL, TOKEN, FakeShuffler, analyzer, registry, settings

Answer = Any  # of the test client, whose types are not exported


class Api:
    """A running coordinator. ``restart`` stops it and starts another on the same directory."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.shuffler = FakeShuffler()
        self.analyzer = analyzer
        self.clock: Callable[[], float] = time.time
        self.client = self.start()

    def now(self) -> float:
        return self.clock()

    def start(self, **changes: Any) -> TestClient:
        app = create_app(
            settings(self.directory, **changes),
            shuffler=self.shuffler,
            registry=registry(),
            analyzer=self.analyzer(),
            clock=self.now,
        )
        return self._stack.enter_context(TestClient(app, raise_server_exceptions=False))

    def restart(self, **changes: Any) -> None:
        self._stack.close()
        self.client = self.start(**changes)

    def call(self, method: str, path: str, **rest: Any) -> Answer:
        headers = {"Authorization": f"Bearer {TOKEN}", **rest.pop("headers", {})}
        return self.client.request(method, f"/v1/runs{path}", headers=headers, **rest)

    def get(self, path: str, **rest: Any) -> Any:
        response = self.call("GET", path, **rest)
        assert response.status_code == 200, response.text
        return response.json()

    def wait_for(self, state: str) -> None:
        self.until(lambda: self.get(f"/{RUN}")["state"] == state)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self) -> None:
        assert self.call("POST", "", json=SMALL).status_code == 201
        self.wait_for("finished")


def problem(response: Answer) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    return response.status_code, document["type"].removeprefix(URN), document["detail"]
