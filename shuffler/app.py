"""The shuffler's REST interface, and the process that serves it.

Routes only translate between HTTP and `core`; `callers` decides who may call which route. No body
is read beyond its route's limit.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    Document,
    Hex16,
    SignedDescriptor,
    first_fault,
)
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.fast_routes import FastRoutes
from riffle.common.server.limits import ConcurrencyLimit, caller_of
from riffle.common.server.monitoring import metrics_response
from riffle.common.server.service import (
    ANY_CALLER,
    MAX_JSON_BYTES,
    declare_problems,
    hold,
    json_body,
    make_app,
    read_body,
    serve,
)
from riffle.shuffler.callers import (
    COORDINATOR_OR_OPERATOR,
    CoordinatorOnly,
    CoordinatorOrOperator,
    CoordinatorToken,
    Core,
    EitherToken,
    MetricsOnly,
    NodeToken,
    OperatorOnly,
    authenticator,
    node_of,
    shuffler_of,
    visible_status,
)
from riffle.shuffler.core import Clock, Shuffler, preflight
from riffle.shuffler.metrics import JOURNAL, ShufflerMetrics
from riffle.shuffler.permutation import Release
from riffle.shuffler.rules import check_batch_key, for_coordinator
from riffle.shuffler.settings import Settings
from riffle.shuffler.store import batch_rows
from riffle.shuffler.waiting import metered

MAX_WAIT_SECONDS = 30
MAX_REQUESTS_AT_ONCE = 8_192
"""The most requests under way at once, over all callers. At most half of them are long polls."""

D = TypeVar("D", bound=Document)

router, open_router = APIRouter(), APIRouter()


class LongPoll(BaseModel):
    """The query parameters of a long poll."""

    wait: float = Field(default=0, ge=0, le=MAX_WAIT_SECONDS, description="long poll, in seconds")


class BatchListQuery(LongPoll):
    """The query parameters of the list of batches."""

    accepting: bool = False


class StatusQuery(LongPoll):
    """The query parameters of a batch's status."""

    state: wire.BatchState | None = None


