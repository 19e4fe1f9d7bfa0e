"""Many nodes on one event loop, each with its own credential, connection and descriptors.

A node runs the code of `node_client`. Only its users are not real: each is invented for one report.
"""

import asyncio
import math
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from riffle.common.protocol.errors import RiffleError
from riffle.common.protocol.wire import Lease
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.episode import slot_report
from riffle.node_client.pipeline import Job, Seal
from riffle.node_client.shuffler_client import ShufflerClient
from riffle.node_client.trust import Demands, accept

LEAST_SECONDS = 1e-5
GROWTH = 1.05
"""Each bucket is 5 % wider than the previous one, so a percentile is at most 5 % too high."""

STAGES = ("lag", "batch", "lease", "episode", "sealing", "upload")
"""Stages of a report's time: late start; finding and checking a batch; getting a slot; the episode
with its encoding; sealing with the wait for a sealer; upload until the report is stored."""


@dataclass(slots=True)
class Histogram:
    """Latencies in seconds by bucket; exact sum and maximum. Edges grow by the factor `GROWTH`."""

    buckets: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    largest: float = 0.0

    @property
    def count(self) -> int:
        """The number of recorded latencies."""
        return self.buckets.total()

    def record(self, seconds: float) -> None:
        """Adds a latency. A negative latency counts as zero."""
        self.buckets[_bucket(seconds)] += 1
        self.total += max(seconds, 0.0)
        self.largest = max(self.largest, seconds)

    def add(self, other: "Histogram") -> None:
        """Adds all latencies of another histogram."""
        self.buckets.update(other.buckets)
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def since(self, before: "Histogram") -> "Histogram":
        """Returns the latencies recorded since ``before``, with the maximum of all latencies."""
        return Histogram(self.buckets - before.buckets, self.total - before.total, self.largest)

    def quantile(self, share: float) -> float:
        """Returns the bucket edge up to which this share of latencies lies; 0 without latencies."""
        needed, seen = share * self.count, 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= needed:
                return min(LEAST_SECONDS * GROWTH**bucket, self.largest)
        return 0.0

    def within(self, seconds: float) -> int:
        """Returns how many latencies were at most this long, with the precision of a bucket."""
        edge = _bucket(seconds)
        return sum(count for bucket, count in self.buckets.items() if bucket <= edge)

    def summary(self) -> dict[str, float]:
        """Returns mean, p50, p95, p99 and maximum, in milliseconds."""
        mean = self.total / self.count if self.count else 0.0
        quantiles = {f"p{q}": self.quantile(q / 100) for q in (50, 95, 99)}
        seconds = {"mean": mean, **quantiles, "max": self.largest}
        return {name: value * 1e3 for name, value in seconds.items()}


def _bucket(seconds: float) -> int:
    """Returns the first bucket with an upper edge of at least ``seconds``."""
    ratio = max(seconds, LEAST_SECONDS) / LEAST_SECONDS
    return math.ceil(math.log(ratio, GROWTH) - 1e-9)


@dataclass(slots=True)
class Tally:
    """Outcomes of all reports that were started so far.

    ``rejected``: reports given up, by reason. ``answers``: HTTP errors and requests without an
    answer, retried ones included. ``due``: latency from a report's scheduled time to acceptance.
    ``sent``: latency from the upload's first byte to acceptance.
    """

    started: int = 0
    accepted: int = 0
    messages: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    due: Histogram = field(default_factory=Histogram)
    sent: Histogram = field(default_factory=Histogram)
    stages: dict[str, Histogram] = field(
        default_factory=lambda: {stage: Histogram() for stage in STAGES}
    )

    @property
    def open(self) -> int:
        """The number of reports that are started, but neither accepted nor rejected."""
        return self.started - self.accepted - self.rejected.total()

    def summary(self) -> dict[str, Any]:
        """Returns the tally in the form of summary.json."""
        return {
            "started": self.started,
            "accepted": self.accepted,
            "undecided": self.open,
            "messages": self.messages,
            "rejected": dict(self.rejected),
            "answers": dict(self.answers),
            "latency_from_due_ms": self.due.summary(),
            "latency_from_send_ms": self.sent.summary(),
            "stages_ms": {stage: times.summary() for stage, times in self.stages.items()},
        }


def merge(tallies: list[Tally]) -> Tally:
    """Adds up the tallies of all processes."""
    whole = Tally()
    for tally in tallies:
        whole.started += tally.started
        whole.accepted += tally.accepted
        whole.messages += tally.messages
        whole.rejected.update(tally.rejected)
        whole.answers.update(tally.answers)
        whole.due.add(tally.due)
        whole.sent.add(tally.sent)
        for stage, histogram in tally.stages.items():
            whole.stages[stage].add(histogram)
    return whole


