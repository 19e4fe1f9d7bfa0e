"""An httpx transport for long answers, which whoever waits for one can hang up on.

Its pieces are of 1 MiB. Those of httpx's own are of 64 KiB and copied four times on their way,
which takes 23 ms of a core for 50 MB. Each request has a connection of its own.

The shuffler as the coordinator sees it: a few calls over HTTP.

Every call may be repeated. What a repetition may cure (no connection, an answer that cannot be
decoded, a status of 408, 429 or 5xx, a token the shuffler does not know yet) is a LocalError
``unavailable``; every other refusal is a RemoteError with the shuffler's problem slug.
"""

import asyncio
import contextlib
import hashlib
import http.client
import math
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Protocol, TypeVar

import httpx
from pydantic import ValidationError

from riffle.common.process.endpoint import AsyncFailover, Failover, split_urls
from riffle.common.process.tracing import in_span
from riffle.common.protocol.descriptor import Document, SignedDescriptor
from riffle.common.protocol.errors import (
    LocalError,
    RemoteError,
    RiffleError,
    is_temporary,
    parse_retry_after,
    problem_document,
    problem_slug,
)
from riffle.common.protocol.messages import (
    DIGEST_HEADER,
    SIGNATURE_HEADER,
    Acknowledgement,
    BatchState,
    BatchStatus,
    Conservation,
    ShufflerIdentity,
)
from riffle.common.server.monitoring import clock_skew

PIECE_BYTES = 1 << 20
LINE = "riffle.line"
"""Key of a request's extensions: the `Line` that it is on."""


