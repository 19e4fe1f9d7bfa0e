"""The life of a batch: deposit, hand-over, end, erasure.

To survive a crash, each of these events takes its steps in a fixed order:

- deposit: the batch's secret is synced to a file, the batch's row is committed, then the answer
  shows the countersigned key;
- hand-over: the digest of the permuted bytes is synced to a file and committed, then the first byte
  is sent;
- end: ``acknowledged`` or ``abandoned`` is committed, the secret is destroyed, the reports are
  deleted, then ``clean`` is committed. `BatchLifecycle.tidy` does what a crash left undone.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from riffle.common.mechanism.sums import KEY_BYTES
from riffle.common.protocol.descriptor import Context, SignedDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.signatures import countersign
from riffle.common.protocol.verification import read_pins
from riffle.common.protocol.wire import BatchState, BatchStatus
from riffle.common.server.database import try_claim
from riffle.shuffler.metrics import ShufflerMetrics, note
from riffle.shuffler.permutation import Release, blank_copies, permute_messages, senders
from riffle.shuffler.rules import accept_deposit
from riffle.shuffler.settings import Settings
from riffle.shuffler.states import after, reached
from riffle.shuffler.store import batch_rows, report_rows
from riffle.shuffler.store.committer import Store
from riffle.shuffler.store.vault import BatchSecret, ReportCipher, SecretLostError, Vault
from riffle.shuffler.waiting import ChangeSignal

SLOTS_A_DELETE = 4_096
RELEASES_IN_MEMORY = 2

P = ParamSpec("P")
T = TypeVar("T")


class BatchLifecycle:
    """Manages the batches of one store and vault. ``clock`` returns seconds since 1970."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        settings: Settings,
        clock: Callable[[], int],
        changes: ChangeSignal,
        metrics: ShufflerMetrics,
    ) -> None:
        self._store = store
        self._vault = vault
        self._clock = clock
        self._changes = changes
        self._metrics = metrics
        self._settings = settings
        self._demands = settings.demands()
        self._signing_key = settings.signing_key()
        self._releases: dict[str, Release] = {}
        self._releasing = asyncio.Lock()
        self._tidying = asyncio.Lock()

    # Deposit and status

    async def deposit(
        self, batch_id: str, data: bytes, signature: str | None
    ) -> tuple[SignedDescriptor, bool]:
        """Checks and countersigns a descriptor; the returned flag tells whether the batch is new.

        Raises the RemoteErrors of `accept_deposit`, or ``descriptor-conflict`` if the batch already
        has another descriptor. Raises LocalError if too many batches are open or the disk is full.
        """
        present = await self._store.read(batch_rows.signed_descriptor, batch_id)
        if present is not None:  # an earlier request may have failed before it wrote the head
            return await self._store.write_for_good(lambda _: _same(present, data)), False
        pins = await asyncio.to_thread(read_pins, self._settings.analyzer_keys_file)
        if pins != self._demands.analyzer_keys:
            self._demands = replace(self._demands, analyzer_keys=pins)
            note("analyzer-keys-changed", keys=len(pins or ()))
        context = await asyncio.to_thread(
            accept_deposit, data, signature, batch_id, self._demands, self._clock()
        )
        signed, created = await self._store.write_for_good(
            self._insert, data, context, signature or ""
        )
        self._changes.notify()
        note("deposited", batch_id=batch_id, n=context.descriptor.n)
        return signed, created

    def _insert(
        self, connection: Connection, data: bytes, context: Context, signature: str
    ) -> tuple[SignedDescriptor, bool]:
        batch_id = context.descriptor.batch_id
        present = batch_rows.signed_descriptor(connection, batch_id)
        if present is not None:
            return _same(present, data), False
        most = self._settings.max_open_batches
        if len(batch_rows.open_ids(connection, self._clock())) >= most:
            detail = f"{most} batches are open; end one or wait for one"
            raise LocalError("too-many-requests", detail, retry_after=60)
        report_rows.check_disk(connection, context.descriptor, self._clock())
        secret = self._vault.put(batch_id, BatchSecret.generate())
        signed = SignedDescriptor(
            descriptor=data.decode(),
            coordinator_signature=signature,
            batch_key=secret.outer.public.hex(),
            shuffler_signature=countersign(self._signing_key, context.digest, secret.outer.public),
        )
        batch_rows.insert_batch(connection, data, context, signed)
        batch = batch_rows.find(connection, batch_id)
        if batch.word_bits:
            report_rows.insert_sum(connection, batch, ReportCipher(batch_id, secret))
        return signed, True

    async def descriptor(self, batch_id: str) -> SignedDescriptor:
        """Returns a descriptor with its signatures, or raises RemoteError ``unknown-batch``."""
        signed = await self._store.read(batch_rows.signed_descriptor, batch_id)
        if signed is None:
            raise RemoteError("unknown-batch", "no batch has this id here")
        return signed

    async def status(
        self, batch_id: str, *, wait: float = 0, wanted: BatchState | None = None
    ) -> BatchStatus:
        """Returns the status once the batch has reached ``wanted``, or after ``wait`` seconds."""
        return await self._changes.poll(
            wait,
            lambda: self.tidied(batch_rows.status, batch_id, self._clock()),
            lambda status: wanted is None or reached(status.state, wanted),
        )

    # Hand-over

    async def release(self, batch_id: str) -> Release:
        """Returns the permuted messages of a sealed batch. A repeated call gets the same bytes.

        Raises RemoteError ``unknown-batch``, ``batch-not-ready`` or ``late``.
        """
        async with self._releasing:
            batch = await self.tidied(batch_rows.find, batch_id)
            after(batch.state, "forward")
            release = self._releases.get(batch_id) or await self._permuted(batch)
            digest, count = release.sha256, release.messages
            await self._store.write_for_good(batch_rows.mark_forwarded, batch_id, digest, count)
            self._remember(batch_id, release)
        self._changes.notify()
        note("forwarded", batch_id=batch_id, messages=count)
        return release

    async def _permuted(self, batch: batch_rows.Batch) -> Release:
        try:
            with self._metrics.shuffling.time():
                release = await asyncio.to_thread(self._permute, batch)
            if batch.messages_sha256 in (None, release.sha256):
                await asyncio.to_thread(self._vault.pin, batch.batch_id, release.sha256)
        except SecretLostError as error:
            await self.give_up(batch.batch_id)
            detail = "the batch's secret is lost; its messages can no longer be fetched"
            raise RemoteError("late", detail) from error
        self._metrics.shuffled.inc(release.messages)
        return release

    def _permute(self, batch: batch_rows.Batch) -> Release:
        secret = self._vault.get(batch.batch_id)
        with self._store.engine.connect() as connection:
            if not try_claim(connection, f"shuffle {batch.batch_id}"):
                # All replicas would make the same bytes, so only one spends the time and memory.
                detail = "another replica is permuting this batch"
                raise LocalError("unavailable", detail, retry_after=1)
            cipher = ReportCipher(batch.batch_id, secret)
            with closing(report_rows.stored_reports(connection, batch.batch_id)) as stored:
                permuted = permute_messages(
                    ((slots, cipher.decrypt(slots, data)) for slots, data in stored),
                    secret.permutation,
                    n=batch.n,
                    L=batch.L,
                    message_bytes=KEY_BYTES if batch.word_bits else batch.message_bytes,
                )
            if batch.word_bits:  # the permuted messages are the reports' keys, all distinct
                total = report_rows.read_sum(connection, batch, cipher)
                return Release.of(permuted, total.data.cast("B"))
            blank_copies(permuted)
            return Release.of(permuted)

    def _remember(self, batch_id: str, release: Release) -> None:
        self._releases.pop(batch_id, None)
        while len(self._releases) >= RELEASES_IN_MEMORY:
            self._releases.pop(next(iter(self._releases)))
        self._releases[batch_id] = release

    # End and erasure

    async def acknowledge(self, batch_id: str, sha256: str, failed: Sequence[int]) -> BatchStatus:
        """Erases a batch that the analyzer has received; counts failed messages of each node.

        ``failed`` lists messages by their places in the order of the hand-over. The coordinator
        claims, without proof, that these messages did not open or named no counter. No answer,
        check, status, record or time may depend on who sent these messages, so that the coordinator
        learns nothing. The counts have no automatic effect, because a dishonest coordinator may
        name any messages.

        Raises RemoteError ``malformed`` if ``failed`` is not an ascending list of messages' places.
        In a batch of sums, nothing can fail, so ``failed`` must be empty.
        """
        batch = await self._store.read(batch_rows.find, batch_id)
        messages = 0 if batch.word_bits else batch.n * batch.L
        if sorted(set(failed)) != list(failed) or (failed and failed[-1] >= messages):
            raise RemoteError("malformed", "failed: not ascending places of the batch's messages")
        slots: list[int] = []
        if failed and batch.state == "forwarded":
            async with self._releasing:
                slots = await asyncio.to_thread(self._senders, batch, failed)
        await self._store.write(batch_rows.acknowledge, batch_id, sha256, slots)
        return await self._end(batch_id, "acknowledged")

    def _senders(self, batch: batch_rows.Batch, places: Sequence[int]) -> list[int]:
        try:
            key = self._vault.get(batch.batch_id).permutation
        except SecretLostError:  # nobody can find out any more who sent these messages
            return []
        return senders(places, key, n=batch.n, L=batch.L)

    async def abandon(self, batch_id: str) -> BatchStatus:
        """Abandons a batch with fewer than n reports. Users with a report may not report again."""
        await self._store.write(batch_rows.abandon, batch_id)
        return await self._end(batch_id, "abandoned")

    async def _end(self, batch_id: str, event: str) -> BatchStatus:
        note(event, batch_id=batch_id)
        await self.tidy()
        status = await self.status(batch_id)
        self._changes.notify()
        return status

    async def give_up(self, batch_id: str) -> None:
        """Abandons a batch that has lost its secret, unless its messages have been handed over."""
        state = await self._store.write(batch_rows.give_up, batch_id)
        if state in batch_rows.NEED_SECRET:  # in other states, the secret was destroyed on purpose
            note("secret-lost", batch_id=batch_id, state=state)
        await self.tidy()
        self._changes.notify()

    async def give_up_lost(self) -> int:
        """Gives up batches whose secret is lost. Returns how many other batches need their secret.

        Raises LocalError ``unavailable`` if a secret exists but cannot be read.
        """
        needed = await self._store.read(batch_rows.holding_secrets)
        for batch_id in sorted(needed):
            try:
                await asyncio.to_thread(self._vault.get, batch_id)
            except SecretLostError:
                await self.give_up(batch_id)
                needed.remove(batch_id)
        return len(needed)

    async def tidied(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the result of a query after `tidy`. If nothing is due, reads only once."""

        def read(connection: Connection) -> tuple[T] | None:
            return None if self._due(connection) else (query(connection, *args, **kwargs),)

        result = await self._store.read(read)
        if result is not None:
            return result[0]
        await self.tidy()
        return await self._store.read(query, *args, **kwargs)

    async def tidy(self) -> None:
        """Ends the batches that are due, then erases all batches that are over. Safe to repeat."""
        now, retention = self._clock(), self._settings.retention_seconds
        async with self._tidying:
            if not await self._store.read(self._due):
                return
            for batch_id, event in await self._store.write(batch_rows.end_due, now, retention):
                note(f"{event}d", batch_id=batch_id)
            # This follows the write: no secret is destroyed before its batch's end is durable.
            for batch_id in await self._store.read(batch_rows.to_clean):
                await self._clean(batch_id)
        self._changes.notify()

    def _due(self, connection: Connection) -> bool:
        return batch_rows.anything_due(connection, self._clock(), self._settings.retention_seconds)

    async def _clean(self, batch_id: str) -> None:
        self._releases.pop(batch_id, None)
        await asyncio.to_thread(self._vault.destroy, batch_id)
        batch = await self._store.read(batch_rows.find, batch_id)
        for start in range(0, batch.next_slot + 1, SLOTS_A_DELETE):
            slots = range(start, start + SLOTS_A_DELETE)
            await self._store.write(report_rows.delete_reports, batch_id, slots)
            if batch.word_bits:
                await self._store.write(report_rows.delete_sum, batch_id, SLOTS_A_DELETE)
        await self._store.write(batch_rows.mark_clean, batch_id)
        note("erased", batch_id=batch_id)


def _same(present: SignedDescriptor, data: bytes) -> SignedDescriptor:
    """Returns ``present``. Refuses other ``data``: nodes must not get different descriptors."""
    if present.descriptor.encode() != data:
        raise RemoteError("descriptor-conflict", "this batch id already has another descriptor")
    return present
