"""Conservation over both services: accepted = held + forwarded + dropped at the shuffler, and
opened + failed = n L = forwarded for every batch that was settled here.

Routes of what a run leaves behind: its history, CSV, true values of a simulated environment.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from riffle.common.process.tables import csv_text
from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import MAX_EXACT
from riffle.common.protocol.errors import RemoteError, RiffleError
from riffle.common.protocol.messages import Conservation
from riffle.common.server.service import read_body
from riffle.coordinator.api import models, presentation
from riffle.coordinator.api.access import Service, authorized
from riffle.coordinator.batches.shuffler_client import Shuffler
from riffle.coordinator.learning.true_values import bands, curve
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.specs import Truth, read_document
from riffle.coordinator.store.records import DeploymentRecord, LedgerRecord

AT_ONCE = 4
Found = Conservation | RiffleError


async def records(shuffler: Shuffler, rows: Sequence[DeploymentRecord]) -> list[Found]:
    """The shuffler's record of each deployment, or why there is none."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(batch_id: str) -> Found:
        async with room:
            try:
                return await shuffler.conservation(batch_id)
            except RiffleError as error:
                return error

    return list(await asyncio.gather(*(one(row.batch_id) for row in rows)))


def conservation_view(
    rows: Sequence[DeploymentRecord], spends: Sequence[LedgerRecord], found: Sequence[Found]
) -> models.ConservationView:
    """All batches of a run with their sums."""
    by_index = {spend.index: spend for spend in spends}
    batches = [
        _batch(row, by_index.get(row.index), record)
        for row, record in zip(rows, found, strict=True)
    ]
    flows = [one.shuffler.messages for one in batches if one.shuffler and one.shuffler.messages]
    known = [one.balanced for one in batches]
    return models.ConservationView(
        batches=batches,
        accepted=sum(flow.accepted for flow in flows),
        held=sum(flow.held for flow in flows),
        forwarded=sum(flow.forwarded for flow in flows),
        dropped=sum(flow.dropped for flow in flows),
        opened=sum(one.opened or 0 for one in batches),
        failed=sum(one.failed or 0 for one in batches),
        balanced=False if False in known else None if None in known else True,
    )


def _batch(
    row: DeploymentRecord, spend: LedgerRecord | None, found: Found
) -> models.BatchConservation:
    record = found if isinstance(found, Conservation) else None
    expected = row.n * row.descriptor.padding.messages
    return models.BatchConservation(
        deployment=row.index,
        batch_id=row.batch_id,
        state=row.state,
        n=row.n,
        expected=expected,
        opened=None if spend is None else spend.opened,
        failed=None if spend is None else spend.failed,
        shuffler=record,
        trouble=None if isinstance(found, Conservation) else found.detail,
        balanced=_balanced(expected, spend, record),
    )


def _balanced(
    expected: int, spend: LedgerRecord | None, record: Conservation | None
) -> bool | None:
    """Whether both sides add up and agree; None when the shuffler's is not known."""
    if spend is not None and spend.opened + spend.failed != expected:
        return False
    if record is None:
        return None
    handed_over = None if record.messages is None else record.messages.forwarded
    return record.balanced and (spend is None or handed_over == expected)


MAX_TRUTH_BYTES = 4 << 20
ROUNDING = 1e-9

router = APIRouter(prefix="/v1/runs", dependencies=[Depends(authorized)])

_CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {}}}}
_TRUTH = {"content": {"application/json": {"schema": Truth.model_json_schema()}}, "required": True}


@router.get("/{run_id}/history")
async def show_history(
    run_id: str, service: Service, after: Annotated[int, Query(ge=0, le=MAX_EXACT)] = 0
) -> models.HistoryView:
    """Events so far in one answer; follow the stream of events from the last one's number on."""
    await in_thread(service.desk.store.run, run_id)
    found = await in_thread(service.desk.store.events, run_id, after)
    return models.HistoryView(events=[models.EventView(**asdict(event)) for event in found])


# -- downloads ----------------------------------------------------------------------------------


