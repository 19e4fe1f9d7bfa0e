"""HTTP for both services: the app, problem documents, bounded bodies, tokens, serving."""

import asyncio
import fcntl
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Security, params
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from riffle.common.process.journal import Journal
from riffle.common.process.tracing import export_spans
from riffle.common.protocol.errors import (
    MAX_DETAIL_LENGTH,
    MEDIA_TYPE,
    URN,
    LocalError,
    RemoteError,
    RiffleError,
)
from riffle.common.server import monitoring
from riffle.common.server.connections import make_server
from riffle.common.server.settings import ServerSettings, Tls

_FRAMEWORK: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own telemetry is off: it would export ids, callers' addresses and exceptions' texts."""

MAX_JSON_BYTES = 1 << 20
GRACE_SECONDS = 20
BODY_SECONDS = 60
KEEP_ALIVE_SECONDS = 30
"""A server keeps idle connections longer than Riffle's clients do (5 s). If the server closed a
connection first, a request that a client was just sending would fail."""

_FIELDS = {
    "type": {},
    "title": {"type": "string"},
    "status": {"type": "integer"},
    "detail": {"type": "string", "maxLength": MAX_DETAIL_LENGTH},
}
ANY_CALLER = ("internal", "too-many-requests", "too-slow", "head-too-large")
ANY_TOKEN = (*ANY_CALLER, "unauthorized", "unavailable")
"""`ANY_CALLER`: problems of all routes. `ANY_TOKEN`: problems of routes with token and store."""

Responses = dict[int | str, dict[str, Any]]


def problems(*slugs: str, always: Sequence[str] = ANY_TOKEN) -> Responses:
    """Returns OpenAPI's description of a route's problems, which are ``slugs`` and ``always``."""
    types = {"enum": [URN + slug for slug in sorted({*slugs, *always})]}
    schema = {
        "type": "object",
        "title": "Problem",
        "properties": _FIELDS | {"type": types},
        "required": list(_FIELDS),
        "additionalProperties": False,
    }
    description = "A problem document (RFC 9457)"
    return {"default": {"description": description, "content": {MEDIA_TYPE: {"schema": schema}}}}


def declare_problems(
    router: APIRouter,
    table: Mapping[str, str],
    others: str = "",
    always: Sequence[str] = ANY_TOKEN,
) -> None:
    """Describes the problems of a router's routes. Every route may answer the slugs in ``always``.

    ``table`` maps the name of a route's function to further slugs, separated by spaces. ``others``
    has the further slugs of functions that are not in the table.
    """
    for route in router.routes:
        if isinstance(route, APIRoute):
            slugs = table.get(route.name, others).split()
            route.responses |= problems(*slugs, always=always)


_STATUS_SLUGS = {404: "not-found", 405: "method-not-allowed", 413: "too-large"}


def make_app(
    title: str,
    journal: Journal,
    metrics: monitoring.RequestMetrics,
    lifespan: Lifespan[FastAPI],
    inner: Sequence[Middleware],
    routers: Iterable[APIRouter],
) -> FastAPI:
    """Returns an app with the routes of ``routers``.

    The app's middleware records metrics and spans, and then calls ``inner``. Every error is
    answered with a problem document. There is no /docs: that page loads scripts from other hosts.
    """
    app = FastAPI(
        title=title,
        version="1",
        # Not `include_router`: each app would analyse the router again at its first request.
        routes=[route for router in routers for route in router.routes],
        lifespan=lifespan,
        middleware=[Middleware(monitoring.MetricsMiddleware, metrics=metrics), *inner],
        docs_url=None,
        redoc_url=None,
        telemetry=_FRAMEWORK,
    )
    install_problem_handlers(app, journal)
    return app


def problem_answer(scope: Scope, error: RiffleError) -> JSONResponse:
    """Returns an error's problem document as a response, and notes its slug for the metrics."""
    scope[monitoring.PROBLEM_KEY] = error.slug
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(
        error.document(), status_code=error.status, media_type=MEDIA_TYPE, headers=headers
    )


