"""Routes of runs: create and stop them, deploy manually, follow them, and read results."""

from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import MAX_EXACT
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.service import (
    MAX_JSON_BYTES,
    declare_problems,
    json_body,
    read_body,
)
from riffle.coordinator.api import models, presentation
from riffle.coordinator.api.access import (
    CoordinatorPart,
    OperatorOnly,
    ShufflerPart,
    SignalsPart,
    StorePart,
)
from riffle.coordinator.api.models import DeploymentProgress
from riffle.coordinator.api.results import shuffler_records
from riffle.coordinator.runs.coordinator import LONGEST_WAIT_SECONDS, Coordinator
from riffle.coordinator.specs import ManualDeployment, RunSpec, read_document
from riffle.coordinator.store.events import LAST, wait
from riffle.coordinator.store.records import Tally
from riffle.coordinator.store.transactions import Store

MAX_MIXTURE_BYTES = 16 * MAX_JSON_BYTES
MAX_INDEX_DIGITS = len(str(MAX_EXACT))

Index = Annotated[int, Query(ge=0, le=MAX_EXACT)]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="seconds to wait")]

router = APIRouter(prefix="/v1/runs", dependencies=[OperatorOnly])


# -- runs ---------------------------------------------------------------------------------------


@router.post("", status_code=201, openapi_extra=json_body(RunSpec))
async def create_run(
    request: Request, coordinator: CoordinatorPart, store: StorePart
) -> models.Run:
    """Creates a run and starts it. A repeated run_id with the same spec returns the same run."""
    spec = read_document(RunSpec, await read_body(request, MAX_JSON_BYTES))
    return await in_thread(_run, coordinator, store, await coordinator.create(spec))


@router.get("")
async def list_runs(coordinator: CoordinatorPart, store: StorePart) -> models.Runs:
    """Returns all runs."""
    return await in_thread(_runs, coordinator, store)


@router.get("/{run_id}")
async def show_run(run_id: str, coordinator: CoordinatorPart, store: StorePart) -> models.Run:
    """Returns one run."""
    return await in_thread(_run, coordinator, store, run_id)


@router.post("/{run_id}/stop")
async def stop_run(run_id: str, coordinator: CoordinatorPart, store: StorePart) -> models.Run:
    """Stops a run. An open batch is abandoned; a sealed batch is still counted."""
    await coordinator.stop(run_id)
    return await in_thread(_run, coordinator, store, run_id)


def _run(coordinator: Coordinator, store: Store, run_id: str) -> models.Run:
    run, tally = store.run(run_id), store.tallies(run_id).get(run_id, Tally())
    return presentation.run_model(run, tally, coordinator.drivers.trouble(run_id))


def _runs(coordinator: Coordinator, store: Store) -> models.Runs:
    runs, tallies = store.runs(), store.tallies()
    return models.Runs(
        runs=[
            presentation.run_model(
                run, tallies.get(run.id, Tally()), coordinator.drivers.trouble(run.id)
            )
            for run in runs
        ]
    )


# -- deployments --------------------------------------------------------------------------------


@router.get("/{run_id}/deployment", responses={304: {"description": "still the same deployment"}})
async def current_deployment(
    run_id: str,
    coordinator: CoordinatorPart,
    response: Response,
    wait: Wait = 0.0,
    if_none_match: Annotated[str | None, Header()] = None,
) -> models.Deployment:
    """Returns the newest deployment. With If-None-Match, waits up to ``wait`` s for a newer one."""
    known = _known_index(if_none_match)
    row = await coordinator.newest_deployment(run_id, known, wait)
    if row is None:
        raise RemoteError("unknown-deployment", "nothing is deployed yet")
    etag = f'"{row.index}"'
    if row.index == known:
        return cast("models.Deployment", Response(status_code=304, headers={"ETag": etag}))
    response.headers["ETag"] = etag
    return presentation.deployment_model(models.Deployment, row)


def _known_index(if_none_match: str | None) -> int | None:
    text = (if_none_match or "").strip().removeprefix("W/").strip('"')
    an_index = text.isascii() and text.isdigit() and len(text) <= MAX_INDEX_DIGITS
    return int(text) if an_index else None


@router.get("/{run_id}/deployments")
async def list_deployments(run_id: str, store: StorePart) -> models.Deployments:
    """Returns all deployments, without their counts."""
    _, rows, _ = await in_thread(store.run_records, run_id)
    deployments = [presentation.deployment_model(DeploymentProgress, row) for row in rows]
    return models.Deployments(deployments=deployments)


