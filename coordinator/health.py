"""Whether the coordinator lives, is ready, and how it does: what machines ask."""

import asyncio
from pathlib import Path

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.descriptor import parse
from riffle.common.errors import LocalError, RiffleError
from riffle.common.metrics import exposition
from riffle.common.readiness import clock_trouble, disk_trouble
from riffle.common.sharing import Shared
from riffle.coordinator import views
from riffle.coordinator.access import Service, metrics_reader
from riffle.coordinator.runs import Coordinator
from riffle.coordinator.threads import in_thread

READY_SECONDS = 5.0

router = APIRouter()


@router.get(
    "/metrics",
    dependencies=[Depends(metrics_reader)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def show_metrics(request: Request, service: Service) -> Response:
    """Metrics for Prometheus: the operator's token or the metrics token."""
    metrics = service.desk.metrics
    found = await in_thread(service.desk.store.census)
    metrics.show(found, request.app.state.data_dir)
    return exposition(metrics.registry)


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": views.ReadyView}})
async def readyz(request: Request, response: Response) -> views.ReadyView:
    """Whether store, keys, shuffler, clock and disk are as they must be, each by name."""
    found: views.ReadyView = await request.app.state.ready.get()
    if any(said != "ok" for said in found.model_dump().values()):
        response.status_code = 503
    return found


def readiness(service: Coordinator, data_dir: Path) -> Shared[views.ReadyView]:
    """What `readyz` tells: looked for once a second at most, as anybody may ask."""

    async def look() -> views.ReadyView:
        store, analyzer, shuffler = await asyncio.gather(
            _check_store(service), _check_analyzer(service), _check_shuffler(service)
        )
        return views.ReadyView(
            store=store,
            analyzer=analyzer,
            shuffler=shuffler,
            clock=clock_trouble(service.desk.shuffler.skew) or "ok",
            disk=disk_trouble(data_dir) or "ok",
        )

    return Shared(look, lambda: int(service.desk.clock()))


async def _check_store(service: Coordinator) -> str:
    try:
        await in_thread(service.desk.store.check)
    except LocalError as error:
        return error.detail
    return "ok"


async def _check_analyzer(service: Coordinator) -> str:
    """Whether the analyzer's keys are there and open every batch that is not settled."""

    def check() -> None:
        service.desk.keys.check()
        for data in service.desk.store.unsettled():
            service.desk.analyzer.check_key(parse(data))

    try:
        await in_thread(check)
    except LocalError as error:
        return error.detail
    except SQLAlchemyError:
        return "not known: the store cannot be used"
    return "ok"


async def _check_shuffler(service: Coordinator) -> str:
    expected = service.desk.shuffler_id
    try:
        async with asyncio.timeout(READY_SECONDS):
            found = await service.desk.shuffler.ready()
    except TimeoutError:
        return "does not answer in time"
    except RiffleError as error:
        return error.detail
    return "ok" if found == expected else f"is {found!r}, expected {expected!r}"
