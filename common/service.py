"""What every service does the same way: problem documents, bounded bodies, tokens, serving."""

import hashlib
import hmac
import ipaddress
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from common.errors import MEDIA_TYPE, LocalError, RemoteError, RiffleError

MAX_JSON_BYTES = 1 << 20
GRACE_SECONDS = 20

_STATUS_SLUGS = {404: "not-found", 405: "method-not-allowed", 413: "too-large"}


def problem_response(error: RiffleError) -> JSONResponse:
    """An error as its problem document."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(
        error.document(), status_code=error.status, media_type=MEDIA_TYPE, headers=headers
    )


def install_problem_handlers(app: FastAPI, log: logging.Logger) -> None:
    """Answer every error with a problem document; nothing of ours leaks a traceback."""

    async def riffle(_: Request, error: Exception) -> JSONResponse:
        known = error if isinstance(error, RiffleError) else LocalError("internal", "see the log")
        return problem_response(known)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        faults = error.errors() if isinstance(error, RequestValidationError) else []
        where = ".".join(str(part) for part in faults[0]["loc"]) if faults else "request"
        what = faults[0]["msg"] if faults else "not understood"
        return problem_response(RemoteError("malformed", f"{where}: {what}"))

    async def http(_: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 500
        slug = _STATUS_SLUGS.get(status, "malformed")
        detail = str(error.detail) if isinstance(error, HTTPException) else "not understood"
        return problem_response(RemoteError(slug, detail))

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.exception("unexpected error at %s %s", request.method, request.url.path)
        return problem_response(LocalError("internal", "unexpected error; see the service's log"))

    app.add_exception_handler(RiffleError, riffle)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, refused as soon as it exceeds ``limit`` bytes.

    Raises:
        RemoteError: ``too-large``.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise RemoteError("too-large", f"the body may have at most {limit} bytes here")
        chunks.append(chunk)
    return b"".join(chunks)


def hash_token(token: str) -> str:
    """SHA-256 of a token, hex: what a store keeps. Tokens have 256 random bits: no salt needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(request: Request) -> str:
    """The request's bearer token.

    Raises:
        RemoteError: ``unauthorized``, when there is none.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise RemoteError("unauthorized", "send the header 'Authorization: Bearer <token>'")
    return token


def require_token(request: Request, *token_hashes: str) -> None:
    """Raise unless the bearer token is one of these, compared in constant time by hash."""
    given = hash_token(bearer(request))
    matches = [hmac.compare_digest(given, known) for known in token_hashes]  # no early exit
    if not any(matches):
        raise RemoteError("unauthorized", "this token is not valid here")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a server's certificate chain and private key."""

    certificate: Path
    key: Path


def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    tls: Tls | None = None,
    on_start: Callable[[], None] | None = None,
) -> None:
    """Run an app under uvicorn until SIGTERM or SIGINT, also as PID 1; drain before leaving.

    Raises:
        LocalError: ``unavailable``, when the port is in use; ``invalid-spec``, when the address is
            not loopback and there is no TLS.
    """
    if tls is None and not is_loopback(host):
        raise LocalError(
            "invalid-spec",
            f"TLS is mandatory off loopback: give a certificate and key to listen on {host}",
        )
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,  # an access log would tell who sent when
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    try:
        listener = config.bind_socket()
    except (OSError, SystemExit) as error:
        raise LocalError(
            "unavailable",
            f"cannot listen on {host}:{port}; choose another port or stop what uses it",
        ) from error
    if on_start is not None:
        on_start()
    # uvicorn drains on both signals and then raises them again; the drain is all we want.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])
