"""What every service does the same way: problem documents, bounded bodies, tokens, serving."""

import asyncio
import gc
import signal
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from riffle.common.process.endpoint import Tls, is_loopback
from riffle.common.process.journal import Journal
from riffle.common.process.tracing import matched_route
from riffle.common.protocol.errors import (
    MAX_DETAIL_LENGTH,
    MEDIA_TYPE,
    PROBLEMS,
    URN,
    LocalError,
    RemoteError,
    RiffleError,
)
from riffle.common.server.monitoring import note_problem

FRAMEWORK: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""What the web framework may tell of its own accord: nothing. Where a process has a global provider
(``FASTAPI_OTEL_AUTO_CONFIGURE`` makes one) it would give it paths with their ids, callers'
addresses and the text of exceptions, and go on with a caller's trace."""


MAX_JSON_BYTES = 1 << 20
GRACE_SECONDS = 20
BODY_SECONDS = 60
KEEP_ALIVE_SECONDS = 30
"""A silent connection is kept longer than by any client of ours (5 s): one that both sides close at
the same time breaks a request that was just being sent."""

PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem document (RFC 9457)",
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "title": "Problem",
                    "properties": {
                        "type": {"enum": [URN + slug for slug in PROBLEMS]},
                        "title": {"type": "string"},
                        "status": {"type": "integer"},
                        "detail": {"type": "string", "maxLength": MAX_DETAIL_LENGTH},
                    },
                    "required": ["type", "title", "status", "detail"],
                    "additionalProperties": False,
                }
            }
        },
    }
}
"""What OpenAPI says of every answer that is no success."""

_STATUS_SLUGS = {404: "not-found", 405: "method-not-allowed", 413: "too-large"}


