"""Routes of a run's records: history, CSV files, and the true values of a simulation."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from riffle.common.process.tables import csv_text
from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import MAX_EXACT
from riffle.common.protocol.errors import RemoteError, RiffleError
from riffle.common.server.service import declare_problems, read_body
from riffle.coordinator.api import models, presentation
from riffle.coordinator.api.access import OperatorOnly, ShufflerPart, StorePart
from riffle.coordinator.api.models import DeploymentProgress
from riffle.coordinator.batches.shuffler_client import ShufflerClient
from riffle.coordinator.learning.true_values import bands, curve
from riffle.coordinator.specs import TrueValueSpec, read_document
from riffle.coordinator.store.records import DeploymentRecord
from riffle.coordinator.store.transactions import Store

CALLS_AT_ONCE = 4
MAX_TRUE_VALUES_BYTES = 4 << 20
ROUNDING = 1e-9

router = APIRouter(prefix="/v1/runs", dependencies=[OperatorOnly])

_CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {}}}}
_TRUE_VALUES = {
    "content": {"application/json": {"schema": TrueValueSpec.model_json_schema()}},
    "required": True,
}


@router.get("/{run_id}/history")
async def show_history(
    run_id: str, store: StorePart, after: Annotated[int, Query(ge=0, le=MAX_EXACT)] = 0
) -> models.History:
    """Returns the events so far.

    To get later events, follow the stream with the last event's number as Last-Event-ID.
    """
    await in_thread(store.run, run_id)
    events = await in_thread(store.events, run_id, after)
    return models.History(events=events)


# -- downloads ----------------------------------------------------------------------------------


@router.get("/{run_id}/stages.csv", response_class=Response, responses=_CSV)
async def download_stages(run_id: str, store: StorePart) -> Response:
    """Returns the finished stages, without their policies."""
    await in_thread(store.run, run_id)
    stages = await in_thread(store.stages, run_id)
    return _download(run_id, "stages", stages, models.STAGE_COLUMNS)


@router.get("/{run_id}/ledger.csv", response_class=Response, responses=_CSV)
async def download_ledger(run_id: str, store: StorePart) -> Response:
    """Returns the privacy spent, one row a batch."""
    ledger = await in_thread(lambda: presentation.ledger_model(*store.run_records(run_id)))
    return _download(run_id, "ledger", [entry.model_dump() for entry in ledger.entries])


@router.get("/{run_id}/deployments.csv", response_class=Response, responses=_CSV)
async def download_deployments(run_id: str, store: StorePart) -> Response:
    """Returns all deployments, without their policies."""
    return await in_thread(_deployments, store, run_id)


def _deployments(store: Store, run_id: str) -> Response:
    _, rows, _ = store.run_records(run_id)
    deployments = [presentation.deployment_model(DeploymentProgress, row) for row in rows]
    return _download(run_id, "deployments", [each.model_dump() for each in deployments])


@router.get("/{run_id}/conservation.csv", response_class=Response, responses=_CSV)
async def download_conservation(run_id: str, store: StorePart, shuffler: ShufflerPart) -> Response:
    """Returns what became of every report and message, one row a batch."""
    _, rows, spends = await in_thread(store.run_records, run_id)
    records = await shuffler_records(shuffler, rows)
    batches = presentation.conservation_model(rows, spends, records).batches
    return _download(run_id, "conservation", [batch.model_dump() for batch in batches])


async def shuffler_records(
    shuffler: ShufflerClient, rows: Sequence[DeploymentRecord]
) -> list[presentation.ShufflerRecord]:
    """Returns the shuffler's record of each deployment, or the error of the failed request."""
    room = asyncio.Semaphore(CALLS_AT_ONCE)

    async def record(batch_id: str) -> presentation.ShufflerRecord:
        async with room:
            try:
                return await shuffler.conservation(batch_id)
            except RiffleError as error:
                return error

    return list(await asyncio.gather(*(record(row.batch_id) for row in rows)))


def _download(
    run_id: str, name: str, rows: list[dict[str, Any]], columns: Sequence[str] = ()
) -> Response:
    """Returns rows as a CSV file. If there are no rows, the header is ``columns``."""
    headers = {"Content-Disposition": f'attachment; filename="{run_id[:8]}-{name}.csv"'}
    return Response(csv_text(rows, columns), media_type="text/csv", headers=headers)


# -- true values --------------------------------------------------------------------------------


@router.post("/{run_id}/truth", status_code=204, openapi_extra={"requestBody": _TRUE_VALUES})
async def supply_true_values(run_id: str, request: Request, store: StorePart) -> Response:
    """Stores V* of a simulated environment and V of deployments. Repeated values change nothing."""
    supplied = read_document(TrueValueSpec, await read_body(request, MAX_TRUE_VALUES_BYTES))
    await in_thread(_supply, store, run_id, supplied)
    return Response(status_code=204)


def _supply(store: Store, run_id: str, supplied: TrueValueSpec) -> None:
    horizon = store.run(run_id).spec.horizon
    largest = max(supplied.optimal_value, *(each.value for each in supplied.values))
    if largest > horizon:
        detail = f"a value of {largest:g} exceeds the horizon {horizon}: scale rewards to [0, 1]"
        raise RemoteError("invalid-spec", detail)
    if largest > supplied.optimal_value + ROUNDING:
        detail = f"a value of {largest:g} exceeds the optimal value {supplied.optimal_value:g}"
        raise RemoteError("invalid-spec", detail)
    store.add_true_values(run_id, supplied)


@router.get("/{run_id}/truth")
async def show_true_values(run_id: str, store: StorePart) -> models.TrueValueCurve:
    """Returns true values and regret, with confidence bands over runs that differ only in seeds."""
    return await in_thread(_true_values, store, run_id)


def _true_values(store: Store, run_id: str) -> models.TrueValueCurve:
    differing = {"run_id": None, "seed": 0, "test_seed": None}
    spec = store.run(run_id).spec.model_copy(update=differing)
    like = [run.id for run in store.runs() if run.spec.model_copy(update=differing) == spec]
    rows = store.true_values(like)
    curves = {like_id: curve(values) for like_id, values in rows.items()}
    own = curves.pop(run_id)
    return presentation.true_values_model(own, rows[run_id], bands(own, list(curves.values())))


_PROBLEMS = {
    "show_history": "malformed unknown-run",
    "supply_true_values": "malformed too-large invalid-spec unknown-run",
}
declare_problems(router, _PROBLEMS, "unknown-run")
