"""The shuffler as an object: what its routes ask for, joined from store, vault and committer.

Writes go to the committer and are awaited; reads and elliptic-curve work run in threads, so that
the event loop stays free. What must survive a crash is ordered here:

- deposit: secret file synced, then the row committed, then the countersigned key shown to anyone;
- hand-over: the digest of the permuted bytes committed, then the first byte sent;
- end: ``acknowledged`` or ``abandoned`` committed, then the secret destroyed, then reports deleted,
  then ``clean``: see `shuffler.releases`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.protocol.descriptor import Context, SignedDescriptor, countersign
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import open_each
from riffle.common.protocol.messages import (
    LEASE_BYTES,
    MAX_USERS_A_LEASE,
    BatchState,
    BatchStatus,
    Conservation,
    Enrolment,
    EnrolRequest,
    LeaseReply,
    OpenBatch,
    ShufflerIdentity,
    UploadReply,
    split_frames,
)
from riffle.common.protocol.verification import read_pins
from riffle.common.server.database import writer
from riffle.common.server.limits import CallerLimits
from riffle.common.server.monitoring import VersionedCache, disk_trouble
from riffle.common.server.statements import listen
from riffle.shuffler.admission import STILL_SECONDS, Admission, Budget, Changes
from riffle.shuffler.conservation import Books, add_latencies
from riffle.shuffler.metrics import ShufflerMetrics, census, note
from riffle.shuffler.permutation import Release
from riffle.shuffler.releases import Endings, Releases
from riffle.shuffler.rules import Frame, accept_deposit
from riffle.shuffler.settings import Settings
from riffle.shuffler.states import reached
from riffle.shuffler.store import leasing, records, uploads
from riffle.shuffler.store import users as nodes
from riffle.shuffler.store.committer import Access
from riffle.shuffler.store.schema import not_usable, open_store
from riffle.shuffler.store.vault import BatchSecret, SecretLostError, Stored, Vault

Clock = Callable[[], float]


class Shuffler:
    """One shuffler on one data directory. Made and closed inside a running event loop."""

    def __init__(
        self, settings: Settings, clock: Clock, metrics: ShufflerMetrics | None = None
    ) -> None:
        self.settings = settings
        self.identity = ShufflerIdentity(
            shuffler_id=settings.shuffler_id, public_key=settings.public_key().hex()
        )
        self.metrics = metrics or ShufflerMetrics()
        self.inflight = Budget(settings.max_inflight_bytes, "uploads", settings.inflight_of_one)
        self.callers = CallerLimits(settings.rate_limit())
        self._clock = clock
        self._demands = settings.demands()
        self._signing_key = settings.signing_key()
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._vault = Vault(settings.data_dir / "secrets", settings.file_cipher())
        self._access = Access(settings.url)
        self.changes = Changes(shared=self._access.shared)
        self.admission = Admission(self._access, lambda: self.changes.told)
        self._releases = Releases(self._access, self._vault, self.metrics, self._lose)
        self._endings = Endings(
            self._access,
            self._vault,
            lambda: self.now,
            settings.retention_seconds,
            self._releases.forget,
            self.changes,
        )
        self._books = Books(self._access, show_fill=settings.show_fill)
        self._open = VersionedCache(self._read_open, lambda: (self._access.writes, self.now))
        self._probed = VersionedCache(self._probe, lambda: self.now)
        self._listening: asyncio.Task[None] | None = None

    @property
    def now(self) -> int:
        """Seconds since 1970 by the clock this service was given."""
        return int(self._clock())

    async def start(self) -> None:
        """Take up where the last process stopped, however it stopped.

        A batch whose secret is lost is given up, so that it does not stop the others.
        """
        self._listening = asyncio.create_task(listen(self._access.engine, self._heard))
        await self.tidy()
        note("started", batches=await self._endings.find_lost())

    def close(self) -> None:
        """Finish waiting writes and let go of the store."""
        if self._listening is not None:
            self._listening.cancel()
        self._access.close()

    # Batches: what the coordinator does

    async def deposit(
        self, batch_id: str, data: bytes, signature: str | None
    ) -> tuple[SignedDescriptor, bool]:
        """Check and countersign a descriptor; the flag says whether the batch is new.

        Raises:
            RemoteError: see `accept_deposit`; ``descriptor-conflict`` for a second descriptor.
        """
        known = await self._access.read(partial(records.signed_descriptor, batch_id=batch_id))
        if known is not None:
            return _same(known, data), False
        pins = await asyncio.to_thread(read_pins, self.settings.analyzer_keys_file)
        demands = replace(self._demands, analyzer_keys=pins)
        context = await asyncio.to_thread(
            accept_deposit, data, signature, batch_id, demands, self.now
        )
        insert = partial(self._insert, data=data, context=context, signature=signature or "")
        signed, created = await self._access.write(insert)
        self.changes.notify()
        note("deposited", batch_id=batch_id, n=context.descriptor.n)
        return signed, created

    async def status(
        self, batch_id: str, *, wait: float = 0, wanted: BatchState | None = None
    ) -> BatchStatus:
        """Status, at the latest after ``wait`` seconds, before if ``wanted`` is reached."""

        async def look() -> BatchStatus:
            return await self._endings.settled(
                partial(records.status, batch_id=batch_id, now=self.now)
            )

        return await self.changes.poll(
            wait, look, lambda status: wanted is None or reached(status.state, wanted)
        )

    async def conservation(self, batch_id: str, *, whole: bool) -> Conservation:
        """What became of everything sent to a batch; not ``whole``: as the coordinator may see."""
        await self.tidy()
        return await self._books.record(batch_id, self.now, whole=whole)

    async def release(self, batch_id: str) -> Release:
        """The permuted messages of a sealed batch: the same bytes every time, until acknowledged.

        Raises:
            RemoteError: ``unknown-batch``, ``batch-not-ready``, ``late``.
        """
        release = await self._releases.release(batch_id)
        self.changes.notify()
        note("forwarded", batch_id=batch_id, messages=len(release.messages))
        return release

    async def acknowledge(self, batch_id: str, sha256: str) -> BatchStatus:
        """Erase a batch whose messages the analyzer has."""
        await self._access.write(partial(records.acknowledge, batch_id=batch_id, sha256=sha256))
        return await self._end(batch_id)

    async def abandon(self, batch_id: str) -> BatchStatus:
        """Give a short batch up; its users stay marked."""
        await self._access.write(partial(records.abandon, batch_id=batch_id))
        return await self._end(batch_id)

    # Reports: what nodes do

    async def descriptor(self, batch_id: str) -> SignedDescriptor:
        """What nodes are served.

        Raises:
            RemoteError: ``unknown-batch``.
        """
        signed = await self._access.read(partial(records.signed_descriptor, batch_id=batch_id))
        if signed is None:
            raise RemoteError("unknown-batch", "no batch has this id here")
        return signed

    async def open_batches(self, *, wait: float, accepting: bool) -> list[OpenBatch]:
        """Open batches; with ``accepting`` those with a free slot, waiting until there is one."""
        if not accepting:
            return (await self._open.get()).batches
        found = await self.changes.poll(
            wait,
            self._open.get,
            lambda found: any(batch.free_slots for batch in found.batches),
            lambda found: found.changes_within(STILL_SECONDS, self.settings.lease_seconds),
        )
        return [batch for batch in found.batches if batch.free_slots]

    async def lease(self, batch_id: str, node_id: str, users: Sequence[str]) -> LeaseReply:
        """Slots for users of a node."""
        terms = leasing.Terms(self.now, self.settings.lease_seconds, self.settings.max_node_share)
        reply = await self._access.write(
            partial(leasing.lease, batch_id=batch_id, node_id=node_id, wanted=users, terms=terms)
        )
        self.metrics.leased(reply)
        return reply

    def upload_limit(self, batch: records.Batch) -> int:
        """Largest upload to a batch in bytes; one report always fits."""
        frame = LEASE_BYTES + batch.report_bytes
        return max(frame, min(self.settings.max_upload_bytes, MAX_USERS_A_LEASE * frame))

    async def upload(
        self, batch: records.Batch, node_id: str, body: bytes, began: float
    ) -> UploadReply:
        """Store reports; what is answered ``accepted`` is durable.

        ``began`` is when the request came, by the event loop's clock.

        Raises:
            RemoteError: ``wrong-size`` when the body is not whole frames.
        """
        batch_id = batch.batch_id
        try:
            leases, sealed = split_frames(body, batch.report_bytes)
        except RemoteError as error:
            dropped = {error.slug: 1}
            await self._access.write(
                partial(records.count_dropped, batch_id=batch_id, problems=dropped)
            )
            self.metrics.frames.labels(error.slug).inc()
            raise
        self.callers.reports(node_id, len(leases), asyncio.get_running_loop().time())
        checked, stored = await self._checked(batch, leases, sealed)
        del body, sealed  # 2 MB; what was opened is as much
        clock = asyncio.get_running_loop().time
        measured = self._books.due(batch_id, clock())

        def write(connection: Connection) -> uploads.Done:
            add_latencies(connection, batch_id, measured)
            return uploads.upload(connection, batch_id, node_id, checked, stored, self.now)

        done = await self._access.write(write)
        self._books.took(batch_id, clock() - began)
        self.metrics.uploaded(done.outcomes, clock() - began)
        if done.sealed:
            self.changes.notify()
            note("sealed", batch_id=batch_id, reports=batch.n)
        return done.reply

    # What the operator does

    async def enrol(self, request: EnrolRequest) -> Enrolment:
        """Enrol a node."""
        return await self._access.write(partial(nodes.enrol, request=request))

    async def revoke(self, node_id: str) -> None:
        """Refuse a node from now on."""
        await self._access.write(partial(nodes.revoke, node_id=node_id))
        self.changes.notify()

    async def ready(self) -> None:
        """Return when store and secrets can be written.

        Raises:
            LocalError: ``unavailable``, with what is wrong.
        """
        await self._probed.get()

    async def measure(self) -> None:
        """Bring the metrics of what is stored and waits up to date."""
        found = await self._access.read(census)
        self.metrics.show(
            found,
            inflight_bytes=self.inflight.taken,
            writes_waiting=self._access.committer.waiting,
            data_dir=self.settings.data_dir,
        )

    async def tidy(self) -> None:
        """End what is due; destroy and delete what is over. Repeats harmlessly."""
        await self._endings.tidy()

    # Inside

    def _heard(self, _: str) -> None:
        """A replica, perhaps this one, has changed a batch or revoked a node."""
        self._access.writes += 1
        self.changes.notify()

    async def _end(self, batch_id: str) -> BatchStatus:
        await self.tidy()
        status = await self.status(batch_id)
        self.changes.notify()
        note("ended", batch_id=batch_id, state=status.state)
        return status

    def _insert(
        self, connection: Connection, data: bytes, context: Context, signature: str
    ) -> tuple[SignedDescriptor, bool]:
        batch_id = context.descriptor.batch_id
        known = records.signed_descriptor(connection, batch_id)
        if known is not None:
            return _same(known, data), False
        secret = self._vault.put(batch_id, BatchSecret.generate())
        signed = SignedDescriptor(
            descriptor=data.decode(),
            coordinator_signature=signature,
            batch_key=secret.outer.public.hex(),
            shuffler_signature=countersign(self._signing_key, context.digest, secret.outer.public),
        )
        records.insert_batch(connection, data, context, signed)
        return signed, True

    async def _lose(self, batch_id: str) -> None:
        await self._endings.lose(batch_id)
        self.changes.notify()

    async def _checked(
        self, batch: records.Batch, leases: list[str], sealed: list[memoryview]
    ) -> tuple[list[Frame], Stored | None]:
        """Frames out of their outer seals, and how to store them.

        None opens once the secret is lost and the batch over.
        """
        try:
            return await asyncio.to_thread(self._check, batch, leases, sealed)
        except SecretLostError:
            await self._lose(batch.batch_id)
            return uploads.framed(leases, sealed), None

    def _check(
        self, batch: records.Batch, leases: list[str], sealed: list[memoryview]
    ) -> tuple[list[Frame], Stored | None]:
        """Open every outer seal, so that no batch is sealed with a report that does not open."""
        if batch.state != "open":
            return uploads.framed(leases, sealed), None
        secret = self._vault.get(batch.batch_id)
        begun = time.thread_time()
        opened = list(open_each(secret.outer.private, batch.report_info, sealed))
        self.metrics.opening.inc(time.thread_time() - begun)
        return uploads.framed(leases, sealed, opened), Stored(batch.batch_id, secret)

    async def _read_open(self) -> records.Open:
        return await self._endings.settled(partial(records.open_batches, now=self.now))

    async def _probe(self) -> None:
        if trouble := await asyncio.to_thread(disk_trouble, self.settings.data_dir):
            raise LocalError("unavailable", trouble)
        await asyncio.to_thread(self._vault.probe)
        await self._access.write(partial(records.touch, now=self.now))


def preflight(settings: Settings) -> None:
    """Everything that would stop the service from starting, found before its port is taken.

    Raises:
        LocalError: keys, tokens or store are missing, damaged or newer than this program.
    """
    settings.demands()
    read_pins(settings.analyzer_keys_file)
    settings.tls()
    settings.public_key()
    settings.coordinator_hash()
    settings.operator_hash()
    settings.metrics_hash()
    vault = Vault(settings.data_dir / "secrets", settings.file_cipher())
    vault.probe()
    engine = open_store(settings.url)
    try:
        with writer(engine).begin() as connection:
            records.keep_to_vault(connection, vault.identity())
    except SQLAlchemyError as error:
        raise not_usable("written", error) from error
    finally:
        engine.dispose()


def _same(known: SignedDescriptor, data: bytes) -> SignedDescriptor:
    """One immutable descriptor per batch id: two would let nodes be told apart."""
    if known.descriptor.encode() != data:
        raise RemoteError("descriptor-conflict", "this batch id already has another descriptor")
    return known