def problem_response(error: RiffleError) -> JSONResponse:
    """An error as its problem document."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(
        error.document(), status_code=error.status, media_type=MEDIA_TYPE, headers=headers
    )


def problem_answer(request: Request, error: RiffleError) -> JSONResponse:
    """An error as the answer to a request, noted among its problems."""
    note_problem(request, error.slug)
    return problem_response(error)


def install_problem_handlers(app: FastAPI, journal: Journal) -> None:
    """Answer every error with a problem document; nothing of ours leaks a traceback."""

    async def riffle(request: Request, error: Exception) -> JSONResponse:
        known = error if isinstance(error, RiffleError) else LocalError("internal", "see the log")
        return problem_answer(request, known)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        faults = error.errors() if isinstance(error, RequestValidationError) else []
        where = ".".join(str(part) for part in faults[0]["loc"]) if faults else "request"
        what = faults[0]["msg"] if faults else "not understood"
        return problem_answer(request, RemoteError("malformed", f"{where}: {what}"))

    async def http(request: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 500
        slug = _STATUS_SLUGS.get(status, "malformed")
        detail = str(error.detail) if isinstance(error, HTTPException) else "not understood"
        answered = problem_answer(request, RemoteError(slug, detail))
        if isinstance(error, HTTPException) and error.headers:  # as Allow, of a 405
            answered.headers.update(error.headers)
        return answered

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        method, route = matched_route(request.scope) or ("none", "none")
        journal.exception("unexpected-error", error, method=method, route=route)
        return problem_response(LocalError("internal", "unexpected error; see the service's log"))

    app.add_exception_handler(RiffleError, riffle)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI of a JSON body that a route reads by hand, because it is bounded."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, refused as soon as it exceeds ``limit`` bytes or takes BODY_SECONDS.

    Raises:
        RemoteError: ``too-large``; ``too-slow``, which is to be tried again.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(request, limit)
    except TimeoutError as error:
        raise RemoteError(
            "too-slow", f"the body did not arrive within {BODY_SECONDS} seconds"
        ) from error


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise RemoteError("too-large", f"the body may have at most {limit} bytes here")
        chunks.append(chunk)
    return b"".join(chunks)


_BEARER = Security(HTTPBearer(auto_error=False))
"""Tells OpenAPI that a token is needed; `require_token` is what asks for it."""


def bearer_token(request: Request) -> str:
    """The request's bearer token.

    Raises:
        RemoteError: ``unauthorized``, when there is none.
    """
    scheme, __, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise RemoteError("unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


async def require_token(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, _BEARER] = None
) -> str:
    """See `bearer_token`.

    A coroutine that waits for nothing, as every dependency of a route that has nothing to wait for:
    FastAPI runs a plain function in a thread, which costs more than all that it does.
    """
    return bearer_token(request)


Token = Annotated[str, Depends(require_token)]


class _Protocol(HttpToolsProtocol):
    """Hands a body on in the pieces that the parser made of it.

    uvicorn copies each into a buffer and out of it again, a seventh of what it takes to read 2 MB
    of reports. Now a buffer is made only where a piece comes before the last one was taken.
    """

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            self.cycle.body = _room(self.cycle.body)  # type: ignore[assignment]
        super().on_body(body)


def _room(held: bytes | bytearray) -> bytes | bytearray:
    """What to add a piece to. An empty `bytes` and a piece add up to the piece itself, uncopied."""
    if not held:
        return b""
    return held if isinstance(held, bytearray) else bytearray(held)


class _Server(uvicorn.Server):
    """Says that it stops before it waits for answers that are still to be given.

    It sleeps until a signal comes; `_Dated` says the date. uvicorn's own loop looks ten times a
    second, which is most of what an idle service takes.
    """

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._told = asyncio.Event()
        self._sleeping: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._sleeping = asyncio.get_running_loop()
        if not self.should_exit:
            await self._told.wait()
        self._sleeping = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._sleeping is not None:
            self._sleeping.call_soon_threadsafe(self._told.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    tls: Tls | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Run an app under uvicorn until SIGTERM or SIGINT, also as PID 1; drain before leaving.

    ``on_start`` is called once the port is ours. ``on_stop`` is called in the event loop when the
    drain begins: it must end what would wait for news (long polls, streams); the rest gets
    GRACE_SECONDS to finish.

    Raises:
        LocalError: ``unavailable``, when the port is in use; ``invalid-spec``, when the address is
            not loopback and there is no TLS, or its files cannot be used; what the app raises when
            it cannot start.
    """
    if tls is None and not is_loopback(host):
        raise LocalError(
            "invalid-spec",
            f"TLS is mandatory off loopback: give a certificate and key to listen on {host}",
        )
    lifespan = _Lifespan(app)
    config = _config(_Dated(lifespan), tls)
    with _listen(host, port, config.backlog) as listener:
        server = _Server(config, on_stop)
        # uvicorn drains on both signals and then raises them again; the drain is all we want. One
        # that comes before uvicorn listens to them is not lost either.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        on_start()
        # What is loaded by now stays until the end. Were it not set aside, every full collection
        # would walk through all of it, and a request that leases for a hundred people pays for one.
        gc.collect()
        gc.freeze()
        try:
            server.run(sockets=[listener])
        except SystemExit:  # how uvicorn says that the app did not start
            if lifespan.error is None:
                raise
    if lifespan.error is not None:
        raise lifespan.error


class _Dated:
    """Says in every answer when it began.

    uvicorn's own date, made once a second, is that of the request: after a long poll a peer would
    take the time it waited for a clock that is wrong.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(b"date", _date(int(time.time()))), *message["headers"]]
            await send(message)

        await self._app(scope, receive, dated)


@lru_cache(maxsize=1)
def _date(seconds: int) -> bytes:
    """Seconds since 1970 as a header says them."""
    return formatdate(seconds, usegmt=True).encode()


class _Lifespan:
    """An app and why it could not start: uvicorn logs that as text and then leaves with code 0."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] == "lifespan":
                self.error = error
            raise


def _config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,  # it would replace the handlers of the whole process
        log_level="warning",
        access_log=False,  # an access log would tell who sent when
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        proxy_headers=False,  # nothing asks where a request came from
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    try:
        config.load()
    except OSError as error:  # SSLError is one
        if tls is None:
            raise
        files = f"{tls.certificate} and {tls.key}"
        detail = f"cannot use the TLS files {files}: {error.strerror or error}"
        raise LocalError("invalid-spec", detail) from error
    return config


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket. Listening at once makes a second one fail here and nowhere later."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise LocalError(
            "unavailable",
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port or stop what "
            "uses it",
        ) from error
    return listener
