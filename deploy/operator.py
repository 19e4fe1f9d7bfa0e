"""The operator's client of the coordinator's REST API, with a method for every route."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import httpx

from riffle.common.process.endpoint import NOBODY_LISTENS
from riffle.common.process.plugins import suggestion
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.specs import ManualDeployment, RunSpec, TrueValueSpec
from riffle.deploy.network.secrets import (
    TOKEN_FILE,
    URL_FILE,
    address,
    ask,
    find_id,
    operator_client,
    operator_token,
    read_nothing,
    refusal,
)
from riffle.deploy.output import RunError

RETRY_SECONDS = 0.5
FOREIGN_SECONDS = 2.0
"""Time for which a request is repeated while something other than the coordinator answers."""
SILENT_SECONDS = 10.0
"""A stream that is silent for this long is opened again, after the run's state is read."""
EVENT_STREAM = "text/event-stream"
MOST_DIGITS = 18
UNSETTLED = {"issued", "open", "sealed"}
FINISHED = "run_finished"
LAST_EVENTS = {FINISHED, "run_failed", "run_stopped"}

NOT_MODIFIED = 304
COORDINATOR = "the coordinator"
ADVICE = (
    "; has its network ended, or is it starting? The network of 'riffle up' answers once it says "
    "so, and ends with its run unless --keep is given"
)
T = TypeVar("T")

Answer = dict[str, Any]
Table = Literal["stages", "ledger", "deployments", "conservation"]


