"""The node's half of the shuffler's REST API.

A request is retried if the fault is temporary: no connection, no answer, 408, 429, 5xx, or an
answer that is not the shuffler's. Any other problem document from the shuffler is final, and
becomes a `RemoteError` with the same slug. A repeated request changes nothing at the shuffler.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from riffle.common.process import endpoint
from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import MAX_DESCRIPTOR_BYTES, Document, SignedDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.node_client.settings import JOURNAL

PEER = "the shuffler"
MAX_ANSWER_BYTES = 2 * MAX_DESCRIPTOR_BYTES  # a descriptor inside a JSON string, escaped
CONNECTIONS = 4  # an httpx pool is slow with more connections

D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Random delays before retries, so that nodes do not retry in step. Times are in seconds.

    ``attempts`` bounds the tries of each call. Uploads have a deadline instead.
    """

    base: float = 0.2
    cap: float = 5.0
    attempts: int = 6
    share: Callable[[], float] = random.SystemRandom().random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.time

    def delay(self, retry: int, floor: float) -> float:
        """Returns the delay before retry ``retry`` (from 0): ``floor`` plus a random time."""
        most: float = min(self.cap, self.base * 2.0 ** min(retry, 30))
        return floor + self.share() * most


@dataclass(slots=True)
class ShufflerClient:
    """Calls the shuffler for nodes. The token identifies the node. Close ``http`` after use."""

    http: httpx.AsyncClient
    backoff: Backoff = field(default_factory=Backoff)

    async def open_batches(self, token: str, wait: int) -> wire.OpenBatches:
        """Returns batches with free slots. The shuffler may wait ``wait`` seconds for a batch."""
        request = self._request(f"/v1/batches?wait={wait}&accepting=1", token, patience=wait)
        return await self._call(request, wire.OpenBatches)

    async def descriptor(self, token: str, batch_id: str) -> SignedDescriptor:
        """Returns a batch's descriptor, not yet checked."""
        request = self._request(f"/v1/batches/{batch_id}", token)
        return await self._call(request, SignedDescriptor)

    async def lease(self, token: str, batch_id: str, users: list[str]) -> wire.LeaseReply:
        """Asks for a slot for each user. The reply grants or refuses each slot."""
        wanted = wire.LeaseRequest(users=tuple(users))
        request = self._request(f"/v1/batches/{batch_id}/leases", token, wanted)

        def answers_all(reply: wire.LeaseReply) -> bool:
            granted = [lease.user for lease in reply.leases]
            return sorted(granted + [refusal.user for refusal in reply.refused]) == sorted(users)

        return await self._call(request, wire.LeaseReply, fits=answers_all)

    async def decline(self, token: str, batch_id: str, reason: wire.DeclineReason) -> None:
        """Tells the shuffler why this node stops serving an open batch."""
        notice = wire.DeclineNotice(reason=reason)
        request = self._request(f"/v1/batches/{batch_id}/declined", token, notice)
        await self._call(request, wire.DeclineNotice, fits=notice.__eq__)

    async def upload(
        self,
        token: str,
        batch_id: str,
        leases: list[str],
        body: bytes,
        deadline: float,
        batch_key: str,
    ) -> wire.UploadReply:
        """Sends frames, and repeats the same bytes until the shuffler has decided on each frame.

        ``batch_key`` is the id of the key to which the reports are sealed. Raises RemoteError if
        the whole body is refused for good: ``late`` after ``deadline`` (seconds since 1970, UTC),
        or ``outdated-key`` if the batch has another key now.
        """
        request = self._request(f"/v1/batches/{batch_id}/reports", token, body)
        request.headers[wire.BATCH_KEY_HEADER] = batch_key

        def answers_all(reply: wire.UploadReply) -> bool:
            return [result.lease for result in reply.results] == leases

        return await self._call(request, wire.UploadReply, fits=answers_all, deadline=deadline)

    def _request(
        self, path: str, token: str, body: Document | bytes | None = None, patience: float = 0
    ) -> httpx.Request:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if isinstance(body, Document):
            headers["Content-Type"] = "application/json"
            body = body.model_dump_json().encode()
        elif body is not None:
            headers["Content-Type"] = wire.OCTETS
        timeout = httpx.Timeout(30.0, connect=5.0, read=30.0 + patience, pool=None)
        method = "GET" if body is None else "POST"
        return self.http.build_request(method, path, content=body, headers=headers, timeout=timeout)

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
                response, body = await endpoint.receive(PEER, self.http, request, MAX_ANSWER_BYTES)
                return endpoint.read_answer(PEER, response, body, document, fits)
            except LocalError as failure:
                delay = self.backoff.delay(retry, failure.retry_after or 0)
                reason = f"{failure} ({endpoint.origin(request.url)})"
                self._give_up(reason, retry, delay, deadline)
                if retry == 0:  # method and path contain no user id and no lease
                    line = f"{request.method} {request.url.path}"
                    JOURNAL.note("retrying", request=line, detail=reason)
            await self.backoff.sleep(delay)
            retry += 1

    def _give_up(self, reason: str, retry: int, delay: float, deadline: float | None) -> None:
        """Raises if no retry is left, or if the next retry would come after the deadline."""
        if deadline is None and retry + 1 >= self.backoff.attempts:
            raise LocalError("unavailable", f"the shuffler does not do its part: {reason}")
        if deadline is not None and self.backoff.clock() + delay >= deadline:
            raise RemoteError("late", f"the batch ended before the report arrived: {reason}")


def open_client(url: str, ca_file: Path | None) -> httpx.AsyncClient:
    """Opens a client of one shuffler. The client tries the replicas in turn and ignores proxies."""
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    transport = httpx.AsyncHTTPTransport(
        verify=endpoint.server_verification(ca_file), limits=limits, trust_env=False
    )
    urls = endpoint.split_urls(url)
    failover = endpoint.AsyncFailover(urls, transport, spread=True, journal=JOURNAL)
    return httpx.AsyncClient(base_url=urls[0], transport=failover)
