"""The coordinator's client of the shuffler: a few calls over HTTP. Every call may be repeated.

The shuffler's own refusal is a RemoteError, with its slug (`common.protocol.errors.read_refusal`).
Every other failure may be temporary and is a LocalError ``unavailable``. For example, there is no
connection, or the shuffler does not know a token or key yet.
"""

import hashlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeVar

import httpx

from riffle.common.process import endpoint
from riffle.common.process.tracing import in_span
from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import MAX_DESCRIPTOR_BYTES, Document, SignedDescriptor
from riffle.common.protocol.errors import LocalError, RiffleError, read_refusal
from riffle.common.server.monitoring import clock_skew
from riffle.coordinator.metrics import JOURNAL

PEER = "the shuffler"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
RECORD_SECONDS = 10.0
MAX_ANSWER_BYTES = 2 * MAX_DESCRIPTOR_BYTES
"""Twice a descriptor's limit: a deposit's answer has the descriptor as an escaped JSON string."""
MAY_PASS = {
    "unauthorized": "the coordinator's token; see RIFFLE_COORDINATOR_SHUFFLER_TOKEN_FILE",
    "forbidden": "the coordinator's token; see RIFFLE_COORDINATOR_SHUFFLER_TOKEN_FILE",
    "outdated-key": "pin the analyzer's new key at the shuffler",
}
"""Refusals that an operator can resolve while the run waits, with advice."""

Answer = TypeVar("Answer", bound=Document)
Octets = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Messages:
    """All messages of a sealed batch, and the SHA-256 (hex) that both sides computed."""

    data: Octets
    sha256: str


class ShufflerClient:
    """Calls the shuffler. When it last answered, its clock was ``skew`` seconds ahead."""

    skew: float | None = None

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @classmethod
    def connect(cls, url: str, token: str, verify: ssl.SSLContext | bool) -> "ShufflerClient":
        """Returns a client of the shuffler; ``url`` may list its replicas, separated by commas.

        ``verify``: see `common.process.endpoint.server_verification`.
        """
        urls, headers = endpoint.split_urls(url), {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        # No proxy from environment variables, because a proxy would see the token.
        each = endpoint.AsyncFailover(
            urls, httpx.AsyncHTTPTransport(verify=verify, trust_env=False), journal=JOURNAL
        )
        client = httpx.AsyncClient(
            base_url=urls[0], transport=each, headers=headers, timeout=timeout
        )
        return cls(client)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def deposit(self, batch_id: str, data: bytes, signature: str) -> SignedDescriptor:
        """Deposits a descriptor's bytes. A second deposit of these bytes gets the same answer."""
        headers = {wire.SIGNATURE_HEADER: signature, "Content-Type": "application/json"}
        path = f"/v1/batches/{batch_id}"
        request = self._client.build_request("PUT", path, content=data, headers=headers)
        return await self._call(
            request, SignedDescriptor, lambda signed: signed.descriptor.encode() == data
        )

    async def status(self, batch_id: str, wait: float) -> wire.BatchStatus:
        """Returns the batch's status as soon as n reports are in, or after ``wait`` seconds."""
        path = f"/v1/batches/{batch_id}/status"
        params = {"wait": f"{wait:.3f}", "state": "sealed"}
        request = self._client.build_request("GET", path, params=params)
        return await self._call(
            request, wire.BatchStatus, lambda status: status.batch_id == batch_id
        )

    async def open_batches(self) -> tuple[str, ...]:
        """Returns the ids of all batches that take reports."""
        request = self._client.build_request("GET", "/v1/deposits", timeout=RECORD_SECONDS)
        return (await self._call(request, wire.Deposits)).open

    async def conservation(self, batch_id: str) -> wire.Conservation:
        """Returns the shuffler's record of a batch, reduced to what a coordinator may see."""
        path = f"/v1/batches/{batch_id}/conservation"
        request = self._client.build_request("GET", path, timeout=RECORD_SECONDS)
        return await self._call(
            request, wire.Conservation, lambda record: record.batch_id == batch_id
        )

    @in_span("fetch")
    async def messages(self, batch_id: str, size: int) -> Messages:
        """Returns the ``size`` bytes of a sealed batch's messages, the same at every call.

        Raises LocalError ``unavailable`` if the size or the digest of the messages is wrong.
        """
        path, headers = f"/v1/batches/{batch_id}/messages", {"Accept-Encoding": "identity"}
        data, hasher = bytearray(), hashlib.sha256()
        try:
            async with self._client.stream("GET", path, headers=headers) as response:
                endpoint.check_plain(response)
                if response.status_code != HTTPStatus.OK:
                    body = response.aiter_bytes(MAX_ANSWER_BYTES)
                    raise _refusal(response, await anext(body, b""))
                async for piece in response.aiter_bytes():
                    if len(data) + len(piece) > size:
                        raise LocalError("unavailable", f"more than {size} bytes of messages came")
                    data += piece
                    hasher.update(piece)
        except httpx.RequestError as error:
            raise endpoint.unreachable(PEER, error) from error
        digest = response.headers.get(wire.DIGEST_HEADER, "")
        if len(data) != size or digest != hasher.hexdigest():
            raise LocalError("unavailable", "the messages arrived incomplete or changed")
        return Messages(memoryview(data), digest)

    async def acknowledge(self, batch_id: str, sha256: str, failed: Sequence[int]) -> None:
        """Tells the shuffler which messages failed, and that it may now erase the messages."""
        body = wire.Acknowledgement(messages_sha256=sha256, failed=tuple(failed)).model_dump_json()
        await self._end(f"/v1/batches/{batch_id}/acknowledgement", batch_id, body)

    async def abandon(self, batch_id: str) -> None:
        """Gives up a batch that is not sealed."""
        await self._end(f"/v1/batches/{batch_id}/abandon", batch_id)

    async def identity(self) -> str:
        """Returns the shuffler's id."""
        request = self._client.build_request("GET", "/v1/identity", timeout=CONNECT_SECONDS)
        return (await self._call(request, wire.ShufflerIdentity)).shuffler_id

    async def _end(self, path: str, batch_id: str, body: str | None = None) -> None:
        request = self._client.build_request("POST", path, content=body)
        await self._call(request, wire.BatchStatus, lambda status: status.batch_id == batch_id)

    async def _call(
        self,
        request: httpx.Request,
        kind: type[Answer],
        fits: Callable[[Answer], bool] = lambda _: True,
    ) -> Answer:
        # A body longer than the bound is cut, so it does not parse.
        response, body = await endpoint.receive(PEER, self._client, request, MAX_ANSWER_BYTES)
        self.skew = clock_skew(response.headers.get("Date"), datetime.now(UTC))
        if not response.is_success:
            raise _refusal(response, body)
        return endpoint.read_answer(PEER, response, body, kind, fits)


def _refusal(response: httpx.Response, body: bytes) -> RiffleError:
    retry_after = response.headers.get("Retry-After")
    error = read_refusal(PEER, response.status_code, body, retry_after, datetime.now(UTC))
    if error.slug in MAY_PASS:
        return LocalError("unavailable", f"{error.detail} ({MAY_PASS[error.slug]})")
    return error
