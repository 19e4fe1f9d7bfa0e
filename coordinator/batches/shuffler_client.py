"""The coordinator's client of the shuffler: a few calls over HTTP, each of which may be repeated.

Every answer becomes a value or an error here. A RemoteError is a refusal that the shuffler means,
with its slug (`common.protocol.errors.read_refusal`). Everything else may pass, and is a LocalError
``unavailable``: no connection, an answer that is not the shuffler's or not to this call, a token or
key that the shuffler does not know yet. Answers are read up to a bound, never compressed.

Messages are long: a thread reads them, over a transport whose waits can be interrupted.
"""

import asyncio
import contextlib
import hashlib
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeVar

import httpx
from pydantic import ValidationError

from riffle.common.process.endpoint import AsyncFailover, Failover, check_plain, receive, split_urls
from riffle.common.process.tracing import in_span
from riffle.common.protocol.descriptor import MAX_DESCRIPTOR_BYTES, Document, SignedDescriptor
from riffle.common.protocol.errors import LocalError, RiffleError, foreign_answer, read_refusal
from riffle.common.protocol.wire import (
    DIGEST_HEADER,
    SIGNATURE_HEADER,
    Acknowledgement,
    BatchStatus,
    Conservation,
    Deposits,
    ShufflerIdentity,
)
from riffle.common.server.monitoring import clock_skew

PEER = "the shuffler"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
RECORD_SECONDS = 10.0
PIECE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 2 * MAX_DESCRIPTOR_BYTES
"""A deposit's answer has the descriptor inside a JSON string, escaped."""
MAY_PASS = {
    "unauthorized": "the coordinator's token; see SHUFFLER_TOKEN",
    "forbidden": "the coordinator's token; see SHUFFLER_TOKEN",
    "outdated-key": "pin the analyzer's new key at the shuffler",
}
"""Refusals that people mend while the run waits, with what to do."""

Answer = TypeVar("Answer", bound=Document)
Octets = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Messages:
    """All messages of a sealed batch, and the SHA-256 (hex) that both sides computed."""

    data: Octets
    sha256: str


