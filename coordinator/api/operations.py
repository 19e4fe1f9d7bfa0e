"""Routes that are not about runs: health, metrics, analyzer keys, and the page.

The page's files are served without a token. The page's script calls the REST routes with the
operator's token, like any other client.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.server import monitoring
from riffle.common.server.service import ANY_CALLER, declare_problems, problems
from riffle.coordinator.api import access, models
from riffle.coordinator.batches.keys import KeyRecord
from riffle.coordinator.runs.coordinator import Coordinator

READY_SECONDS = 5.0

# -- health and metrics -------------------------------------------------------------------------

health_router = APIRouter(responses=problems(always=ANY_CALLER))


@health_router.get(
    "/metrics",
    dependencies=[access.MetricsOnly],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problems()},
)
async def show_metrics(
    request: Request, store: access.StorePart, metrics: access.MetricsPart
) -> Response:
    """Returns metrics for Prometheus. Needs the operator's token or the token for metrics.

    If the store is out of reach, the metrics of the store are missing.
    """
    readiness: models.Readiness = await request.app.state.readiness.get()
    metrics.requests.ready.set(readiness.ready)
    metrics.free.set(shutil.disk_usage(request.app.state.data_dir).free)
    try:
        metrics.show(await in_thread(store.census))
    except SQLAlchemyError:
        return monitoring.metrics_response(metrics.registry)
    return monitoring.metrics_response(metrics.registry, metrics.of_store)


@health_router.get("/livez")
async def livez() -> dict[str, str]:
    """Answers while the process lives."""
    return {"status": "ok"}


@health_router.get("/readyz", responses={503: {"model": models.Readiness}})
async def readyz(request: Request, response: Response) -> models.Readiness:
    """Returns the state of store, keys, shuffler, clock and disk: ``ok``, or what is wrong."""
    readiness: models.Readiness = await request.app.state.readiness.get()
    if not readiness.ready:
        response.status_code = 503
    return readiness


def shared_readiness(
    parts: Coordinator, data_dir: Path
) -> monitoring.VersionedCache[models.Readiness]:
    """Returns a cache that computes `readyz` once a second at most, because anybody may ask."""

    async def read() -> models.Readiness:
        store_status, analyzer_status, shuffler_status = await asyncio.gather(
            _status(in_thread(parts.store.check)),
            _status(in_thread(_check_keys, parts)),
            _status(_check_shuffler(parts)),
        )
        return models.Readiness(
            store=store_status,
            analyzer=analyzer_status,
            shuffler=shuffler_status,
            clock=monitoring.clock_trouble(parts.exchange.shuffler.skew) or "ok",
            disk=monitoring.disk_trouble(data_dir) or "ok",
        )

    return monitoring.VersionedCache(read, lambda: int(parts.clock()))


async def _status(check: Awaitable[None]) -> str:
    try:
        await check
    except TimeoutError:
        return "does not answer in time"
    except SQLAlchemyError:
        return "not known: the store cannot be used"
    except RiffleError as error:
        return error.detail
    return "ok"


def _check_keys(parts: Coordinator) -> None:
    """Raises LocalError if no key is active, or if a key that opens batches is missing."""
    parts.keys.check()
    for data in parts.store.unsettled_descriptors():
        parts.exchange.analyzer.check_key(parse(data))


async def _check_shuffler(parts: Coordinator) -> None:
    async with asyncio.timeout(READY_SECONDS):
        identity = await parts.exchange.shuffler.identity()
    if identity != (expected := parts.issuer.shuffler_id):
        raise LocalError("unavailable", f"is {identity!r}, expected {expected!r}")


# -- keys ---------------------------------------------------------------------------------------

keys_router = APIRouter(prefix="/v1/keys", dependencies=[access.OperatorOnly])


@keys_router.get("")
async def list_keys(keys: access.KeysPart) -> models.Keys:
    """Returns all analyzer keys that ever existed, oldest first."""
    records = await in_thread(keys.records)
    return models.Keys(keys=list(records))


@keys_router.post("", status_code=201)
async def make_key(keys: access.KeysPart) -> KeyRecord:
    """Makes a pending key, or returns the pending key if there is one already."""
    return await in_thread(keys.make)


@keys_router.post("/{key_id}/activate")
async def activate_key(key_id: str, keys: access.KeysPart, store: access.StorePart) -> KeyRecord:
    """Makes a pending key active: new batches are sealed to it, and the previous key expires."""
    active = await in_thread(keys.activate, key_id)
    await in_thread(keys.erase_unused, store.keys_in_use)
    return active


# -- the page -----------------------------------------------------------------------------------

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

page_router = APIRouter(include_in_schema=False)


@page_router.get("/")
async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Returns the page itself."""
    return _file_response("index.html", if_none_match)


@page_router.get("/page/{name:path}")
async def file(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Returns one of the page's files."""
    return _file_response(name, if_none_match)


def _file_response(name: str, known: str | None) -> Response:
    # Opens only files found in the folder, never a path that a client sends.
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
    paths = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path for path in paths}


declare_problems(keys_router, {"activate_key": "not-found wrong-state"})
declare_problems(page_router, {"file": "not-found"}, always=ANY_CALLER)
