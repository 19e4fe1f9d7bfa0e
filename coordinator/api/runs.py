"""Routes of runs: make and stop them, deploy by hand, follow, and read results.

They only translate; see `coordinator.runs.coordinator`. Long polls end after 30 seconds at the
latest.
"""

from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import MAX_EXACT
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.service import MAX_JSON_BYTES, json_body, read_body
from riffle.coordinator.api import models, presentation
from riffle.coordinator.api.access import Service, authorized
from riffle.coordinator.api.results import conservation_view, records
from riffle.coordinator.runs.coordinator import LONGEST_WAIT_SECONDS, Coordinator
from riffle.coordinator.specs import ManualDeployment, RunSpec, read_document
from riffle.coordinator.store.events import LAST, wait
from riffle.coordinator.store.records import DeploymentRecord, RunRecord, Tally

MAX_MIXTURE_BYTES = 16 * MAX_JSON_BYTES
MAX_INDEX_DIGITS = len(str(MAX_EXACT))

Index = Annotated[int, Query(ge=0, le=MAX_EXACT)]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="seconds to wait")]

router = APIRouter(prefix="/v1/runs", dependencies=[Depends(authorized)])


# -- runs ---------------------------------------------------------------------------------------


@router.post("", status_code=201, openapi_extra=json_body(RunSpec))
async def create_run(request: Request, service: Service) -> models.RunView:
    """Create a run and start it. With the same run_id and spec again, the same run."""
    spec = read_document(RunSpec, await read_body(request, MAX_JSON_BYTES))
    return await in_thread(_run_view, service, await service.create(spec))


@router.get("")
async def list_runs(service: Service) -> models.RunsView:
    """All runs."""
    return await in_thread(_runs_view, service)


@router.get("/{run_id}")
async def show_run(run_id: str, service: Service) -> models.RunView:
    """One run."""
    return await in_thread(_run_view, service, run_id)


@router.post("/{run_id}/stop")
async def stop_run(run_id: str, service: Service) -> models.RunView:
    """Stop a run; its open batch is abandoned, a sealed one is still counted."""
    await service.stop(run_id)
    return await in_thread(_run_view, service, run_id)


# -- deployments --------------------------------------------------------------------------------


@router.get("/{run_id}/deployment", responses={304: {"description": "still the same deployment"}})
async def current_deployment(
    run_id: str,
    service: Service,
    response: Response,
    wait: Wait = 0.0,
    if_none_match: Annotated[str | None, Header()] = None,
) -> models.DeploymentView:
    """The newest deployment; with If-None-Match waits for another one."""
    known = _known_index(if_none_match)
    row = await service.current(run_id, known, wait)
    if row is None:
        raise RemoteError("unknown-deployment", "nothing is deployed yet")
    etag = f'"{row.index}"'
    if row.index == known:
        return cast("models.DeploymentView", Response(status_code=304, headers={"ETag": etag}))
    response.headers["ETag"] = etag
    return presentation.deployment_view(row)


@router.get("/{run_id}/deployments")
async def list_deployments(run_id: str, service: Service) -> models.DeploymentsView:
    """All deployments, without their counts."""
    _, rows = await in_thread(_rows, service, run_id)
    return models.DeploymentsView(deployments=[presentation.progress_view(row) for row in rows])


@router.post("/{run_id}/deployments", status_code=201, openapi_extra=json_body(ManualDeployment))
async def deploy(run_id: str, request: Request, service: Service) -> models.ProgressView:
    """Manual mode: deploy a policy or a mixture for a number of episodes."""
    body = await read_body(request, MAX_MIXTURE_BYTES)
    return presentation.progress_view(
        await service.deploy(run_id, read_document(ManualDeployment, body))
    )


@router.get("/{run_id}/deployments/{index}")
async def show_deployment(run_id: str, index: int, service: Service) -> models.DeploymentDetail:
    """A deployment with its private counts, their variances and the mixture's value estimate."""
    return await in_thread(_detail, service, run_id, index)


# -- results ------------------------------------------------------------------------------------


