"""The node's half of the shuffler's REST API: bounded answers, strict documents, patient retries.

What can pass by itself is retried with exponential back-off and full jitter (a random share of
base 2^k, so that nodes do not come back together): no connection, no answer, 429, 5xx, and answers
that are not what the protocol says. ``Retry-After`` is a floor. Everything else is the shuffler's
last word and becomes a `RemoteError` with its slug. Every request is idempotent at the shuffler, so
a lost answer costs nothing but another request.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import ValidationError

from riffle.common.process.endpoint import AsyncFailover, server_verification, split_urls
from riffle.common.protocol.descriptor import (
    MAX_DESCRIPTOR_BYTES,
    Document,
    SignedDescriptor,
    first_fault,
)
from riffle.common.protocol.errors import (
    LocalError,
    RemoteError,
    is_temporary,
    one_line,
    parse_retry_after,
    problem_document,
    problem_slug,
)
from riffle.common.protocol.messages import (
    BATCH_KEY_HEADER,
    OCTETS,
    LeaseReply,
    LeaseRequest,
    OpenBatches,
    UploadReply,
)
from riffle.node_client.journal import note

MAX_ANSWER_BYTES = 2 * MAX_DESCRIPTOR_BYTES  # a descriptor inside a JSON string, escaped
CONNECTIONS = 4

D = TypeVar("D", bound=Document)


class _TryAgain(Exception):  # noqa: N818
    """This attempt failed for a reason that may pass."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before retry k (0-based): uniform in [0, min(cap, base 2^k)] seconds, at least
    ``Retry-After``. ``attempts`` bounds every call but uploads, which have a deadline."""

    base: float = 0.2
    cap: float = 5.0
    attempts: int = 6
    share: Callable[[], float] = random.SystemRandom().random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.time

    def delay(self, retry: int, floor: float) -> float:
        """Seconds before this retry."""
        most: float = min(self.cap, self.base * 2.0 ** min(retry, 30))
        return floor + self.share() * most


@dataclass(slots=True)
class ShufflerApi:
    """Calls of nodes to their shuffler; the token says which node. Close the client after use."""

    client: httpx.AsyncClient
    backoff: Backoff = field(default_factory=Backoff)

    async def open_batches(self, token: str, wait: int) -> OpenBatches:
        """Batches with free slots; the shuffler holds the answer up to ``wait`` seconds."""
        parameters = {"wait": str(wait), "accepting": "1"}
        request = self._request("GET", "/v1/batches", token, params=parameters, patience=wait)
        return await self._call(request, OpenBatches)

    async def descriptor(self, token: str, batch_id: str) -> SignedDescriptor:
        """A batch's descriptor, not checked yet."""
        request = self._request("GET", f"/v1/batches/{batch_id}", token)
        return await self._call(request, SignedDescriptor)

    async def lease(self, token: str, batch_id: str, users: list[str]) -> LeaseReply:
        """A slot for each of these users, or why not."""
        body = LeaseRequest(users=tuple(users)).model_dump_json().encode()
        path = f"/v1/batches/{batch_id}/leases"
        request = self._request("POST", path, token, content=body, kind="application/json")

        def answers_all(reply: LeaseReply) -> bool:
            granted = [lease.user for lease in reply.leases]
            return sorted(granted + [refusal.user for refusal in reply.refused]) == sorted(users)

        return await self._call(request, LeaseReply, fits=answers_all)

    async def upload(
        self,
        token: str,
        batch_id: str,
        leases: list[str],
        body: bytes,
        deadline: float,
        batch_key: str,
    ) -> UploadReply:
        """Send frames, the same bytes again and again, until the shuffler has decided on each.

        Raises:
            RemoteError: a final problem of the whole body, or ``late`` after ``deadline`` (seconds
                since 1970, UTC), when no shuffler would take it any more; ``outdated-key`` when
                ``batch_key``, the id of the key sealed to, is not the batch's.
        """
        path = f"/v1/batches/{batch_id}/reports"
        request = self._request("POST", path, token, content=body, kind=OCTETS)
        request.headers[BATCH_KEY_HEADER] = batch_key

        def answers_all(reply: UploadReply) -> bool:
            return [result.lease for result in reply.results] == leases

        return await self._call(request, UploadReply, fits=answers_all, deadline=deadline)

    def _request(
        self,
        method: str,
        path: str,
        token: str,
        *,
        params: dict[str, str] | None = None,
        content: bytes | None = None,
        kind: str | None = None,
        patience: float = 0,
    ) -> httpx.Request:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if kind is not None:
            headers["Content-Type"] = kind
        timeout = httpx.Timeout(30.0, connect=5.0, read=30.0 + patience, pool=None)
        return self.client.build_request(
            method, path, params=params, content=content, headers=headers, timeout=timeout
        )

    async def _call(
        self,
        request: httpx.Request,
        document: type[D],
        *,
        fits: Callable[[D], bool] = lambda _: True,
        deadline: float | None = None,
    ) -> D:
        retry = 0
        while True:
            try:
                return _read(await self._exchange(request), document, fits)
            except _TryAgain as failure:
                delay = self.backoff.delay(retry, failure.after)
                self._give_up(str(failure), retry, delay, deadline)
                if retry == 0:  # method and path name no user and no lease
                    note(
                        "retrying",
                        request=f"{request.method} {request.url.path}",
                        detail=str(failure),
                    )
            await self.backoff.sleep(delay)
            retry += 1

    def _give_up(self, why: str, retry: int, delay: float, deadline: float | None) -> None:
        if deadline is None and retry + 1 >= self.backoff.attempts:
            raise LocalError("unavailable", f"the shuffler does not do its part: {why}")
        if deadline is not None and self.backoff.clock() + delay >= deadline:
            raise RemoteError("late", f"the batch ended before the report arrived: {why}")

    async def _exchange(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        body = bytearray()
        try:
            response = await self.client.send(request, stream=True)
            try:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise _TryAgain(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            finally:
                await response.aclose()
        except httpx.RequestError as error:
            raise _TryAgain(f"no answer ({type(error).__name__})") from error
        return response, bytes(body)


def open_client(url: str, ca_file: Path | None) -> httpx.AsyncClient:
    """A client for one shuffler, its replicas in turn; no proxies, few connections (a pool slows
    down with many).
    """
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    transport = httpx.AsyncHTTPTransport(
        verify=server_verification(ca_file), limits=limits, trust_env=False
    )
    urls = split_urls(url)
    return httpx.AsyncClient(
        base_url=urls[0], transport=AsyncFailover(urls, transport, spread=True)
    )


def _read(answer: tuple[httpx.Response, bytes], document: type[D], fits: Callable[[D], bool]) -> D:
    response, body = answer
    if not response.is_success:
        raise _problem(response, body)
    try:
        reply = document.model_validate_json(body)
    except ValidationError as error:
        raise _TryAgain(one_line(f"a malformed answer ({first_fault(error)})")) from error
    if not fits(reply):
        raise _TryAgain("an answer to another question")
    return reply


def _problem(response: httpx.Response, body: bytes) -> Exception:
    status = response.status_code
    document = problem_document(body)
    slug = problem_slug(document)
    detail = one_line(str(document.get("detail", "no problem document")))
    if is_temporary(status):
        after = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        return _TryAgain(f"status {status}, {detail}", after)
    if status < HTTPStatus.BAD_REQUEST:
        return _TryAgain(f"status {status}")
    return RemoteError(slug, f"the shuffler refused: {detail}")