@router.post("/{run_id}/deployments", status_code=201, openapi_extra=json_body(ManualDeployment))
async def deploy(run_id: str, request: Request, coordinator: CoordinatorPart) -> DeploymentProgress:
    """Deploys a policy or a mixture for a number of episodes, in manual mode."""
    wanted = read_document(ManualDeployment, await read_body(request, MAX_MIXTURE_BYTES))
    row = await coordinator.deploy(run_id, wanted)
    return presentation.deployment_model(DeploymentProgress, row)


@router.get("/{run_id}/deployments/{index}")
async def show_deployment(run_id: str, index: int, store: StorePart) -> models.DeploymentDetail:
    """Returns a deployment with its private counts, their variances and its value estimate."""
    return await in_thread(_deployment, store, run_id, index)


def _deployment(store: Store, run_id: str, index: int) -> models.DeploymentDetail:
    run, rows, spends = store.run_records(run_id)
    if not 0 <= index < len(rows):
        raise RemoteError("unknown-deployment", f"run {run_id} has no deployment {index}")
    histogram = store.histograms(run_id).get(index)
    spend = next((spend for spend in spends if spend.index == index), None)
    return presentation.detail_model(rows[index], histogram, spend, run.spec.delta)


# -- results ------------------------------------------------------------------------------------


@router.get("/{run_id}/stages")
async def list_stages(run_id: str, store: StorePart) -> models.Stages:
    """Returns the finished stages."""
    await in_thread(store.run, run_id)
    stages = await in_thread(store.stages, run_id)
    return models.Stages(stages=[models.Stage(**stage) for stage in stages])


@router.get("/{run_id}/ledger")
async def show_ledger(run_id: str, store: StorePart) -> models.Ledger:
    """Returns the privacy that the run has spent."""
    return await in_thread(lambda: presentation.ledger_model(*store.run_records(run_id)))


@router.get("/{run_id}/conservation")
async def show_conservation(
    run_id: str,
    store: StorePart,
    shuffler: ShufflerPart,
    first: Index = 0,
    limit: Index = MAX_EXACT,
) -> models.RunConservation:
    """Returns what became of every message, batch by batch; asks the shuffler for its records.

    Clients that ask often can select at most ``limit`` deployments, from index ``first`` on.
    """
    _, rows, spends = await in_thread(store.run_records, run_id)
    rows = rows[first : first + limit]
    records = await shuffler_records(shuffler, rows)
    return presentation.conservation_model(rows, spends, records)


@router.get("/{run_id}/result")
async def show_result(run_id: str, store: StorePart) -> models.Result:
    """Returns the answer so far, the privacy that it cost, and the time that each step took."""
    return await in_thread(lambda: presentation.result_model(*store.run_records(run_id)))


async def _known_run(run_id: str, store: StorePart) -> str:
    """Looks the run up before the stream begins, so that an unknown run is answered with 404."""
    return (await in_thread(store.run, run_id)).id


@router.get("/{run_id}/events", response_class=EventSourceResponse)
async def follow_events(
    run_id: Annotated[str, Depends(_known_run)],
    store: StorePart,
    signals: SignalsPart,
    last_event_id: Annotated[int, Header(ge=0, le=MAX_EXACT)] = 0,
    follow: Annotated[
        bool, Query(description="wait for more events; if false, end after the last")
    ] = True,
) -> AsyncIterator[ServerSentEvent]:
    """Sends events until the run is over or the service stops; resume with Last-Event-ID."""
    while True:
        signal = signals.signal(run_id)
        # The state is read before the events. So if the run is over, its last event is read, too.
        # Only a restored older store may lack this event; then the stream ends without it.
        over = (await in_thread(store.run, run_id)).state != "running"
        for event in await in_thread(store.events, run_id, last_event_id):
            last_event_id = event.id
            data = {"run": run_id, "at": event.at, **event.data}
            yield ServerSentEvent(id=str(event.id), event=event.kind, data=data)
            if event.kind in LAST:
                return
        if over or signals.closed or not follow:
            return
        await wait(signal, signals.recheck_seconds)


_PROBLEMS = {
    "create_run": "malformed too-large invalid-spec batch-too-small trust-refused "
    "test-entry-refused wrong-state",
    "list_runs": "",
    "stop_run": "unknown-run wrong-state",
    "current_deployment": "malformed unknown-run unknown-deployment",
    "deploy": "malformed too-large invalid-spec batch-too-small unknown-run wrong-state",
    "show_deployment": "malformed unknown-run unknown-deployment",
    "show_conservation": "malformed unknown-run",
    "follow_events": "malformed unknown-run",
}
declare_problems(router, _PROBLEMS, "unknown-run")