def install_problem_handlers(app: FastAPI, journal: Journal) -> None:
    """Answers every error with a problem document, so that no answer shows a traceback."""

    @app.exception_handler(RiffleError)
    async def riffle(request: Request, error: RiffleError) -> JSONResponse:
        return problem_answer(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        return problem_answer(request.scope, RemoteError("malformed", f"{where}: {fault['msg']}"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        slug = _STATUS_SLUGS.get(error.status_code, "malformed")
        response = problem_answer(request.scope, RemoteError(slug, str(error.detail)))
        response.headers.update(error.headers or {})  # such as Allow with a 405
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        method, route = monitoring.matched_route(request.scope) or ("none", "none")
        journal.exception("unexpected-error", error, method=method, route=route)
        failure = LocalError("internal", "unexpected error; see the service's log")
        return problem_answer(request.scope, failure)


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Returns OpenAPI's description of a JSON body for a route that reads the body itself."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def read_body(request: Request, limit: int) -> bytes:
    """Reads and returns the whole body.

    Raises RemoteError ``too-large`` as soon as the body exceeds ``limit`` bytes, and ``malformed``
    if the caller hangs up. After BODY_SECONDS, raises ``too-slow``: the caller should try again.
    """
    chunks: list[bytes] = []
    free = limit
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                chunks.append(chunk)
                if (free := free - len(chunk)) < 0:
                    break
    except TimeoutError as error:
        detail = f"the body did not arrive within {BODY_SECONDS} seconds"
        raise RemoteError("too-slow", detail) from error
    except ClientDisconnect as error:
        raise RemoteError("malformed", "the caller hung up within the body") from error
    if free < 0:
        raise RemoteError("too-large", f"the body may have at most {limit} bytes here")
    return b"".join(chunks)


async def bearer_token(request: Request) -> str:
    """Returns the request's bearer token; raises RemoteError ``unauthorized`` if there is none.

    This is a coroutine function because FastAPI would run a plain function in a thread.
    """
    scheme, __, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise RemoteError("unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


def token_of(*callers: str) -> params.Depends:
    """Returns a dependency that passes the result of `bearer_token` to a route.

    OpenAPI shows that the route takes tokens of ``callers``, but the route must check the token.
    """
    dependency: params.Depends = Depends(bearer_token)
    for name in callers:
        scheme = Security(HTTPBearer(scheme_name=name, auto_error=False))

        async def same(token: Annotated[str, dependency], _: Annotated[object, scheme]) -> str:
            return token

        dependency = Depends(same)
    return dependency


def hold(url: str) -> None:
    """If ``url`` names a SQLite file, keeps other services off the file until this process ends.

    Raises LocalError ``unavailable`` if another process holds the file.
    """
    file = url.removeprefix("sqlite:///").partition("?")[0]
    if not url.startswith("sqlite:///") or file in {"", ":memory:"}:
        return
    try:
        lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT, 0o600)  # closing it would free it
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = error.strerror
        if isinstance(error, BlockingIOError):
            why = "another process serves it; end that process, or use PostgreSQL for replicas"
        raise LocalError("unavailable", f"the store {file} cannot be used: {why}") from error


def serve(
    app: FastAPI,
    settings: ServerSettings,
    service: str,
    on_start: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """Runs an app under uvicorn until SIGTERM or SIGINT arrives, and then drains the app.

    ``service`` is the app's name in traces. ``on_start`` is called when the app has started.
    ``on_stop`` is called in the event loop when the drain begins; it must end requests that wait
    for changes (long polls, streams). Other requests have GRACE_SECONDS to finish.

    Raises LocalError ``unavailable`` if the port is in use, and ``invalid-spec`` if the TLS files
    cannot be used. If the app fails to start, raises the app's error.
    """
    outermost = _Outermost(app, on_start)
    config = _config(outermost, settings.tls())
    with export_spans(service), _listen(settings.host, settings.port, config.backlog) as listener:
        server = make_server(config, settings, on_stop)
        # After the drain, uvicorn raises the signal again. These handlers keep it from ending the
        # process. They also catch a signal that arrives before uvicorn installs its own handlers.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is a file
        # Objects loaded by now stay until the end. If they were not frozen, every full collection
        # would visit them all and delay the request that triggers it.
        gc.collect()
        gc.freeze()
        try:
            server.run(sockets=[listener])
        except SystemExit:  # uvicorn exits like this if the app did not start
            if outermost.startup_error is None:
                raise
    if outermost.startup_error is not None:
        raise outermost.startup_error


class _Outermost:
    """ASGI middleware: sets each answer's date, calls ``on_start``, and keeps a startup error.

    The date is the time at which an answer begins. uvicorn's own date is the time of the request:
    after a long poll, a peer would mistake the wait for clock skew.
    """

    def __init__(self, app: ASGIApp, on_start: Callable[[], None]) -> None:
        self._app, self._on_start = app, on_start
        self.startup_error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(b"date", _date(int(time.time()))), *message["headers"]]
            elif message["type"] == "lifespan.startup.complete":
                self._on_start()
            await send(message)

        try:
            await self._app(scope, receive, send_dated)
        except Exception as error:
            if scope["type"] == "lifespan":
                self.startup_error = error
            raise


@lru_cache(maxsize=1)
def _date(seconds: int) -> bytes:
    return formatdate(seconds, usegmt=True).encode()


def _config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,  # a config would replace the log handlers of the whole process
        log_level="error",  # uvicorn warns of every stranger's malformed request
        access_log=False,  # an access log would reveal who sent a request when
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        proxy_headers=False,  # nothing uses the address of a request's sender
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    try:
        config.load()
    except OSError as error:  # SSLError is an OSError
        if tls is None:
            raise
        files = f"{tls.certificate} and {tls.key}"
        detail = f"cannot use the TLS files {files}: {error.strerror or error}"
        raise LocalError("invalid-spec", detail) from error
    return config


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """Returns a socket that listens already, so a second process with this port fails here."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host}:{port} ({error.strerror})"
        way_out = "choose another port or stop what uses it"
        raise LocalError("unavailable", f"{reason}; {way_out}") from error
    return listener