@router.get("/{run_id}/stages.csv", response_class=Response, responses=_CSV)
async def download_stages(run_id: str, service: Service) -> Response:
    """Finished stages, without their policies."""
    return await in_thread(_stages, service, run_id)


@router.get("/{run_id}/ledger.csv", response_class=Response, responses=_CSV)
async def download_ledger(run_id: str, service: Service) -> Response:
    """What was spent, a row a batch."""
    return await in_thread(_ledger, service, run_id)


@router.get("/{run_id}/deployments.csv", response_class=Response, responses=_CSV)
async def download_deployments(run_id: str, service: Service) -> Response:
    """All deployments, without their policies."""
    return await in_thread(_deployments, service, run_id)


@router.get("/{run_id}/conservation.csv", response_class=Response, responses=_CSV)
async def download_conservation(run_id: str, service: Service) -> Response:
    """Where every report and message went, a row a batch."""
    store = service.desk.store
    await in_thread(store.run, run_id)
    rows = await in_thread(store.deployments, run_id)
    found = await records(service.desk.shuffler, rows)
    spends = await in_thread(store.ledger, run_id)
    batches = conservation_view(rows, spends, found).batches
    return _download(run_id, "conservation", [batch.model_dump() for batch in batches])


def _stages(service: Coordinator, run_id: str) -> Response:
    service.desk.store.run(run_id)
    return _download(run_id, "stages", service.desk.store.stages(run_id), models.STAGE_COLUMNS)


def _ledger(service: Coordinator, run_id: str) -> Response:
    store = service.desk.store
    run, rows = store.run(run_id), store.deployments(run_id)
    entries = presentation.ledger_view(run, rows, store.ledger(run_id)).entries
    return _download(run_id, "ledger", [entry.model_dump() for entry in entries])


def _deployments(service: Coordinator, run_id: str) -> Response:
    store = service.desk.store
    store.run(run_id)
    rows = [presentation.progress_view(row).model_dump() for row in store.deployments(run_id)]
    return _download(run_id, "deployments", rows)


def _download(
    run_id: str, name: str, rows: list[dict[str, Any]], otherwise: Sequence[str] = ()
) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{run_id[:8]}-{name}.csv"'}
    return Response(csv_text(rows, otherwise), media_type="text/csv", headers=headers)


# -- true values --------------------------------------------------------------------------------


@router.post("/{run_id}/truth", status_code=204, openapi_extra={"requestBody": _TRUTH})
async def supply_truth(run_id: str, request: Request, service: Service) -> Response:
    """Supply V* and true values of deployments of a simulated environment; a repeat is harmless."""
    truth = read_document(Truth, await read_body(request, MAX_TRUTH_BYTES))
    await in_thread(_supply, service, run_id, truth)
    return Response(status_code=204)


@router.get("/{run_id}/truth")
async def show_truth(run_id: str, service: Service) -> models.TruthView:
    """Regret and value of the run where true values were supplied, with bands over like runs."""
    return await in_thread(_truth, service, run_id)


def _supply(service: Coordinator, run_id: str, truth: Truth) -> None:
    horizon = service.desk.store.run(run_id).spec.horizon
    largest = max(truth.optimal_value, *(one.value for one in truth.values))
    if largest > horizon:
        detail = f"a value of {largest:g} exceeds the horizon {horizon}: scale rewards to [0, 1]"
        raise RemoteError("invalid-spec", detail)
    if largest > truth.optimal_value + ROUNDING:
        detail = f"a value of {largest:g} exceeds the optimal value {truth.optimal_value:g}"
        raise RemoteError("invalid-spec", detail)
    service.desk.store.supply(run_id, truth)


def _truth(service: Coordinator, run_id: str) -> models.TruthView:
    store = service.desk.store
    asked = store.run(run_id).spec
    alike = {"run_id": None, "seed": 0, "test_seed": None}
    same = asked.model_copy(update=alike)
    names = [run.id for run in store.runs() if run.spec.model_copy(update=alike) == same]
    rows = store.truths(names)
    curves = {name: curve(found) for name, found in rows.items()}
    own = curves.pop(run_id)
    return presentation.truth_view(own, rows[run_id], bands(own, list(curves.values())))
