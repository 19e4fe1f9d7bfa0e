"""Whether the coordinator lives, is ready, and how it does: what machines ask.

Routes of the analyzer's keys: list, make, activate. The operator's only; no private half leaves.

A rotation is: make (pending), pin its public half at nodes and shuffler, activate. The key before
it opens what was issued under it and is erased when the last such batch is acknowledged.

The operator's page: static files of this package, and the headers that confine them.

The page is one document whose scripts and styles are files beside it. It asks the REST routes like
any other client, with the operator's token, so the files themselves need none. The policy allows
nothing inline, nothing from elsewhere, no frames and no HTML made from strings.
"""

import asyncio
import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.server.monitoring import (
    VersionedCache,
    clock_trouble,
    disk_trouble,
    metrics_response,
)
from riffle.coordinator.api import models
from riffle.coordinator.api.access import Service, authorized, metrics_reader
from riffle.coordinator.api.models import KeysView, KeyView
from riffle.coordinator.runs.coordinator import Coordinator

READY_SECONDS = 5.0

health_router = APIRouter()


@health_router.get(
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
    return metrics_response(metrics.registry)


@health_router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@health_router.get("/readyz", responses={503: {"model": models.ReadyView}})
async def readyz(request: Request, response: Response) -> models.ReadyView:
    """Whether store, keys, shuffler, clock and disk are as they must be, each by name."""
    found: models.ReadyView = await request.app.state.ready.get()
    if any(said != "ok" for said in found.model_dump().values()):
        response.status_code = 503
    return found


def readiness(service: Coordinator, data_dir: Path) -> VersionedCache[models.ReadyView]:
    """What `readyz` tells: looked for once a second at most, as anybody may ask."""

    async def look() -> models.ReadyView:
        store, analyzer, shuffler = await asyncio.gather(
            _check_store(service), _check_analyzer(service), _check_shuffler(service)
        )
        return models.ReadyView(
            store=store,
            analyzer=analyzer,
            shuffler=shuffler,
            clock=clock_trouble(service.desk.shuffler.skew) or "ok",
            disk=disk_trouble(data_dir) or "ok",
        )

    return VersionedCache(look, lambda: int(service.desk.clock()))


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


keys_router = APIRouter(prefix="/v1/keys", dependencies=[Depends(authorized)])


@keys_router.get("")
async def list_keys(service: Service) -> KeysView:
    """All keys there ever were, oldest first."""
    found = await in_thread(service.desk.keys.records)
    return KeysView(keys=[KeyView.model_validate(key, from_attributes=True) for key in found])


@keys_router.post("", status_code=201)
async def make_key(service: Service) -> KeyView:
    """Make a pending key, or tell of the one that is pending."""
    made = await in_thread(service.desk.keys.make)
    return KeyView.model_validate(made, from_attributes=True)


@keys_router.post("/{key_id}/activate")
async def activate_key(key_id: str, service: Service) -> KeyView:
    """Seal new batches to a pending key; what was active expires."""
    active = await in_thread(service.desk.keys.activate, key_id)
    await in_thread(service.desk.erase_keys)
    return KeyView.model_validate(active, from_attributes=True)


FOLDER = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

page_router = APIRouter(include_in_schema=False)


@page_router.get("/")
async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The page itself."""
    return _answer("index.html", if_none_match)


@page_router.get("/page/{name:path}")
async def file(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """One of its files."""
    return _answer(name, if_none_match)


def _answer(name: str, known: str | None) -> Response:
    # Only names that were found in the folder are ever opened: no path of a client's is.
    path = _files().get(name)
    if path is None:
        raise RemoteError("not-found", "the page has no such file")
    content = path.read_bytes()
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if known == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[path.suffix], headers=headers)


@cache
def _files() -> dict[str, Path]:
    found = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path for path in found}
