"""The operator's client of the coordinator's REST API: the same words, a method for every route.

    from deploy.operator import Operator

    with Operator.of(Path("network"), "http://127.0.0.1:8400") as operator:
        run = operator.create_run(spec)
        for event in operator.events(run["id"]):
            ...
        print(operator.result(run["id"])["policy"])

Answers are the documents of the REST reference (docs/rest.md), as dictionaries. ``riffle list``,
``show``, ``log``, ``stop``, ``deploy`` and ``conservation`` are these methods on the command line.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import httpx

from riffle.common.process.plugins import suggestion
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.specs import ManualDeployment, RunSpec, Truth
from riffle.deploy.network.secrets import (
    TOKEN_FILE,
    URL_FILE,
    operator_client,
    operator_token,
    refusal,
)

COORDINATOR_URL = "http://127.0.0.1:8400"
RETRY_SECONDS = 0.5
MOST_DIGITS = 18
UNSETTLED = {"issued", "open", "sealed"}
FINISHED = "run_finished"
LAST_EVENTS = {FINISHED, "run_failed", "run_stopped"}

NOT_MODIFIED = 304

Answer = dict[str, Any]
Table = Literal["stages", "ledger", "deployments", "conservation"]


class Operator:
    """Creates runs, watches them and deploys policies. Use as a context manager.

    While it follows events a coordinator may be away for ``patience`` seconds.
    """

    def __init__(self, client: httpx.Client, patience: float = 60.0) -> None:
        self._client = client
        self._patience = patience

    @classmethod
    def of(cls, network: Path, url: str | None = None) -> Self:
        """The operator of a network, with the token in the folder of its secrets.

        Without ``url``: where the folder says, as that of ``riffle up`` does, or this machine.

        Raises:
            LocalError: ``unavailable``, there is no such token.
            ValueError: the address is none, or neither TLS nor this machine.
        """
        token, told = operator_token(network, TOKEN_FILE), network / "operator" / URL_FILE
        base = url or (told.read_text() if told.exists() else COORDINATOR_URL)
        return cls(operator_client(network, base, token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        return self._list("/v1/runs", "runs")

    def run(self, run_id: str) -> Answer:
        """One run and how far it is."""
        return self._ask("GET", f"/v1/runs/{run_id}")

    def find(self, words: str) -> Answer:
        """The run that is meant: by its id, the beginning of its id, or its name.

        Raises:
            LocalError: ``unknown-run``: none, with the nearest; or several.
        """
        runs = self.runs()
        found = [
            run
            for run in runs
            if words and (run["name"] == words or run["id"].startswith(words))  # "" begins all
        ]
        if len(found) == 1:
            return found[0]
        if not found:
            hint = suggestion(words, {text for run in runs for text in (run["name"], run["id"])})
            raise LocalError(
                "unknown-run", f"there is no run {words!r}{hint or '; see riffle list'}"
            )
        ids = ", ".join(run["id"] for run in found)
        raise LocalError("unknown-run", f"{words!r} may mean {len(found)} runs; say which of {ids}")

    def stop(self, run_id: str) -> Answer:
        """Stop a run; its open batch is abandoned."""
        return self._ask("POST", f"/v1/runs/{run_id}/stop")

    def deploy(self, run_id: str, deployment: ManualDeployment | Answer) -> Answer:
        """Deploy a policy or a mixture by hand, in manual mode.

        A dictionary has the fields of a `ManualDeployment`, as ``{"policy": [[1, 1]], "episodes":
        1000}``.
        """
        if isinstance(deployment, dict):
            body = json.dumps(deployment)
        else:
            body = deployment.model_dump_json(exclude_none=True)
        return self._ask("POST", f"/v1/runs/{run_id}/deployments", content=body)

    def wait(self, run_id: str, index: int, poll: float = 0.3) -> Answer:
        """A deployment as soon as its batch is counted, or was given up and not issued again."""
        while True:
            found = self.deployment(run_id, index)
            again = [
                row["index"] for row in self.deployments(run_id) if row["step"] == found["step"]
            ]
            if found["state"] not in UNSETTLED and again[-1] == index:
                return found
            index = again[-1]
            time.sleep(poll)

    def deployments(self, run_id: str) -> list[Answer]:
        """All deployments in order, with their mixtures, without their counts."""
        return self._list(f"/v1/runs/{run_id}/deployments", "deployments")

    def newest(self, run_id: str, known: int | None = None, wait: float = 0.0) -> Answer | None:
        """The newest deployment; None when that is ``known`` still, after ``wait`` seconds of 30.

        Raises:
            RemoteError: ``unknown-deployment``: there is none yet.
        """
        headers = {} if known is None else {"If-None-Match": f'"{known}"'}
        path = f"/v1/runs/{run_id}/deployment"
        answer = self._request("GET", path, params={"wait": wait}, headers=headers)
        return None if answer.status_code == NOT_MODIFIED else _object(answer.content)

    def deployment(self, run_id: str, index: int) -> Answer:
        """A deployment with its private counts and the mixture's value estimate."""
        return self._ask("GET", f"/v1/runs/{run_id}/deployments/{index}")

    def stages(self, run_id: str) -> list[Answer]:
        """Finished stages."""
        return self._list(f"/v1/runs/{run_id}/stages", "stages")

    def ledger(self, run_id: str) -> Answer:
        """What was spent."""
        return self._ask("GET", f"/v1/runs/{run_id}/ledger")

    def result(self, run_id: str) -> Answer:
        """The answer so far, its cost, and where the time went."""
        return self._ask("GET", f"/v1/runs/{run_id}/result")

    def conservation(self, run_id: str) -> Answer:
        """Where every message of a run went: accepted, held, forwarded, dropped, opened, failed."""
        return self._ask("GET", f"/v1/runs/{run_id}/conservation")

    def csv(self, run_id: str, table: Table) -> str:
        """A table of a run as CSV, a row a stage, spend, deployment, or batch."""
        return self._request("GET", f"/v1/runs/{run_id}/{table}.csv").text

    def supply_truth(self, run_id: str, truth: Truth) -> None:
        """Supply true values of deployments; only who simulates the environment knows them."""
        content = truth.model_dump_json()
        self._request("POST", f"/v1/runs/{run_id}/truth", content=content)

    def truth(self, run_id: str) -> Answer:
        """Exact regret and value where true values were supplied, with bands over like runs."""
        return self._ask("GET", f"/v1/runs/{run_id}/truth")

    def keys(self) -> list[Answer]:
        """The analyzer's keys, oldest first, without their private halves."""
        return self._list("/v1/keys", "keys")

    def make_key(self) -> Answer:
        """A pending analyzer key; the one that is pending already, if any."""
        return self._ask("POST", "/v1/keys")

    def activate_key(self, key_id: str) -> Answer:
        """Seal new batches to a pending key; pin it at nodes and shuffler before."""
        return self._ask("POST", f"/v1/keys/{key_id}/activate")

    def history(self, run_id: str, after: int = 0) -> list[Answer]:
        """Events so far, those numbered above ``after``, in one answer."""
        return self._list(f"/v1/runs/{run_id}/history", "events", {"after": after})

    def events(self, run_id: str, *, follow: bool = True) -> Iterator[Answer]:
        """Events until the run is over, taken up again where a connection broke.

        Without ``follow`` those so far.
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
            except httpx.HTTPError as error:
                self._wait_alive(error)
            time.sleep(RETRY_SECONDS)  # whoever lives and ends every stream is not asked at once

    def _stream(self, run_id: str, last: int, follow: bool) -> Iterator[Answer]:
        headers, asked = {"Last-Event-ID": str(last)}, {"follow": follow}
        path = f"/v1/runs/{run_id}/events"
        with self._client.stream("GET", path, headers=headers, params=asked) as answer:
            if answer.is_error:
                answer.read()
                raise refusal(answer, "the coordinator")
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(":")
                if line:
                    fields[name] = value.strip()
                elif "data" in fields:
                    yield _event(fields)
                    fields = {}

    def _wait_alive(self, cause: httpx.HTTPError) -> None:
        """Wait while the coordinator is away, as when it is started again; not for ever."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._client.get("/livez").raise_for_status()
            except httpx.HTTPError as error:
                if time.monotonic() >= deadline:
                    raise self._away(cause) from error
                time.sleep(RETRY_SECONDS)
            else:
                return

    def _away(self, cause: httpx.HTTPError) -> LocalError:
        return LocalError(
            "unavailable",
            f"the coordinator at {self._client.base_url} does not answer: {cause}; has its network "
            "ended, or is it starting? That of 'riffle up' is there once it says so, and ends with "
            "its run, unless --keep is said",
        )

    def _ask(self, method: str, path: str, content: str | None = None) -> Answer:
        return _object(self._request(method, path, content=content).content)

    def _list(self, path: str, name: str, params: Mapping[str, int] | None = None) -> list[Answer]:
        found = _object(self._request("GET", path, params=params).content).get(name)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise RemoteError("malformed", f"the coordinator's answer has no list of {name}")
        return found

    def _request(
        self,
        method: str,
        path: str,
        *,
        content: str | None = None,
        params: Mapping[str, float] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        try:
            answer = self._client.request(
                method, path, content=content, params=params, headers=headers
            )
        except httpx.HTTPError as error:
            raise self._away(error) from error
        if answer.is_error:
            raise refusal(answer, "the coordinator")
        return answer


def _event(fields: dict[str, str]) -> Answer:
    number = fields.get("id", "0")
    if not (number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS):
        raise RemoteError("malformed", f"the coordinator numbers an event {number!r}")
    data = _object(fields["data"].encode())
    return {"id": number, "kind": fields.get("event", ""), "data": data}


def _object(text: bytes) -> Answer:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteError("malformed", "the coordinator's answer is not JSON") from error
    if not isinstance(document, dict):
        raise RemoteError("malformed", "the coordinator's answer is not a JSON object")
    return document
