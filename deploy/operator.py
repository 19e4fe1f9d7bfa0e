"""The operator's client of the coordinator's REST API: the same words, one method a route."""

import json
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from common.errors import LocalError
from coordinator.specs import ManualDeployment, RunSpec, Truth
from deploy.network import refusal

RETRY_SECONDS = 0.5
LAST_EVENTS = {"run_finished", "run_failed", "run_stopped"}

Answer = dict[str, Any]


class Operator:
    """Creates runs, watches them and deploys policies. Use as a context manager.

    While it follows events a coordinator may be away for ``patience`` seconds.
    """

    def __init__(self, client: httpx.Client, patience: float = 60.0) -> None:
        self._client = client
        self._patience = patience

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def create_run(self, spec: RunSpec) -> Answer:
        """Create a run and start it.

        Raises:
            RemoteError: the spec is refused, with the coordinator's reason.
            LocalError: ``unavailable``, the coordinator does not answer.
        """
        return self._ask("POST", "/v1/runs", content=spec.model_dump_json())

    def runs(self) -> list[Answer]:
        """All runs, oldest first."""
        found: list[Answer] = self._ask("GET", "/v1/runs")["runs"]
        return found

    def run(self, run_id: str) -> Answer:
        """One run and how far it is."""
        return self._ask("GET", f"/v1/runs/{run_id}")

    def stop(self, run_id: str) -> Answer:
        """Stop a run; its open batch is abandoned."""
        return self._ask("POST", f"/v1/runs/{run_id}/stop")

    def deploy(self, run_id: str, deployment: ManualDeployment) -> Answer:
        """Deploy a policy or a mixture by hand, in manual mode."""
        body = deployment.model_dump_json(exclude_none=True)
        return self._ask("POST", f"/v1/runs/{run_id}/deployments", content=body)

    def deployments(self, run_id: str) -> list[Answer]:
        """All deployments in order, with their mixtures, without their counts."""
        found: list[Answer] = self._ask("GET", f"/v1/runs/{run_id}/deployments")["deployments"]
        return found

    def deployment(self, run_id: str, index: int) -> Answer:
        """A deployment with its private counts and the mixture's value estimate."""
        return self._ask("GET", f"/v1/runs/{run_id}/deployments/{index}")

    def stages(self, run_id: str) -> list[Answer]:
        """Finished stages."""
        found: list[Answer] = self._ask("GET", f"/v1/runs/{run_id}/stages")["stages"]
        return found

    def ledger(self, run_id: str) -> Answer:
        """What was spent."""
        return self._ask("GET", f"/v1/runs/{run_id}/ledger")

    def result(self, run_id: str) -> Answer:
        """The answer so far, its cost, and where the time went."""
        return self._ask("GET", f"/v1/runs/{run_id}/result")

    def conservation(self, run_id: str) -> Answer:
        """Where every message of a run went: accepted, held, forwarded, dropped, opened, failed."""
        return self._ask("GET", f"/v1/runs/{run_id}/conservation")

    def supply_truth(self, run_id: str, truth: Truth) -> None:
        """Supply true values of deployments; only who simulates the environment knows them."""
        content = truth.model_dump_json()
        self._request("POST", f"/v1/runs/{run_id}/truth", content)

    def truth(self, run_id: str) -> Answer:
        """Exact regret and value where true values were supplied, with bands over like runs."""
        return self._ask("GET", f"/v1/runs/{run_id}/truth")

    def events(self, run_id: str) -> Iterator[Answer]:
        """Events until the run is over; taken up again where a connection broke."""
        last = 0
        while True:
            try:
                for event in self._stream(run_id, last):
                    last = int(event["id"])
                    yield event
                    if event["kind"] in LAST_EVENTS:
                        return
            except httpx.HTTPError as error:
                self._wait_alive(error)

    def _stream(self, run_id: str, last: int) -> Iterator[Answer]:
        headers = {"Last-Event-ID": str(last)}
        path = f"/v1/runs/{run_id}/events"
        with self._client.stream("GET", path, headers=headers) as answer:
            if answer.is_error:
                answer.read()
                raise refusal(answer, "the coordinator")
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(":")
                if line:
                    fields[name] = value.strip()
                elif "data" in fields:
                    yield {
                        "id": fields.get("id", "0"),
                        "kind": fields.get("event", ""),
                        "data": json.loads(fields["data"]),
                    }
                    fields = {}

    def _wait_alive(self, cause: httpx.HTTPError) -> None:
        """Wait while the coordinator is away, as when it is started again; not for ever."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._client.get("/livez").raise_for_status()
            except httpx.HTTPError as error:
                if time.monotonic() >= deadline:
                    detail = f"the coordinator does not answer: {cause}"
                    raise LocalError("unavailable", detail) from error
                time.sleep(RETRY_SECONDS)
            else:
                return

    def _ask(self, method: str, path: str, content: str | None = None) -> Answer:
        document: Answer = self._request(method, path, content).json()
        return document

    def _request(self, method: str, path: str, content: str | None) -> httpx.Response:
        try:
            answer = self._client.request(method, path, content=content)
        except httpx.HTTPError as error:
            raise LocalError(
                "unavailable",
                f"the coordinator at {self._client.base_url} does not answer: {error}",
            ) from error
        if answer.is_error:
            raise refusal(answer, "the coordinator")
        return answer
