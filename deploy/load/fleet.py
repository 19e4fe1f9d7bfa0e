"""Many nodes on one event loop. Each has a credential, a connection and descriptors of its own, and
does what `node_client` does, with its code: poll, fetch, check, lease, run, encode, seal, upload,
and try again what may pass. Only who is asked is not kept: users are invented and forgotten.
"""

import asyncio
import secrets
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import key_id
from riffle.common.protocol.errors import RiffleError
from riffle.common.protocol.messages import Lease, frame
from riffle.deploy.load.tally import Tally
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.episode import slot_report
from riffle.node_client.pipeline import Job, Seal
from riffle.node_client.settings import Credential
from riffle.node_client.shuffler_client import ShufflerApi
from riffle.node_client.trust import Demands, accept

POLL_SECONDS = 20
PATIENCE_SECONDS = 30.0
MOST_OPEN = 10_000
"""Reports of one process that are under way at the same time; more are given up at once."""

CONNECTIONS = 2
KEPT_SECONDS = 4.0  # the services close a silent connection after five
PRESEALED, SHELVES = 8, 4
ACCEPTED = ("accepted", "replayed")
REQUESTS = {"batches": "poll", "leases": "lease", "reports": "upload"}


@dataclass(slots=True)
class Member:
    """One node: who it is, how it speaks, and the batch it checked last."""

    token: str = field(repr=False)
    api: ShufflerApi
    job: Job | None = None
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Observed(httpx.AsyncBaseTransport):
    """A transport that counts every answer which is no success, also those tried again."""

    def __init__(self, inner: httpx.AsyncBaseTransport, tally: Tally) -> None:
        self._inner, self._tally = inner, tally

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The inner transport's answer."""
        what = REQUESTS.get(request.url.path.rsplit("/", 1)[1], "descriptor")
        try:
            response = await self._inner.handle_async_request(request)
        except httpx.RequestError as error:
            self._tally.answers[f"{what} {type(error).__name__}"] += 1
            raise
        if response.is_error:
            self._tally.answers[f"{what} {response.status_code}"] += 1
        return response

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()


def members(
    credentials: Sequence[Credential], url: str, verify: ssl.SSLContext, tally: Tally
) -> list[Member]:
    """A node for each credential, with connections of its own."""
    limits = httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=KEPT_SECONDS)
    found = []
    for credential in credentials:
        transport = Observed(httpx.AsyncHTTPTransport(verify=verify, limits=limits), tally)
        client = httpx.AsyncClient(base_url=url, transport=transport, trust_env=False)
        found.append(Member(credential.token, ShufflerApi(client)))
    return found


@dataclass(slots=True)
class Fleet:
    """The nodes of one process and what they share: environment, sealing, counts.

    ``presealed``: `PRESEALED` reports a batch are sealed once and uploaded again and again, each
    under a new lease. Their counts mean nothing; the servers' work is the same.
    """

    nodes: Sequence[Member]
    demands: Demands
    environment: Environment
    seal: Seal
    tally: Tally
    presealed: bool = False
    _shelves: dict[str, list[bytes]] = field(default_factory=dict)
    _filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next: int = 0

    async def run(self, due: Sequence[float], stop: asyncio.Event) -> None:
        """Start a report at each of these times (``time.monotonic``); wait for the last one.

        What is not decided `PATIENCE_SECONDS` after it started is given up.
        """
        stopping = asyncio.create_task(stop.wait())
        tasks: set[asyncio.Task[None]] = set()
        for number, when in enumerate(due):
            if (wait := when - time.monotonic()) > 0:
                await asyncio.wait({stopping}, timeout=wait)
            if stop.is_set():
                break
            self.tally.started += 1
            if len(tasks) >= MOST_OPEN:
                self.tally.rejected["generator-full"] += 1
                continue
            node = self.nodes[number % len(self.nodes)]
            task = asyncio.create_task(self._serve(node, when))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)  # many may be due at once: let them begin in turn
        stopping.cancel()
        if stop.is_set():
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close all connections."""
        for node in self.nodes:
            await node.api.client.aclose()

    async def _serve(self, node: Member, due: float) -> None:
        self.tally.stages["lag"].record(time.monotonic() - due)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                outcome = await self._report(node)
        except TimeoutError:
            outcome = "patience"
        except RiffleError as error:
            outcome = error.slug
        except asyncio.CancelledError:
            outcome = "stopped"
        if outcome in ACCEPTED:
            self.tally.accepted += 1
            self.tally.due.record(time.monotonic() - due)
        else:
            self.tally.rejected[outcome] += 1

    async def _report(self, node: Member) -> str:
        """One report from poll to upload: what became of it."""
        lease = None
        while lease is None:
            with self._stage("batch"):
                job = await self._job(node)
            with self._stage("lease"):
                lease = await self._lease(node, job)
        with self._stage("episode"):
            messages = self._encoded(job, lease.slot)
        with self._stage("sealing"):
            sealed = await self._sealed(job, messages)
        body, expires_at = frame(lease.lease, sealed), job.batch.descriptor.expires_at
        sent = time.monotonic()
        with self._stage("upload"):
            reply = await node.api.upload(
                node.token,
                job.batch_id,
                [lease.lease],
                body,
                expires_at,
                key_id(job.keys.batch_key),
            )
        outcome = reply.results[0].outcome
        if outcome in ACCEPTED:
            self.tally.sent.record(time.monotonic() - sent)
            self.tally.messages += job.keys.messages
        return outcome

    async def _job(self, node: Member) -> Job:
        """The batch this node serves: the oldest with room, fetched and checked by it once."""
        async with node.checking:
            while node.job is None:
                listed = await node.api.open_batches(node.token, POLL_SECONDS)
                for batch in listed.batches[:1]:
                    signed = await node.api.descriptor(node.token, batch.batch_id)
                    now = time.time()
                    node.job = Job.of(accept(signed, batch.batch_id, self.demands, now))
            return node.job

    async def _lease(self, node: Member, job: Job) -> Lease | None:
        """A slot for a new user; None when this batch has no room any more."""
        reply = await node.api.lease(node.token, job.batch_id, [secrets.token_hex(16)])
        if reply.leases:
            return reply.leases[0]
        if node.job is job:
            node.job = None
        return None

    def _encoded(self, job: Job, slot: int) -> Ints:
        if self.presealed:
            return np.empty(0, dtype=np.int64)
        return slot_report(job.batch, self.environment, slot)[1]

    async def _sealed(self, job: Job, messages: Ints) -> bytes:
        if not self.presealed:
            return await self.seal(job.keys, messages[np.newaxis])
        async with self._filling:
            if job.batch_id not in self._shelves:
                self._shelves[job.batch_id] = await self._shelf(job)
                while len(self._shelves) > SHELVES:
                    self._shelves.pop(next(iter(self._shelves)))
        shelf = self._shelves[job.batch_id]
        self._next += 1
        return shelf[self._next % len(shelf)]

    async def _shelf(self, job: Job) -> list[bytes]:
        rows = [slot_report(job.batch, self.environment, slot)[1] for slot in range(PRESEALED)]
        sealed = await self.seal(job.keys, np.stack(rows))
        size = job.batch.descriptor.report_bytes
        return [sealed[start : start + size] for start in range(0, len(sealed), size)]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.tally.stages[name].record(time.monotonic() - started)
