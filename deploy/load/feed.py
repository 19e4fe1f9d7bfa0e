"""Keeps a batch open: manual runs that deploy a constant policy again and again.

Two runs take turns, so that one batch fills while the coordinator opens the other. When opening is
slower than filling no batch is open for a while, which is what the load is there to show.

Enrolment of a generator's nodes, many at a time, and their revocation when it ends.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.common.protocol.messages import EnrolRequest
from riffle.coordinator.specs import MANUAL, ManualDeployment, RunSpec
from riffle.deploy.network.secrets import (
    SHUFFLER_TOKEN_FILE,
    async_operator_client,
    enrolled,
    operator_token,
    refusal,
)
from riffle.deploy.operator import LAST_EVENTS, Operator
from riffle.node_client.settings import Credential

LANES = 2
READY_SECONDS = 60.0
LEAVE_SECONDS = 10.0
SETTLE_PAUSE_SECONDS = 0.5
MOST_EPISODES = 1 << 40


class Feeder:
    """Deployments of ``n`` episodes in `LANES` runs, while the context lasts.

    Raises:
        LocalError: no batch could be opened, with the coordinator's reason.
    """

    def __init__(self, connect: Callable[[], Operator], spec: RunSpec, n: int) -> None:
        self._connect, self._spec, self._n = connect, spec, n
        self._runs: list[str] = []
        self._open = threading.Barrier(LANES + 1)
        self._threads: list[threading.Thread] = []
        self.trouble: str | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._open.abort()
            self.stop()
            raise
        return self

    def _start(self) -> None:
        with self._connect() as operator:
            for lane in range(LANES):
                spec = self._spec.model_copy(update={"name": f"load-{lane + 1}"})
                self._runs.append(str(operator.create_run(spec)["id"]))
        for run_id in self._runs:
            thread = threading.Thread(target=self._lane, args=(run_id,), daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            self._open.wait(READY_SECONDS)
        except threading.BrokenBarrierError as error:
            raise LocalError("unavailable", self.trouble or "no batch was opened") from error

    def __exit__(self, *_: object) -> None:
        self.stop()

    def settle(self, seconds: float, noted: Sequence[int] = ()) -> None:
        """Wait, so long at most, until no batch is full and not counted, or a signal is noted."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not noted:
            time.sleep(SETTLE_PAUSE_SECONDS)
            if all(batch["state"] != "sealed" for batch in self.batches()):
                return

    def stop(self) -> None:
        """Stop the runs; what is open is abandoned."""
        with self._connect() as operator:
            for run_id in self._runs:
                try:
                    operator.stop(run_id)
                except RiffleError as error:
                    self.trouble = self.trouble or error.detail
        for thread in self._threads:
            thread.join(LEAVE_SECONDS)

    def batches(self) -> list[dict[str, Any]]:
        """Every batch so far: its run, sizes, state and timings."""
        with self._connect() as operator:
            rows = [(run_id, row) for run_id in self._runs for row in operator.deployments(run_id)]
        return [
            {
                "run": run_id,
                "index": row["index"],
                "reports": row["n"],
                "messages": row["n"] * row["messages"],
                "state": row["state"],
                **{f"{kind}_seconds": seconds for kind, seconds in row["timings"].items()},
            }
            for run_id, row in rows
        ]

    def _lane(self, run_id: str) -> None:
        try:
            with self._connect() as operator:
                self._deploy(operator, run_id)
                self._open.wait(READY_SECONDS)
                for event in operator.events(run_id):
                    if event["kind"] == "batch_counted":
                        self._deploy(operator, run_id)
                    elif event["kind"] in LAST_EVENTS:
                        return
        except RiffleError as error:
            self.trouble = error.detail
            self._open.abort()
        except threading.BrokenBarrierError:
            return

    def _deploy(self, operator: Operator, run_id: str) -> None:
        row = tuple(0 for _ in range(self._spec.states))
        policy = tuple(row for _ in range(self._spec.horizon))
        operator.deploy(run_id, ManualDeployment(policy=policy, episodes=self._n))


def load_spec(base: RunSpec) -> RunSpec:
    """A manual run of the base's environment and guarantee that never ends by itself."""
    fields = {"name": "load", "learner": MANUAL, "episodes": MOST_EPISODES, "options": {}}
    return RunSpec.model_validate(base.model_dump() | fields)


AT_ONCE = 16
USERS = 1 << 40

A = TypeVar("A")
T = TypeVar("T")


def enrol_nodes(
    secrets: Path, url: str, count: int, on_node: Callable[[], None]
) -> list[Credential]:
    """Credentials of ``count`` new nodes; they are kept nowhere. ``on_node`` is called after each.

    Raises:
        RemoteError: the shuffler refused.
        LocalError: ``unavailable``, it does not answer.
    """

    async def one(client: httpx.AsyncClient, number: int) -> Credential:
        request = EnrolRequest(name=f"load-{number + 1}", users=USERS)
        made = enrolled(await client.post("/v1/nodes", content=request.model_dump_json()))
        on_node()
        return Credential(node_id=made.node_id, token=made.token)

    return _each(secrets, url, range(count), one)


def revoke_nodes(secrets: Path, url: str, members: list[Credential]) -> None:
    """Refuse these nodes from now on. Raises as `enrol_nodes` does."""

    async def one(client: httpx.AsyncClient, member: Credential) -> None:
        answer = await client.delete(f"/v1/nodes/{member.node_id}")
        if answer.is_error:
            raise refusal(answer, "the shuffler")

    _each(secrets, url, members, one)


def _each(
    secrets: Path,
    url: str,
    arguments: Iterable[A],
    one: Callable[[httpx.AsyncClient, A], Awaitable[T]],
) -> list[T]:
    """Ask for each, `AT_ONCE` at a time, as the shuffler's operator."""
    token = operator_token(secrets, SHUFFLER_TOKEN_FILE)

    async def all_of_them() -> list[T]:
        room = asyncio.Semaphore(AT_ONCE)
        async with async_operator_client(secrets, url, token) as client:

            async def in_turn(argument: A) -> T:
                async with room:
                    return await one(client, argument)

            return list(await asyncio.gather(*map(in_turn, arguments)))

    try:
        return asyncio.run(all_of_them())
    except httpx.HTTPError as error:
        raise LocalError("unavailable", f"the shuffler does not answer: {error}") from error