@router.get("/{run_id}/stages")
async def list_stages(run_id: str, service: Service) -> models.StagesView:
    """Finished stages."""
    await in_thread(service.desk.store.run, run_id)
    found = await in_thread(service.desk.store.stages, run_id)
    return models.StagesView(stages=[models.StageView(**stage) for stage in found])


@router.get("/{run_id}/ledger")
async def show_ledger(run_id: str, service: Service) -> models.LedgerView:
    """What was spent."""
    return await in_thread(_ledger, service, run_id)


@router.get("/{run_id}/conservation")
async def show_conservation(
    run_id: str, service: Service, first: Index = 0, limit: Index = MAX_EXACT
) -> models.ConservationView:
    """Where every message of the run went, batch by batch; the shuffler is asked for its part.

    ``first`` and ``limit`` narrow it to some deployments, for whoever looks often.
    """
    _, rows = await in_thread(_rows, service, run_id)
    rows = rows[first : first + limit]
    spends = await in_thread(service.desk.store.ledger, run_id)
    return conservation_view(rows, spends, await records(service.desk.shuffler, rows))


@router.get("/{run_id}/result")
async def show_result(run_id: str, service: Service) -> models.ResultView:
    """The answer so far, its cost, and where the time went."""
    return await in_thread(_result, service, run_id)


async def _known_run(run_id: str, service: Service) -> str:
    """A stream's status is sent before its first event, so the run is looked up before."""
    return (await in_thread(service.desk.store.run, run_id)).id


@router.get("/{run_id}/events", response_class=EventSourceResponse)
async def follow_events(
    run_id: Annotated[str, Depends(_known_run)],
    service: Service,
    last_event_id: Annotated[int, Header(ge=0, le=MAX_EXACT)] = 0,
    follow: Annotated[bool, Query(description="wait for more; else end after the last")] = True,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events until run or service are over; resume with Last-Event-ID."""
    store, bell = service.desk.store, service.desk.bell
    while True:
        ticket = bell.ticket(run_id)
        for event in await in_thread(store.events, run_id, last_event_id):
            last_event_id = event.id
            data = {"run": run_id, "at": event.at, **event.data}
            yield ServerSentEvent(id=str(event.id), event=event.kind, data=data)
            if event.kind in LAST:
                return
        if bell.closed or not follow:
            return
        await wait(ticket, bell.pause)


# -- reading ------------------------------------------------------------------------------------


def _known_index(if_none_match: str | None) -> int | None:
    text = (if_none_match or "").strip().removeprefix("W/").strip('"')
    an_index = text.isascii() and text.isdigit() and len(text) <= MAX_INDEX_DIGITS
    return int(text) if an_index else None


def _rows(service: Coordinator, run_id: str) -> tuple[RunRecord, list[DeploymentRecord]]:
    store = service.desk.store
    return store.run(run_id), store.deployments(run_id)


def _run_view(service: Coordinator, run_id: str) -> models.RunView:
    store = service.desk.store
    run, tally = store.run(run_id), store.tallies(run_id).get(run_id, Tally())
    return presentation.run_view(run, tally, service.trouble(run_id))


def _runs_view(service: Coordinator) -> models.RunsView:
    runs, tallies = service.desk.store.runs(), service.desk.store.tallies()
    return models.RunsView(
        runs=[
            presentation.run_view(run, tallies.get(run.id, Tally()), service.trouble(run.id))
            for run in runs
        ]
    )


def _detail(service: Coordinator, run_id: str, index: int) -> models.DeploymentDetail:
    run, rows = _rows(service, run_id)
    if not 0 <= index < len(rows):
        raise RemoteError("unknown-deployment", f"run {run_id} has no deployment {index}")
    histogram = service.desk.store.histograms(run_id).get(index)
    spends = {spend.index: spend for spend in service.desk.store.ledger(run_id)}
    return presentation.detail_view(rows[index], histogram, spends.get(index), run.spec.delta)


def _ledger(service: Coordinator, run_id: str) -> models.LedgerView:
    run, rows = _rows(service, run_id)
    return presentation.ledger_view(run, rows, service.desk.store.ledger(run_id))


def _result(service: Coordinator, run_id: str) -> models.ResultView:
    run, rows = _rows(service, run_id)
    return presentation.result_view(run, rows, service.desk.store.ledger(run_id))