POLL_SECONDS = 20
PATIENCE_SECONDS = 30.0
MOST_OPEN = 10_000
"""Most reports that a process has under way; it gives up further reports immediately."""

CONNECTIONS = 2
KEEPALIVE_SECONDS = 4.0  # the services close an idle connection after five
ACCEPTED = ("accepted", "replayed")
REQUESTS = {"batches": "poll", "leases": "lease", "reports": "upload"}


@dataclass(slots=True)
class LoadNode:
    """A node's token, its client, and the batch that the node checked last."""

    token: str = field(repr=False)
    shuffler: ShufflerClient
    job: Job | None = None
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class CountingTransport(httpx.AsyncHTTPTransport):
    """A transport that counts every unsuccessful answer, even if the request is retried."""

    def __init__(self, verify: ssl.SSLContext, tally: Tally) -> None:
        limits = httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=KEEPALIVE_SECONDS)
        super().__init__(verify=verify, limits=limits)
        self._tally = tally

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request and returns its answer."""
        kind = REQUESTS.get(request.url.path.rsplit("/", 1)[1], "descriptor")
        try:
            response = await super().handle_async_request(request)
        except httpx.RequestError as error:
            self._tally.answers[f"{kind} {type(error).__name__}"] += 1
            raise
        if response.is_error:
            self._tally.answers[f"{kind} {response.status_code}"] += 1
        return response


def load_node(token: str, url: str, verify: ssl.SSLContext, tally: Tally) -> LoadNode:
    """Returns a node with its own connections."""
    transport = CountingTransport(verify, tally)
    client = httpx.AsyncClient(base_url=url, transport=transport, trust_env=False)
    return LoadNode(token, ShufflerClient(client))


@dataclass(slots=True)
class Fleet:
    """The nodes of one process and what they share: environment, sealing, counts."""

    nodes: Sequence[LoadNode]
    demands: Demands
    environment: Environment
    seal: Seal
    tally: Tally

    async def run(self, due: Sequence[float], stop: asyncio.Event) -> None:
        """Starts a report at each time in ``due`` (``time.monotonic``), and waits for all reports.

        Gives up a report that is not decided `PATIENCE_SECONDS` after its start.
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
            await asyncio.sleep(0)  # several may be due at the same time: let each begin
        stopping.cancel()
        if stop.is_set():
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def warm_up(self) -> None:
        """Seals a report that is not sent, so that the sealers run before the first real report."""
        job = await self._job(self.nodes[0])
        row = slot_report(job.batch, self.environment, 0)[1]
        await self.seal(job.keys, row[np.newaxis])

    async def close(self) -> None:
        """Closes all connections."""
        for node in self.nodes:
            await node.shuffler.http.aclose()

    async def _serve(self, node: LoadNode, due: float) -> None:
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

    async def _report(self, node: LoadNode) -> str:
        """Makes one report, from poll to upload; returns its outcome."""
        lease = None
        while lease is None:
            with self._stage("batch"):
                job = await self._job(node)
            with self._stage("lease"):
                lease = await self._lease(node, job)
        with self._stage("episode"):
            row = slot_report(job.batch, self.environment, lease.slot)[1]
        with self._stage("sealing"):
            sealed = await self.seal(job.keys, row[np.newaxis])
        start = time.monotonic()
        with self._stage("upload"):
            reply = await job.upload(node.shuffler, node.token, [lease], sealed)
        outcome = reply.results[0].outcome
        if outcome in ACCEPTED:
            self.tally.sent.record(time.monotonic() - start)
            self.tally.messages += job.keys.messages
        return outcome

    async def _job(self, node: LoadNode) -> Job:
        """Returns the oldest batch with room. The node fetches and checks each batch only once."""
        async with node.checking:
            while node.job is None:
                reply = await node.shuffler.open_batches(node.token, POLL_SECONDS)
                for batch in reply.batches[:1]:
                    signed = await node.shuffler.descriptor(node.token, batch.batch_id)
                    accepted = accept(signed, batch.batch_id, self.demands, time.time())
                    node.job = Job.of(accepted)
            return node.job

    async def _lease(self, node: LoadNode, job: Job) -> Lease | None:
        """Leases a slot for a new user; returns None if the batch has no more room."""
        reply = await node.shuffler.lease(node.token, job.batch.batch_id, [secrets.token_hex(16)])
        if reply.leases:
            return reply.leases[0]
        if node.job is job:
            node.job = None
        return None

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.tally.stages[name].record(time.monotonic() - start)
