"""Joins the parts of one shuffler, and does what nodes and the operator request.

Writes go to `store.committer` and are awaited. Reads and elliptic-curve work run in threads, so
that the event loop stays free.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol import wire
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.hpke import open_each
from riffle.common.protocol.verification import read_pins
from riffle.common.server.database import Head, listen, writer
from riffle.common.server.limits import CallerLimits, RateLimit
from riffle.common.server.monitoring import VersionedCache, disk_trouble
from riffle.shuffler.lifecycle import BatchLifecycle
from riffle.shuffler.metrics import (
    JOURNAL,
    MAX_RECORDS,
    REFRESH_SECONDS,
    ShufflerMetrics,
    conservation,
    for_coordinator,
    note,
)
from riffle.shuffler.rules import Frame
from riffle.shuffler.settings import Settings
from riffle.shuffler.store import batch_rows, leasing, users
from riffle.shuffler.store.committer import Store
from riffle.shuffler.store.schema import meta, not_usable, open_store
from riffle.shuffler.store.vault import ReportCipher, SecretLostError, Vault
from riffle.shuffler.waiting import IDLE_RECHECK_SECONDS, Budget, ChangeSignal

Clock = Callable[[], float]
T = TypeVar("T")

CACHE_SECONDS = 10.0
MAX_ENTRIES = 4_096


class Shuffler:
    """A shuffler on one data directory. Create and close it inside a running event loop."""

    def __init__(
        self, settings: Settings, clock: Clock, metrics: ShufflerMetrics | None = None
    ) -> None:
        self.settings = settings
        self.identity = wire.ShufflerIdentity(
            shuffler_id=settings.shuffler_id, public_key=settings.public_key().hex()
        )
        self.metrics = metrics or ShufflerMetrics()
        s, each = settings, settings.inflight_of_a_node
        self.inflight = Budget(s.max_inflight_bytes, "uploads", each)
        self.callers = CallerLimits(
            RateLimit(s.node_requests, s.node_reports, s.node_requests_at_once)
        )
        self._clock = clock
        self._vault = Vault(settings.data_dir / "secrets", settings.storage_cipher())
        self._store = Store(settings.url, store_head(settings))
        self.changes = ChangeSignal(shared=self._store.shared)
        self.admission = Admission(self._store, self.changes)
        self.batches = BatchLifecycle(
            self._store, self._vault, settings, lambda: self.now, self.changes, self.metrics
        )
        self._shown: dict[tuple[str, str], tuple[int, wire.Conservation]] = {}
        self._open = VersionedCache(
            lambda: self.batches.tidied(batch_rows.open_batches, self.now),
            lambda: (self._store.writes, self.now),
        )
        self._probed = VersionedCache(self._probe, lambda: self.now)
        self._listening: asyncio.Task[None] | None = None

    @property
    def now(self) -> int:
        """The seconds since 1970 by the clock that this service was given."""
        return int(self._clock())

    async def start(self) -> None:
        """Resumes the work of the last process; gives up batches whose secret is lost."""
        self._listening = asyncio.create_task(
            listen(self._store.engine, self._on_notification, JOURNAL)
        )
        await self.batches.tidy()
        note("started", batches=await self.batches.give_up_lost())

    def close(self) -> None:
        """Finishes the queued writes and closes the store."""
        if self._listening is not None:
            self._listening.cancel()
        self._store.close()

    def _on_notification(self, _: str) -> None:
        """Records that a replica, perhaps this one, has changed a batch or revoked a node."""
        self._store.writes += 1
        self.changes.notify()

    # Nodes

    async def open_batches(self, *, wait: float, accepting: bool) -> list[wire.OpenBatch]:
        """Returns open batches. With ``accepting``, waits for free slots and omits full batches."""
        if not accepting:
            return (await self._open.get()).batches
        listing = await self.changes.poll(
            wait,
            self._open.get,
            lambda listing: any(batch.free_slots for batch in listing.batches),
            lambda listing: listing.changes_within(
                IDLE_RECHECK_SECONDS, self.settings.lease_seconds
            ),
        )
        return [batch for batch in listing.batches if batch.free_slots]

    async def lease(self, batch_id: str, node_id: str, wanted: Sequence[str]) -> wire.LeaseReply:
        """Leases slots to users of a node."""
        life = self.settings.lease_seconds
        reply = await self._store.write(
            leasing.lease_slots, batch_id, node_id, wanted, self.now, life
        )
        self.metrics.count_leases(reply)
        return reply

    async def decline(self, batch_id: str, reason: wire.DeclineReason) -> None:
        """Records the reason why a node stops serving an open batch."""
        await self._store.write(batch_rows.decline, batch_id, reason, self.now)

    def upload_limit(self, batch: batch_rows.Batch) -> int:
        """Returns the size limit of an upload to a batch, in bytes. One report always fits."""
        frame = wire.LEASE_BYTES + batch.report_bytes
        return max(frame, min(self.settings.max_upload_bytes, wire.MAX_USERS_A_LEASE * frame))

    async def upload(
        self, batch: batch_rows.Batch, node_id: str, body: bytes, began: float
    ) -> wire.UploadReply:
        """Stores reports; on return, all reports with the outcome ``accepted`` are durable.

        ``began`` is the event loop's time when the request began. Raises RemoteError ``wrong-size``
        if the body is not a whole number of frames, or LocalError ``too-many-requests``.
        """
        batch_id, clock = batch.batch_id, asyncio.get_running_loop().time
        try:
            leases, sealed = wire.split_frames(body, batch.report_bytes)
        except RemoteError as error:
            await self._store.write(batch_rows.count_dropped, batch_id, {error.slug: 1})
            self.metrics.frames.labels(error.slug).inc()
            raise
        self.callers.reports(node_id, len(leases), clock())
        opened, cipher = await self._open_reports(batch, leases, sealed)
        del body, sealed  # halves the memory: ``opened`` has copies
        summary = await self._store.write(
            leasing.store_reports, batch_id, node_id, opened, cipher, self.now
        )
        self.metrics.count_upload(summary.outcomes, clock() - began)
        if summary.sealed:
            self.changes.notify()
            note("sealed", batch_id=batch_id, reports=batch.n)
        return summary.reply

    async def _open_reports(
        self, batch: batch_rows.Batch, leases: list[str], sealed: list[memoryview]
    ) -> tuple[list[Frame], ReportCipher | None]:
        """Opens every outer seal; returns the frames, and the cipher that will encrypt the reports.

        If the batch is no longer open, or its secret is lost, opens no seal and returns no cipher.
        """
        if batch.state == "open":
            try:
                return await asyncio.to_thread(self._open_seals, batch, leases, sealed)
            except SecretLostError:
                await self.batches.give_up(batch.batch_id)
        whole = not batch.word_bits
        return await asyncio.to_thread(leasing.build_frames, leases, sealed, whole=whole), None

    def _open_seals(
        self, batch: batch_rows.Batch, leases: list[str], sealed: list[memoryview]
    ) -> tuple[list[Frame], ReportCipher]:
        secret = self._vault.get(batch.batch_id)
        began = time.thread_time()
        opened = list(open_each(secret.outer.private, batch.report_info, sealed))
        self.metrics.opening.inc(time.thread_time() - began)
        frames = leasing.build_frames(leases, sealed, opened, whole=not batch.word_bits)
        return frames, ReportCipher(batch.batch_id, secret)

    # The operator

    async def enrol(self, request: wire.EnrolRequest) -> wire.Enrolment:
        """Enrols a node."""
        enrolment = await self._store.write_for_good(users.enrol, request, self.now)
        note("node-enrolled")  # names no node; the list of nodes shows who was enrolled when
        return enrolment

    async def revoke(self, node_id: str) -> None:
        """Revokes a node. All its further requests are refused."""
        await self._store.write_for_good(users.revoke, node_id, self.now)
        self.changes.notify()
        note("node-revoked")

    async def nodes(self) -> wire.NodeList:
        """Returns all nodes with their counts."""
        return await self._store.read(users.list_nodes, self.now)

    async def conservation(self, batch_id: str, *, whole: bool) -> wire.Conservation:
        """Returns a batch's conservation record; if not ``whole``, what the coordinator may see."""
        record = await self.batches.tidied(conservation, batch_id)
        if whole:
            return record
        now, key = self.now, (batch_id, record.state)
        if len(self._shown) >= MAX_RECORDS:
            self._shown = {k: v for k, v in self._shown.items() if now < v[0] + REFRESH_SECONDS}
        since, shown = self._shown.get(key, (0, None))
        if shown is None or not since <= now < since + REFRESH_SECONDS:
            shown = for_coordinator(record, show_fill=self.settings.show_fill)
            self._shown[key] = now, shown
        return shown

    async def ready(self) -> None:
        """Raises LocalError ``unavailable``, with the reason, if disk, store or vault fails."""
        await self._probed.get()

    async def _probe(self) -> None:
        if trouble := await asyncio.to_thread(disk_trouble, self.settings.data_dir):
            raise LocalError("unavailable", trouble)
        await asyncio.to_thread(self._vault.probe)
        await self._store.write_for_good(lambda _: None)

    async def measure(self) -> list[CollectorRegistry]:
        """Updates the gauges. Returns the registries, except the store's if it is out of reach."""
        try:
            await self.ready()
            self.metrics.requests.ready.set(1)
        except RiffleError:
            self.metrics.requests.ready.set(0)
        self.metrics.inflight.set(self.inflight.taken)
        self.metrics.waiting.set(self._store.committer.waiting)
        self.metrics.free.set(shutil.disk_usage(self.settings.data_dir).free)
        known = [self.metrics.registry]
        with suppress(LocalError):  # the store is out of reach
            await self._store.read(self.metrics.measure_store)
            known.append(self.metrics.of_store)
        return known