def create_app(settings: Settings, clock: Clock = time.time) -> FastAPI:
    """Returns the service as an ASGI app. ``clock`` returns seconds since 1970."""

    metrics = ShufflerMetrics()
    metrics.requests.show_certificate(settings.tls_cert_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        core = Shuffler(settings, clock, metrics)
        app.state.shuffler = core
        try:
            await core.start()
            yield
        finally:
            core.close()

    inner = (
        Middleware(  # browsers add no credential: a script can do only what its bearer token allows
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("Authorization", "Content-Type", wire.BATCH_KEY_HEADER),
            expose_headers=("Retry-After",),
        ),
        Middleware(ConcurrencyLimit, limit=MAX_REQUESTS_AT_ONCE),
        Middleware(FastRoutes, router=router, endpoints=FAST_ROUTES),
    )
    routers = (router, open_router)
    app = make_app("Riffle shuffler", JOURNAL, metrics.requests, lifespan, inner, routers)
    app.state.authenticator = authenticator(settings)
    return app


def release_polls(app: FastAPI) -> None:
    """Answers all long polls immediately, because the service is about to stop."""
    app.state.shuffler.changes.close()


@router.put("/v1/batches/{batch_id}", response_model=SignedDescriptor, status_code=201)
async def deposit(batch_id: Hex16, request: Request, token: CoordinatorToken) -> Response:
    """Deposits a batch's descriptor. A repetition with the same bytes gets the same answer."""
    core, signature = shuffler_of(request), request.headers.get(wire.SIGNATURE_HEADER)
    with caller_of(request, token, "coordinator"):
        data = await read_body(request, MAX_DESCRIPTOR_BYTES)
        signed, created = await core.batches.deposit(batch_id, data, signature)
        return _as_json(signed, 201 if created else 200)


@router.get("/v1/batches", response_model=wire.OpenBatches)
async def list_batches(
    request: Request, token: NodeToken, query: Annotated[BatchListQuery, Query()]
) -> Response:
    """Lists open batches. With ``accepting``, waits for free slots and omits full batches."""
    async with node_of(request, token):
        core = shuffler_of(request)
        batches = await core.open_batches(wait=query.wait, accepting=query.accepting)
        seconds = core.settings.lease_seconds
        return _as_json(wire.OpenBatches(batches=tuple(batches), lease_seconds=seconds))


@router.get("/v1/batches/{batch_id}", response_model=SignedDescriptor)
async def descriptor(batch_id: Hex16, request: Request, token: NodeToken) -> Response:
    """Returns a batch's descriptor with both signatures."""
    async with node_of(request, token):
        return _as_json(await shuffler_of(request).batches.descriptor(batch_id))


@router.post(
    "/v1/batches/{batch_id}/leases",
    response_model=wire.LeaseReply,
    openapi_extra=json_body(wire.LeaseRequest),
)
async def lease(batch_id: Hex16, request: Request, token: NodeToken) -> Response:
    """Leases slots to users."""
    async with node_of(request, token) as node:
        wanted = await _document(request, wire.LeaseRequest)
        return _as_json(await shuffler_of(request).lease(batch_id, node, wanted.users))


@router.post("/v1/batches/{batch_id}/declined", openapi_extra=json_body(wire.DeclineNotice))
async def decline(
    batch_id: Hex16, request: Request, token: NodeToken, core: Core
) -> wire.DeclineNotice:
    """Records why a node stops serving an open batch. The status shows the reason for a while."""
    async with node_of(request, token):
        notice = await _document(request, wire.DeclineNotice)
        await core.decline(batch_id, notice.reason)
        return notice


@router.post(
    "/v1/batches/{batch_id}/reports",
    response_model=wire.UploadReply,
    openapi_extra={"requestBody": {"required": True, "content": {wire.OCTETS: {}}}},
)
async def upload(batch_id: Hex16, request: Request, token: NodeToken) -> Response:
    """Stores the reports of an upload. The answer follows once every outcome is durable."""
    core, began = shuffler_of(request), asyncio.get_running_loop().time()
    async with node_of(request, token) as node:
        batch = await core.admission.batch(batch_id)
        check_batch_key(batch.batch_key, request.headers.get(wire.BATCH_KEY_HEADER))
        with core.inflight.meter(node) as meter:
            request, limit = metered(request, meter), core.upload_limit(batch)
            # No variable here holds the body, so its memory is freed once the reports are opened.
            return _as_json(await core.upload(batch, node, await read_body(request, limit), began))


@router.get("/v1/batches/{batch_id}/status", response_model=wire.BatchStatus)
async def status(
    batch_id: Hex16, request: Request, token: EitherToken, query: Annotated[StatusQuery, Query()]
) -> Response:
    """Returns a batch's status. With ``state``, waits until the batch has reached that state."""
    core = shuffler_of(request)
    with caller_of(request, token, *COORDINATOR_OR_OPERATOR) as caller:
        status = await core.batches.status(batch_id, wait=query.wait, wanted=query.state)
        return _as_json(visible_status(status, caller))


@router.get("/v1/deposits", dependencies=[CoordinatorOnly])
async def deposits(core: Core) -> wire.Deposits:
    """Lists the ids of open batches, for a coordinator whose store may be an older copy."""
    return wire.Deposits(open=tuple(await core.batches.tidied(batch_rows.open_ids, core.now)))


@router.get("/v1/batches/{batch_id}/conservation")
async def conservation(
    batch_id: Hex16, core: Core, caller: CoordinatorOrOperator
) -> wire.Conservation:
    """Accounts for everything sent to a batch: accepted = held + forwarded + dropped."""
    return await core.conservation(batch_id, whole=caller == "operator")


@router.get(
    "/v1/batches/{batch_id}/messages",
    dependencies=[CoordinatorOnly],
    response_class=StreamingResponse,
    responses={200: {"content": {wire.OCTETS: {}}}},
)
async def messages(batch_id: Hex16, core: Core) -> StreamingResponse:
    """Returns all messages of a sealed batch, permuted. A repeated call gets the same bytes.

    For a batch of sums, returns the sum and then the permuted keys of the reports.
    """
    release = await core.batches.release(batch_id)
    headers = {wire.DIGEST_HEADER: release.sha256, "Content-Length": str(release.size)}
    return StreamingResponse(_chunks(release), media_type=wire.OCTETS, headers=headers)


@router.post(
    "/v1/batches/{batch_id}/acknowledgement",
    response_model=wire.BatchStatus,
    openapi_extra=json_body(wire.Acknowledgement),
)
async def acknowledge(batch_id: Hex16, request: Request, token: CoordinatorToken) -> Response:
    """Acknowledges the messages and names those that failed. The shuffler then erases the batch."""
    with caller_of(request, token, "coordinator"):
        said = await _document(request, wire.Acknowledgement)
        acknowledge = shuffler_of(request).batches.acknowledge
        status = await acknowledge(batch_id, said.messages_sha256, said.failed)
        return _as_json(for_coordinator(status))


@router.post("/v1/batches/{batch_id}/abandon")
async def abandon(batch_id: Hex16, core: Core, caller: CoordinatorOrOperator) -> wire.BatchStatus:
    """Abandons a batch with fewer than n reports; refuses to abandon a complete batch."""
    return visible_status(await core.batches.abandon(batch_id), caller)


@router.post(
    "/v1/nodes",
    dependencies=[OperatorOnly],
    status_code=201,
    openapi_extra=json_body(wire.EnrolRequest),
)
async def enrol(request: Request, core: Core) -> wire.Enrolment:
    """Enrols a node. The answer has the node's token, which is never shown again."""
    return await core.enrol(await _document(request, wire.EnrolRequest))


@router.get("/v1/nodes", dependencies=[OperatorOnly])
async def list_nodes(core: Core) -> wire.NodeList:
    """Lists all nodes, with the counts of their users and leases."""
    return await core.nodes()


@router.delete("/v1/nodes/{node_id}", dependencies=[OperatorOnly], status_code=204)
async def revoke(node_id: Hex16, core: Core) -> None:
    """Revokes a node's credential."""
    await core.revoke(node_id)


@open_router.get("/v1/identity")
async def identity(core: Core) -> wire.ShufflerIdentity:
    """Returns the shuffler's id and public key. Compare both with what you pinned."""
    return core.identity


@open_router.get("/livez")
async def livez() -> dict[str, str]:
    """Answers as long as the process runs."""
    return {"status": "ok"}


@open_router.get("/readyz")
async def readyz(core: Core) -> dict[str, str]:
    """Answers 200 if store and secrets can be written."""
    await core.ready()
    return {"status": "ok"}


@router.get(
    "/metrics",
    dependencies=[MetricsOnly],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def show_metrics(core: Core) -> Response:
    """Returns metrics for Prometheus. Needs the operator's token or the token for metrics.

    If the store is out of reach, the metrics of the store are missing.

    Every upload changes the metrics, so the coordinator must not read them.
    """
    return metrics_response(*await core.measure())


_PROBLEMS = {
    "deposit": "malformed too-large bad-signature descriptor-conflict wrong-recipient late "
    "wrong-size outdated-key trust-refused epoch-refused batch-too-small test-entry-refused "
    "weak-guarantee",
    "list_batches": "malformed",
    "lease": "malformed too-large unknown-batch",
    "decline": "malformed too-large unknown-batch",
    "upload": "malformed too-large wrong-size outdated-key unknown-batch",
    "messages": "malformed unknown-batch batch-not-ready late",
    "acknowledge": "malformed too-large unknown-batch batch-not-ready wrong-state",
    "abandon": "malformed unknown-batch wrong-state",
    "enrol": "malformed too-large",
    "revoke": "malformed not-found",
    **dict.fromkeys(("deposits", "list_nodes", "show_metrics"), ""),
}
declare_problems(router, _PROBLEMS, "malformed unknown-batch")
declare_problems(open_router, {"readyz": "unavailable"}, always=ANY_CALLER)

FAST_ROUTES = (deposit, list_batches, descriptor, lease, upload, status, acknowledge)
"""Routes that are called often. They skip FastAPI's routing and dependency injection."""


async def _chunks(release: Release) -> AsyncIterator[memoryview]:
    """Yields the chunks of a release. Starlette would run a plain iterator in a thread."""
    for chunk in release.chunks():
        yield chunk


def _as_json(document: Document, status: int = 200) -> Response:
    """Returns a document as JSON. FastAPI would validate a long document again, item by item."""
    return Response(document.model_dump_json(), status, media_type="application/json")


async def _document(request: Request, model: type[D]) -> D:
    try:
        return model.model_validate_json(await read_body(request, MAX_JSON_BYTES))
    except ValidationError as error:
        raise RemoteError("malformed", first_fault(error)) from error


def run(settings: Settings, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT. Raises LocalError if settings, store or port are unusable."""
    preflight(settings)
    hold(settings.url)
    app = create_app(settings)
    serve(app, settings, "shuffler", on_start, lambda: release_polls(app))