class Operator:
    """Creates runs, follows them and deploys policies. Use it as a context manager.

    Answers are the documents of the REST reference (docs/rest.md), as dictionaries. Every method
    raises RemoteError, with the reason, if the coordinator refuses the request. Every method raises
    LocalError ``unavailable`` if the coordinator does not answer. Once `events` has lost its
    stream, every request waits up to ``patience`` seconds for an answer.
    """

    def __init__(self, client: httpx.Client, patience: float = 60.0) -> None:
        self._client = client
        self._patience = patience
        self._following = False

    @classmethod
    def of(cls, network: Path, url: str | None = None) -> Self:
        """Returns the operator of a network, with the token in its secrets folder.

        If ``url`` is None, uses the address in the folder. If the folder has no address, uses the
        default port on this machine. Raises LocalError ``unavailable`` if there is no token. Raises
        ValueError if the address is malformed, or is http and not on this machine.
        """
        token = operator_token(network, TOKEN_FILE)
        return cls(operator_client(network, address(network, URL_FILE, url), token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def create_run(self, spec: RunSpec) -> Answer:
        """Creates and starts a run. A repetition of the request creates no second run."""
        named = spec.model_copy(update={"run_id": spec.run_id or secrets.token_hex(16)})
        return self._call("POST", "/v1/runs", "spec", content=named.model_dump_json())

    def runs(self) -> list[Answer]:
        """Returns all runs, oldest first."""
        return self._list("/v1/runs", "runs")

    def run(self, run_id: str) -> Answer:
        """Returns a run with its progress."""
        return self._call("GET", f"/v1/runs/{run_id}", "spec")

    def find(self, text: str) -> Answer:
        """Returns the run with this name, this id, or an id that begins with this text.

        Raises LocalError ``unknown-run`` if there is no such run, or several.
        """
        runs = {run["id"]: run for run in self.runs()}
        names = {run_id: run["name"] for run_id, run in runs.items()}
        hint = suggestion(text, {*names, *names.values()}) or "; see riffle list"
        none = LocalError("unknown-run", f"there is no run {text!r}{hint}")
        return runs[find_id(text, names, none, "runs")]

    def stop(self, run_id: str) -> Answer:
        """Stops a run. The coordinator abandons the run's open batch."""
        return self._call("POST", f"/v1/runs/{run_id}/stop", "spec")

    def deploy(self, run_id: str, deployment: ManualDeployment | Answer) -> Answer:
        """Deploys a policy or a mixture in a run with the learner `manual`.

        A dictionary has the fields of a `ManualDeployment`, for instance ``{"policy": [[1, 1]],
        "episodes": 1000}``. If there is a ``step``, the request is safe to repeat.
        """
        if not isinstance(deployment, dict):
            deployment = deployment.model_dump(mode="json", exclude_none=True)
        path, body = f"/v1/runs/{run_id}/deployments", json.dumps(deployment)
        once = deployment.get("step") is None
        return self._ask("POST", path, _with("batch_id"), once=once, content=body)

    def wait(self, run_id: str, index: int, poll: float = 0.3) -> Answer:
        """Waits until a deployment's batch is over: counted, rejected or abandoned.

        If the batch is issued again, waits for the new batch and returns its deployment.
        """
        while True:
            deployment = self.deployment(run_id, index)
            step = deployment["step"]
            newest = [row["index"] for row in self.deployments(run_id) if row["step"] == step][-1]
            if deployment["state"] not in UNSETTLED and newest == index:
                return deployment
            index = newest
            time.sleep(poll)

    def deployments(self, run_id: str) -> list[Answer]:
        """Returns all deployments in order, with their mixtures but without their counts."""
        return self._list(f"/v1/runs/{run_id}/deployments", "deployments")

    def newest(self, run_id: str, known: int | None = None, wait: float = 0.0) -> Answer | None:
        """Returns the newest deployment, or None if its index is still ``known``.

        The coordinator waits up to ``wait`` seconds (at most 30) for a newer deployment. Raises
        RemoteError ``unknown-deployment`` if there is no deployment yet.
        """
        headers = {} if known is None else {"If-None-Match": f'"{known}"'}
        path = f"/v1/runs/{run_id}/deployment"

        def read(answer: httpx.Response) -> Answer | None:
            return None if answer.status_code == NOT_MODIFIED else _with("batch_id")(answer)

        return self._ask("GET", path, read, params={"wait": wait}, headers=headers)

    def deployment(self, run_id: str, index: int) -> Answer:
        """Returns a deployment with its private counts and its mixture's estimated value."""
        return self._call("GET", f"/v1/runs/{run_id}/deployments/{index}", "batch_id")

    def stages(self, run_id: str) -> list[Answer]:
        """Returns the finished stages."""
        return self._list(f"/v1/runs/{run_id}/stages", "stages")

    def ledger(self, run_id: str) -> Answer:
        """Returns the ledger: each batch's spend, and the run's guarantee."""
        return self._call("GET", f"/v1/runs/{run_id}/ledger", "entries")

    def result(self, run_id: str) -> Answer:
        """Returns the current policy, its estimated value, the run's cost, and timings."""
        return self._call("GET", f"/v1/runs/{run_id}/result", "policy")

    def conservation(self, run_id: str) -> Answer:
        """Returns each batch's numbers of messages: accepted, held, forwarded, opened and so on."""
        return self._call("GET", f"/v1/runs/{run_id}/conservation", "batches")

    def csv(self, run_id: str, table: Table) -> str:
        """Returns a table of a run as CSV: a row per stage, ledger entry, deployment or batch."""
        return self._ask("GET", f"/v1/runs/{run_id}/{table}.csv", _csv)

    def supply_true_values(self, run_id: str, values: TrueValueSpec) -> None:
        """Supplies true values of deployments in a simulated environment."""
        content = values.model_dump_json()
        path = f"/v1/runs/{run_id}/truth"
        self._ask("POST", path, read_nothing, content=content)

    def true_values(self, run_id: str) -> Answer:
        """Returns regret and value from true values, with bands over runs that differ in seeds."""
        return self._call("GET", f"/v1/runs/{run_id}/truth", "regret")

    def keys(self) -> list[Answer]:
        """Returns the analyzer's keys, oldest first, without their private halves."""
        return self._list("/v1/keys", "keys")

    def make_key(self) -> Answer:
        """Creates a pending analyzer key. If there is a pending key already, returns that key."""
        return self._call("POST", "/v1/keys", "public")

    def activate_key(self, key_id: str) -> Answer:
        """Seals new batches to a pending key. Nodes and shuffler must already have pinned it."""
        return self._call("POST", f"/v1/keys/{key_id}/activate", "public")

    def history(self, run_id: str, after: int = 0) -> list[Answer]:
        """Returns the past events from number ``after`` + 1 on."""
        return self._list(f"/v1/runs/{run_id}/history", "events", {"after": after})

    def events(
        self, run_id: str, *, follow: bool = True, on_run: Callable[[Answer], None] = lambda _: None
    ) -> Iterator[Answer]:
        """Yields events until the run is over; without ``follow``, only past events.

        If the stream ends or is silent for a while, calls ``on_run`` with the run, then resumes the
        stream after the last event. Raises RunError if the run is gone because the coordinator's
        store was restored.
        """
        last = 0
        while True:
            try:
                for event in self._stream(run_id, last, follow):
                    last = int(event["id"])
                    yield event
                    if event["kind"] in LAST_EVENTS:
                        return
                if not follow:
                    return
            except (httpx.HTTPError, LocalError):
                pass  # the run's document tells more than a broken stream
            self._following = True
            try:
                run = self.run(run_id)
            except RemoteError as error:
                if error.slug != "unknown-run":
                    raise
                lost = f"run {run_id} is gone: was the coordinator's store restored?"
                raise RunError(error.slug, lost) from error
            on_run(run)
            if run["state"] != "running":
                yield from self.history(run_id, last)
                return
            time.sleep(RETRY_SECONDS)  # pause, in case the coordinator ends every stream

    def _stream(self, run_id: str, last: int, follow: bool) -> Iterator[Answer]:
        headers, params = {"Last-Event-ID": str(last)}, {"follow": follow}
        path = f"/v1/runs/{run_id}/events"
        with self._client.stream(
            "GET", path, headers=headers, params=params, timeout=SILENT_SECONDS
        ) as answer:
            if answer.is_error:
                answer.read()
                raise refusal(f"{COORDINATOR} at {self._client.base_url}", answer)
            if not answer.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                return  # not the coordinator's answer: the caller reads the run's document
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(":")
                if line:
                    fields[name] = value.strip()
                elif "data" in fields:
                    yield _event(fields)
                    fields = {}

    def _call(self, method: str, path: str, key: str, content: str | None = None) -> Answer:
        """Sends a request to the coordinator; returns its answer, a document with ``key``."""
        return self._ask(method, path, _with(key), content=content)

    def _list(self, path: str, name: str, params: Mapping[str, int] | None = None) -> list[Answer]:
        def read(answer: httpx.Response) -> list[Answer]:
            rows = _with(name)(answer)[name]
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError(f"no list of {name}")
            return rows

        return self._ask("GET", path, read, params=params)

    def _ask(
        self,
        method: str,
        path: str,
        read: Callable[[httpx.Response], T],
        *,
        once: bool = False,
        **details: Any,  # noqa: ANN401  (httpx's content, params and headers)
    ) -> T:
        """Sends a request to the coordinator; returns the answer, parsed by ``read``.

        If something other than the coordinator answers, such as a proxy, and ``once`` is false,
        repeats the request for a while. While a run is followed, also repeats a request that
        nothing answers.
        """
        patience = self._patience if self._following else min(self._patience, FOREIGN_SECONDS)
        deadline = time.monotonic() + patience
        while True:
            try:
                return ask(self._client, COORDINATOR, read, method, path, **details)
            except LocalError as error:
                away = isinstance(error.__cause__, httpx.HTTPError)
                late = time.monotonic() + RETRY_SECONDS > deadline
                if away and (late or not self._following):
                    advice = ADVICE if NOBODY_LISTENS in error.detail else ""
                    raise LocalError(error.slug, error.detail + advice) from error
                if once or late:
                    raise
            time.sleep(RETRY_SECONDS)


def _event(fields: dict[str, str]) -> Answer:
    number = fields.get("id", "0")
    if not (number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS):
        raise LocalError("unavailable", f"the coordinator numbers an event {number!r}")
    try:
        data = json.loads(fields["data"])
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise LocalError("unavailable", f"the coordinator's event {number} is not a JSON object")
    return {"id": number, "kind": fields.get("event", ""), "data": data}


def _csv(answer: httpx.Response) -> str:
    if not answer.headers.get("Content-Type", "").startswith("text/csv"):
        raise ValueError("not a table")
    return answer.text


def _with(key: str) -> Callable[[httpx.Response], Answer]:
    """Returns a function that reads a document; raises ValueError if the document lacks ``key``."""

    def read(answer: httpx.Response) -> Answer:
        document = json.loads(answer.content)
        if isinstance(document, dict) and key in document:
            return document
        raise ValueError(f"not an object with {key}")

    return read