class ShufflerClient:
    """Calls the shuffler. ``long_client``: a client of the same shuffler for long answers.

    ``skew``: seconds that its clock was ahead of ours when it last answered; None: not known.
    """

    skew: float | None = None

    def __init__(self, client: httpx.AsyncClient, long_client: httpx.Client) -> None:
        self._client = client
        self._long_client = long_client
        long_client.headers["Accept-Encoding"] = "identity"

    @classmethod
    def connect(cls, url: str, token: str, verify: ssl.SSLContext | bool) -> "ShufflerClient":
        """Returns a client of the shuffler at ``url``, or at several replicas' with commas between.

        ``verify``: see `common.process.endpoint.server_verification`.
        """
        urls = split_urls(url)
        headers = {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        # A proxy of the environment must not see the token.
        each = AsyncFailover(urls, httpx.AsyncHTTPTransport(verify=verify, trust_env=False))
        interruptible = Failover(urls, InterruptibleTransport(verify))
        return cls(
            httpx.AsyncClient(base_url=urls[0], transport=each, headers=headers, timeout=timeout),
            httpx.Client(
                base_url=urls[0], transport=interruptible, headers=headers, timeout=timeout
            ),
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()
        self._long_client.close()

    async def deposit(self, batch_id: str, data: bytes, signature: str) -> SignedDescriptor:
        """Deposits a descriptor's bytes; the same bytes again get the same answer."""
        headers = {SIGNATURE_HEADER: signature, "Content-Type": "application/json"}
        path = f"/v1/batches/{batch_id}"
        request = self._client.build_request("PUT", path, content=data, headers=headers)
        return await self._call(
            request, SignedDescriptor, lambda signed: signed.descriptor.encode() == data
        )

    async def status(self, batch_id: str, wait: float) -> BatchStatus:
        """Returns the batch's status, as soon as it is sealed or after ``wait`` seconds."""
        path = f"/v1/batches/{batch_id}/status"
        params = {"wait": f"{wait:.3f}", "state": "sealed"}
        request = self._client.build_request("GET", path, params=params)
        return await self._call(request, BatchStatus, lambda status: status.batch_id == batch_id)

    async def open_batches(self) -> tuple[str, ...]:
        """Returns the ids of all batches that take reports."""
        request = self._client.build_request("GET", "/v1/deposits", timeout=RECORD_SECONDS)
        return (await self._call(request, Deposits)).open

    async def conservation(self, batch_id: str) -> Conservation:
        """Returns what became of everything sent to the batch, as far as coordinators may know."""
        path = f"/v1/batches/{batch_id}/conservation"
        request = self._client.build_request("GET", path, timeout=RECORD_SECONDS)
        return await self._call(request, Conservation, lambda record: record.batch_id == batch_id)

    @in_span("fetch")
    async def messages(self, batch_id: str, size: int) -> Messages:
        """Returns a sealed batch's messages, ``size`` bytes; the same bytes until acknowledged.

        Stops reading when it is cancelled.

        Raises:
            LocalError: ``unavailable``: there are more or fewer, or they do not have the digest.
        """
        path, answer_wait = f"/v1/batches/{batch_id}/messages", AnswerWait()
        try:
            return await asyncio.to_thread(self._read_messages, path, size, answer_wait)
        finally:
            answer_wait.interrupt()

    def _read_messages(self, path: str, size: int, answer_wait: "AnswerWait") -> Messages:
        """Reads the body into a buffer of ``size`` bytes without copies; stops if interrupted."""
        # Not numpy's, of huge pages: where a host must find them first they take twice as long.
        data, end, hasher = memoryview(bytearray(size)), 0, hashlib.sha256()
        extensions = {ANSWER_WAIT: answer_wait}
        try:
            with self._long_client.stream("GET", path, extensions=extensions) as response:
                check_plain(response)
                if response.status_code != HTTPStatus.OK:
                    raise _refusal(response, next(response.iter_bytes(MAX_ANSWER_BYTES), b""))
                for chunk in response.iter_bytes():
                    start, end = end, end + len(chunk)
                    if answer_wait.interrupted:
                        break
                    if end > size:
                        raise LocalError("unavailable", f"more than {size} bytes of messages came")
                    data[start:end] = chunk
                    hasher.update(chunk)
        except httpx.RequestError as error:
            raise _unreachable(error) from error
        digest = response.headers.get(DIGEST_HEADER, "")
        if end != size or digest != hasher.hexdigest():
            raise LocalError("unavailable", "the messages arrived incomplete or changed")
        return Messages(data, digest)

    async def acknowledge(self, batch_id: str, sha256: str, failed: Sequence[int]) -> None:
        """Tells the shuffler that the messages are settled here, so that it may erase them."""
        body = Acknowledgement(messages_sha256=sha256, failed=tuple(failed)).model_dump_json()
        await self._end(f"/v1/batches/{batch_id}/acknowledgement", batch_id, body)

    async def abandon(self, batch_id: str) -> None:
        """Gives up a batch that is not sealed."""
        await self._end(f"/v1/batches/{batch_id}/abandon", batch_id)

    async def identity(self) -> str:
        """Returns the shuffler's id."""
        request = self._client.build_request("GET", "/v1/identity", timeout=CONNECT_SECONDS)
        return (await self._call(request, ShufflerIdentity)).shuffler_id

    async def _end(self, path: str, batch_id: str, body: str | None = None) -> None:
        request = self._client.build_request("POST", path, content=body)
        await self._call(request, BatchStatus, lambda status: status.batch_id == batch_id)

    async def _call(
        self,
        request: httpx.Request,
        kind: type[Answer],
        fits: Callable[[Answer], bool] = lambda _: True,
    ) -> Answer:
        response, body = await self._exchange(request)
        return read_answer(response, body, kind, fits)

    async def _exchange(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        """Returns an answer and its body, which ends past the bound if it is longer."""
        try:
            response, body = await receive(self._client, request, MAX_ANSWER_BYTES)
        except httpx.RequestError as error:
            raise _unreachable(error) from error
        self.skew = clock_skew(response.headers.get("Date"), datetime.now(UTC))
        return response, body


# -- what answers mean ---------------------------------------------------------------------------


def read_answer(
    response: httpx.Response, body: bytes, kind: type[Answer], fits: Callable[[Answer], bool]
) -> Answer:
    """Returns an answer's document; raises LocalError ``unavailable`` unless it ``fits``.

    Raises what a refusal means, too.
    """
    if not response.is_success:
        raise _refusal(response, body)
    try:
        answer = kind.model_validate_json(body)
    except ValidationError:
        answer = None
    if answer is None or not fits(answer):
        raise LocalError("unavailable", foreign_answer(PEER, response.status_code))
    return answer


def _unreachable(error: httpx.RequestError) -> LocalError:
    return LocalError("unavailable", f"{PEER} does not answer ({type(error).__name__})")


def _refusal(response: httpx.Response, body: bytes) -> RiffleError:
    retry_after = response.headers.get("Retry-After")
    error = read_refusal(PEER, response.status_code, body, retry_after, datetime.now(UTC))
    if error.slug in MAY_PASS:
        return LocalError("unavailable", f"{error.detail} ({MAY_PASS[error.slug]})")
    return error


# -- long answers --------------------------------------------------------------------------------

ANSWER_WAIT = "riffle.answer_wait"
"""Key of a request's extensions: its `AnswerWait`."""


class AnswerWait:
    """A thread's wait for an answer, which another thread can interrupt."""

    def __init__(self) -> None:
        self.interrupted = False
        self._socket: socket.socket | None = None

    def use(self, connected: socket.socket) -> None:
        """Names the request's connection, and closes it if the wait was interrupted before."""
        self._socket = connected
        if self.interrupted:
            self.interrupt()

    def interrupt(self) -> None:
        """Shuts the connection down: to its reader the answer is over."""
        self.interrupted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it was closed
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class InterruptibleTransport(httpx.BaseTransport):
    """Transport for long answers: no proxy, one connection a request, pieces of 1 MiB.

    httpx's own transport cannot be interrupted, and copies pieces of 64 KiB four times, which takes
    23 ms of a core for 50 MB.
    """

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._context = httpx.create_ssl_context(verify=verify, trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        connection = self._connect(request)
        try:
            target = request.url.raw_path.decode("ascii")
            connection.request(request.method, target, headers=dict(request.headers))
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise httpx.ReadError(str(error), request=request) from error
        body = _Body(connection, answer)
        return httpx.Response(answer.status, headers=answer.getheaders(), stream=body)

    def _connect(self, request: httpx.Request) -> http.client.HTTPConnection:
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
        if (answer_wait := request.extensions.get(ANSWER_WAIT)) is not None:
            answer_wait.use(connection.sock)
        return connection


class _Body(httpx.SyncByteStream):
    """An answer's body in pieces; closing it closes the connection."""

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
