"""The operator's part of a load test: runs that keep a batch open, and nodes' credentials.

Two manual runs deploy a constant policy in turn. If decrypting a batch takes longer than filling
one, no batch is open for a while, and the load test shows this.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.coordinator.specs import MANUAL, ManualDeployment, RunSpec
from riffle.deploy.network.secrets import enrol_node, revoke_node, shuffler_operator
from riffle.deploy.operator import LAST_EVENTS, Operator
from riffle.node_client.settings import Credential

RUNS = 2
READY_SECONDS = 60.0
LEAVE_SECONDS = 10.0
SETTLE_PAUSE_SECONDS = 0.5
ENDLESS = 1 << 40
"""Episodes of a run, and users of a node: more than any load test can use up."""
CONCURRENT_REQUESTS = 16


def manual_spec(base: RunSpec, name: str = "load") -> RunSpec:
    """Returns an endless manual run, like ``base`` but with counters for all transitions."""
    fields = {"name": name, "learner": MANUAL, "episodes": ENDLESS, "options": {}, "support": None}
    return RunSpec.model_validate(dict(base) | fields)  # dict(base) keeps nested models


def constant_deployment(spec: RunSpec, episodes: int) -> ManualDeployment:
    """Returns a deployment of the policy that always takes action 0."""
    policy = ((0,) * spec.states,) * spec.horizon
    return ManualDeployment(policy=policy, episodes=episodes)


class Feeder:
    """Keeps deployments of ``n`` episodes open in `RUNS` runs while the context lasts.

    Raises LocalError with the coordinator's reason if no batch could be opened.
    """

    def __init__(self, connect: Callable[[], Operator], spec: RunSpec, n: int) -> None:
        self._connect, self._spec, self._n = connect, spec, n
        self._runs: list[str] = []
        self._open = threading.Barrier(RUNS + 1)
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
            for number in range(1, RUNS + 1):
                spec = self._spec.model_copy(update={"name": f"load-{number}"})
                self._runs.append(str(operator.create_run(spec)["id"]))
        for run_id in self._runs:
            thread = threading.Thread(target=self._feed, args=(run_id,), daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            self._open.wait(READY_SECONDS)
        except threading.BrokenBarrierError as error:
            raise LocalError("unavailable", self.trouble or "no batch was opened") from error

    def __exit__(self, *_: object) -> None:
        self.stop()

    def settle(self, seconds: float, signals: Sequence[int] = ()) -> None:
        """Waits until every full batch is counted, ``seconds`` have passed or a signal has come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not signals:
            time.sleep(SETTLE_PAUSE_SECONDS)
            if all(batch["state"] != "sealed" for batch in self.batches()):
                return

    def stop(self) -> None:
        """Stops the runs; open batches are abandoned."""
        with self._connect() as operator:
            for run_id in self._runs:
                try:
                    operator.stop(run_id)
                except RiffleError as error:
                    self.trouble = self.trouble or error.detail
        for thread in self._threads:
            thread.join(LEAVE_SECONDS)

    def batches(self) -> list[dict[str, Any]]:
        """Returns the run, sizes, state and timings of every batch so far."""
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

    def _feed(self, run_id: str) -> None:
        """Deploys again whenever a batch of this run is counted."""
        try:
            with self._connect() as operator:
                operator.deploy(run_id, constant_deployment(self._spec, self._n))
                self._open.wait(READY_SECONDS)
                for event in operator.events(run_id):
                    if event["kind"] == "batch_counted":
                        operator.deploy(run_id, constant_deployment(self._spec, self._n))
                    elif event["kind"] in LAST_EVENTS:
                        return
        except RiffleError as error:
            self.trouble = error.detail
            self._open.abort()
        except threading.BrokenBarrierError:
            return


def enrol_nodes(
    secrets: Path, url: str, count: int, on_node: Callable[[], None]
) -> list[Credential]:
    """Enrols ``count`` nodes; calls ``on_node`` after each. The credentials are stored nowhere.

    Raises the errors of `enrol_node`.
    """

    def enrol(number: int) -> Credential:
        name = f"load-{number + 1}"
        enrolment = enrol_node(client, name, name, ENDLESS)
        on_node()
        return Credential(**enrolment.model_dump())

    with shuffler_operator(secrets, url) as client, ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        return list(pool.map(enrol, range(count)))


def revoke_nodes(secrets: Path, url: str, nodes: list[Credential]) -> None:
    """Revokes nodes' credentials. Raises the errors of `enrol_node`."""
    with shuffler_operator(secrets, url) as client, ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(lambda node: revoke_node(client, node.node_id), nodes))