def store_head(settings: Settings) -> Head:
    """Returns the head of a shuffler's store."""
    head = settings.head(f"shuffler {settings.shuffler_id}", meta)
    forgotten = "who reported, who was enrolled, who was revoked"
    return replace(head, on_accept=batch_rows.abandon_open, forgotten=forgotten)


def preflight(settings: Settings) -> None:
    """Checks all that could stop the service from starting, before it takes its port.

    Raises LocalError if a key, a token or the store is missing or unusable.
    """
    settings.demands()
    read_pins(settings.analyzer_keys_file)
    settings.tls()
    settings.public_key()
    s = settings
    s.check_tokens(s.coordinator_hash(), s.operator_hash(), s.metrics_hash())
    vault = Vault(settings.data_dir / "secrets", settings.storage_cipher())
    vault.probe()
    head = store_head(settings)
    engine = open_store(settings.url, head)
    if head.older_accepted:
        note("older-store-accepted", logging.ERROR)
    try:
        with writer(engine).begin() as connection:
            batch_rows.bind_to_vault(connection, vault.identity())
    except SQLAlchemyError as error:
        raise not_usable("written", error) from error
    finally:
        engine.dispose()


class Admission:
    """Caches at most `MAX_ENTRIES` nodes by token and batches by id. ``clock`` returns seconds.

    An answer is kept for `CACHE_SECONDS`, but not after ``changes`` has signalled a change.
    """

    def __init__(
        self, store: Store, changes: ChangeSignal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._changes = changes
        self._clock = clock
        self._entries: dict[str, tuple[Any, int, float]] = {}

    async def node(self, token: str) -> str:
        """Returns the node id of a token, or raises RemoteError ``unauthorized``."""
        return await self._cached(hash_token(token), users.authenticate, token)

    async def batch(self, batch_id: str) -> batch_rows.Batch:
        """Returns the batch of an upload, or raises RemoteError ``unknown-batch``.

        The batch's counts may be outdated; its keys and sizes never change.
        """
        return await self._cached(batch_id, batch_rows.find, batch_id)

    async def _cached(self, key: str, query: Callable[[Connection, str], T], argument: str) -> T:
        # `version` is read first: if a change comes during the query, the answer is outdated.
        version, now = self._changes.version, self._clock()
        answer, version_read, time_read = self._entries.get(key, (None, None, 0.0))
        if version != version_read or now >= time_read + CACHE_SECONDS:
            answer = await self._store.read(query, argument)
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = (answer, version, now)
        return cast("T", answer)