class Line:
    """Where a thread waits for an answer: another one can `leave` it, and the wait is over."""

    def __init__(self) -> None:
        self.left = False
        self._socket: socket.socket | None = None

    def take(self, connected: socket.socket) -> None:
        """The request is on this connection now."""
        self._socket = connected
        if self.left:
            self.leave()

    def leave(self) -> None:
        """Hang up: whoever reads finds that the answer is over."""
        self.left = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it was closed
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class BulkTransport(httpx.BaseTransport):
    """See above; no proxy of the environment sees anything."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._context = httpx.create_ssl_context(verify=verify, trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        connection = self._connected(request)
        try:
            target = request.url.raw_path.decode("ascii")
            connection.request(request.method, target, headers=dict(request.headers))
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise httpx.ReadError(str(error), request=request) from error
        body = _Body(connection, answer)
        return httpx.Response(answer.status, headers=answer.getheaders(), stream=body)

    def _connected(self, request: httpx.Request) -> http.client.HTTPConnection:
        url, seconds = request.url, request.extensions["timeout"]
        host, port = url.raw_host.decode("ascii"), url.port
        connection = (
            http.client.HTTPSConnection(host, port, context=self._context)
            if url.scheme == "https"
            else http.client.HTTPConnection(host, port)
        )
        connection.timeout = seconds["connect"]
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise httpx.ConnectError(str(error), request=request) from error
        connection.sock.settimeout(seconds["read"])
        if (line := request.extensions.get(LINE)) is not None:
            line.take(connection.sock)
        return connection


class _Body(httpx.SyncByteStream):
    """An answer's body as it comes; closing it closes the connection."""

    def __init__(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        try:
            while piece := self._answer.read(PIECE_BYTES):
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise httpx.ReadError(str(error)) from error

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
RECORD_SECONDS = 10.0

Answer = TypeVar("Answer", bound=Document)
Octets = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Messages:
    """All messages of a sealed batch, and the SHA-256 (hex) that both sides computed."""

    data: Octets
    sha256: str


class Shuffler(Protocol):
    """The calls of the coordinator to the shuffler.

    ``skew``: seconds that its clock was ahead of ours when it last answered; None: not known.
    """

    skew: float | None

    async def deposit(self, batch_id: str, data: bytes, signature: str) -> SignedDescriptor:
        """Deposit a descriptor's bytes; the same bytes again get the same answer."""
        ...

    async def status(self, batch_id: str, wait: float) -> BatchStatus:
        """The batch's status, as soon as it is sealed or after ``wait`` seconds."""
        ...

    async def conservation(self, batch_id: str) -> Conservation:
        """What became of everything sent to the batch, as far as it is told here."""
        ...

    async def messages(self, batch_id: str, size: int) -> Messages:
        """The sealed batch's messages, ``size`` bytes; the same bytes until acknowledged."""
        ...

    async def acknowledge(self, batch_id: str, sha256: str) -> None:
        """The messages are settled here; the shuffler may erase them."""
        ...

    async def abandon(self, batch_id: str) -> None:
        """Give up a batch that is not sealed."""
        ...

    async def ready(self) -> str:
        """The shuffler's id."""
        ...


class ShufflerApi:
    """`Shuffler` over HTTP; ``bulk`` is a client of the same shuffler for its long answer.

    A thread reads it (`coordinator.batches.shuffler_client`).
    """

    def __init__(self, client: httpx.AsyncClient, bulk: httpx.Client) -> None:
        self._client = client
        self._bulk = bulk
        self.skew: float | None = None

    @classmethod
    def connect(cls, url: str, token: str, verify: ssl.SSLContext | bool) -> "ShufflerApi":
        """A client of the shuffler at ``url``; for ``verify`` see
        `common.process.endpoint.server_verification`.

        ``url`` may be several, of replicas, with commas between.
        """
        urls = split_urls(url)
        headers = {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        # A proxy of the environment must not see the token.
        each = AsyncFailover(urls, httpx.AsyncHTTPTransport(verify=verify, trust_env=False))
        bulk = Failover(urls, BulkTransport(verify))
        return cls(
            httpx.AsyncClient(base_url=urls[0], transport=each, headers=headers, timeout=timeout),
            httpx.Client(base_url=urls[0], transport=bulk, headers=headers, timeout=timeout),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        self._bulk.close()

    async def deposit(self, batch_id: str, data: bytes, signature: str) -> SignedDescriptor:
        """See `Shuffler`."""
        headers = {SIGNATURE_HEADER: signature, "Content-Type": "application/json"}
        response = await self._send("PUT", f"/v1/batches/{batch_id}", content=data, headers=headers)
        return _read(SignedDescriptor, response)

    async def status(self, batch_id: str, wait: float) -> BatchStatus:
        """See `Shuffler`."""
        path = f"/v1/batches/{batch_id}/status"
        params = {"wait": f"{wait:.3f}", "state": "sealed"}
        return _read(BatchStatus, await self._send("GET", path, params=params))

    async def conservation(self, batch_id: str) -> Conservation:
        """See `Shuffler`."""
        path = f"/v1/batches/{batch_id}/conservation"
        return _read(Conservation, await self._send("GET", path, timeout=RECORD_SECONDS))

    @in_span("fetch")
    async def messages(self, batch_id: str, size: int) -> Messages:
        """See `Shuffler`; stops reading beyond ``size`` bytes, or when it is cancelled."""
        path, line = f"/v1/batches/{batch_id}/messages", Line()
        try:
            return await asyncio.to_thread(self._read_messages, path, size, line)
        finally:
            line.leave()

    def _read_messages(self, path: str, size: int, line: Line) -> Messages:
        """The body into memory of its size, none of it twice; given up when the line is left."""
        # Not numpy's, of huge pages: where a host must find them first they take twice as long.
        data, end, hasher = memoryview(bytearray(size)), 0, hashlib.sha256()
        try:
            with self._bulk.stream("GET", path, extensions={LINE: line}) as response:
                if response.status_code != HTTPStatus.OK:
                    response.read()
                    raise _refusal(response)
                for chunk in response.iter_bytes():
                    start, end = end, end + len(chunk)
                    if line.left:
                        break
                    if end > size:
                        raise RemoteError("wrong-size", f"more than {size} bytes of messages")
                    data[start:end] = chunk
                    hasher.update(chunk)
        except httpx.RequestError as error:
            raise _unreachable(error) from error
        digest = response.headers.get(DIGEST_HEADER, "")
        if end != size or digest != hasher.hexdigest():
            raise LocalError("unavailable", "the messages arrived incomplete or changed")
        return Messages(data, digest)

    async def acknowledge(self, batch_id: str, sha256: str) -> None:
        """See `Shuffler`."""
        body = Acknowledgement(messages_sha256=sha256).model_dump_json()
        await self._send("POST", f"/v1/batches/{batch_id}/acknowledgement", content=body)

    async def abandon(self, batch_id: str) -> None:
        """See `Shuffler`."""
        await self._send("POST", f"/v1/batches/{batch_id}/abandon")

    async def ready(self) -> str:
        """See `Shuffler`."""
        response = await self._send("GET", "/v1/identity", timeout=CONNECT_SECONDS)
        return _read(ShufflerIdentity, response).shuffler_id

    async def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | str | None = None,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = ANSWER_SECONDS,
    ) -> httpx.Response:
        try:
            response = await self._client.request(
                method, path, content=content, params=params, headers=headers, timeout=timeout
            )
        except httpx.RequestError as error:
            raise _unreachable(error) from error
        self.skew = clock_skew(response.headers.get("Date"), datetime.now(UTC))
        if response.is_success:
            return response
        raise _refusal(response)


async def state_at(shuffler: Shuffler, batch_id: str) -> BatchState | None:
    """A batch's state at the shuffler; None when it does not know it."""
    try:
        return (await shuffler.status(batch_id, 0.0)).state
    except RemoteError as error:
        if error.slug != "unknown-batch":
            raise
        return None


def _unreachable(error: httpx.RequestError) -> LocalError:
    return LocalError("unavailable", f"the shuffler does not answer ({type(error).__name__})")


def _refusal(response: httpx.Response) -> RiffleError:
    """The error that a refusal means here."""
    document = problem_document(response.content)
    detail = f"the shuffler says: {document.get('detail', response.reason_phrase)}"
    status, slug = response.status_code, problem_slug(document)
    if is_temporary(status):
        seconds = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        return LocalError("unavailable", detail, retry_after=math.ceil(seconds) or None)
    if slug in {"unauthorized", "forbidden"}:
        return LocalError("unavailable", f"{detail} (the coordinator's token; see SHUFFLER_TOKEN)")
    if slug == "outdated-key":
        return LocalError("unavailable", f"{detail} (pin the analyzer's new key at the shuffler)")
    return RemoteError(slug, detail)


def _read(kind: type[Answer], response: httpx.Response) -> Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise RemoteError("malformed", f"the shuffler's {kind.__name__} is malformed") from error
