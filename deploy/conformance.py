"""``riffle conformance``: offers batches to a client on loopback, and names its mistakes.

`Recorder` is a shuffler that keeps every byte. It answers nodes as the shuffler does, but it also
serves descriptors that no shuffler would countersign, loses an answer, or changes a batch's key.
`session` compares what the client did with docs/protocol.md, whose sections findings name.
"""

import asyncio
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import Document, SignedDescriptor, first_fault, key_id, parse
from riffle.common.protocol.errors import MEDIA_TYPE, LocalError, RemoteError, RiffleError
from riffle.common.protocol.hpke import KeyPair
from riffle.deploy import offers
from riffle.deploy.batch_check import BatchLaw, Test, check_reports
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.network.loopback import free_port
from riffle.deploy.offers import FAULTS, REPORTS, Case, Offer, Owner
from riffle.deploy.report_check import (
    BatchKeys,
    Finding,
    MistakeError,
    wrong_size,
)
from riffle.node_client.users import opaque_id

LOST, BUSY, NEW_KEY, OVER = FAULTS
LEASE_SECONDS, GRACE_SECONDS = 120, 3.0

D = TypeVar("D", bound=Document)


@dataclass(slots=True)
class Slot:
    """A lease. ``tries`` has the batch key and the bytes of every upload of its report."""

    user: str
    number: int
    expires_at: int
    tries: list[tuple[KeyPair, bytes]] = field(default_factory=list)
    reported: bool = False


@dataclass(slots=True)
class Served:
    """An offer, and what the client did with it."""

    offer: Offer
    key: KeyPair
    signed: SignedDescriptor
    fault: str = ""
    slots: dict[str, Slot] = field(default_factory=dict)
    mistakes: dict[str, MistakeError] = field(default_factory=dict)
    looked_at: float = math.inf
    repeated: bool = False
    over: bool = False

    @property
    def data(self) -> bytes:
        """The descriptor's bytes."""
        return self.offer.signed.descriptor.encode()

    @property
    def free(self) -> list[int]:
        """The numbers of slots that nobody holds."""
        now, slots = time.time(), self.slots.values()
        held = {slot.number for slot in slots if slot.reported or slot.expires_at > now}
        return [number for number in range(REPORTS) if number not in held]

    @property
    def reports(self) -> list[Slot]:
        """The slots that have a report."""
        return [slot for slot in self.slots.values() if slot.reported]

    @property
    def lost(self) -> bool:
        """Whether an answer was lost, and the upload not yet repeated."""
        return self.offer.case is not None and self.offer.case.fault == LOST and not self.repeated

    def note(self, section: str, detail: str) -> None:
        """Records a mistake once."""
        self.mistakes.setdefault(detail, MistakeError(section, detail))


class Recorder:
    """The shuffler that a client talks to. ``is_over`` tells whether the client has ended."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.people = {user: user for user in owner.users}
        self.people |= {opaque_id(owner.users_key, user): user for user in owner.users}
        self.is_over: Callable[[], bool] = lambda: False
        self.served: dict[str, Served] = {}
        self.holders: dict[str, str] = {}
        self.mistakes: dict[str, MistakeError] = {}
        self.changed_at = math.inf
        self._turn = 0

    def offer(self, offer: Offer) -> Served:
        """Lists an offer."""
        fault = "" if offer.case is None else offer.case.fault
        served = Served(offer, offer.batch_key, offer.signed, fault)
        self.served = {**self.served, offer.batch_id: served}
        return served

    def app(self) -> Starlette:
        """Returns the routes of nodes."""
        batch, post = "/v1/batches/{id}", ["POST"]
        return Starlette(
            routes=[
                Route("/v1/identity", self._identity),
                Route("/v1/batches", self._answer(self._list)),
                Route(batch, self._answer(self._descriptor)),
                Route(f"{batch}/leases", self._answer(self._lease), methods=post),
                Route(f"{batch}/declined", self._answer(self._decline), methods=post),
                Route(f"{batch}/reports", self._answer(self._upload), methods=post),
            ]
        )

    def _answer(
        self, handler: Callable[[Request], Awaitable[Document | Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                self._authenticate(request)
                result = await handler(request)
            except RiffleError as error:
                headers = {"Retry-After": "1"} if error.slug == "unavailable" else None
                return JSONResponse(error.document(), error.status, headers, MEDIA_TYPE)
            return result if isinstance(result, Response) else _as_json(result)

        return answer

    def _authenticate(self, request: Request) -> None:
        self.changed_at = min(self.changed_at, time.monotonic())
        if request.headers.get("Authorization") != f"Bearer {self.owner.token}":
            detail = "expected the header 'Authorization: Bearer TOKEN', with the node's token"
            self.mistakes.setdefault(detail, MistakeError("13.2", f"{detail}; seen another"))
            raise RemoteError("unauthorized", "this token is not valid here")

    def _find(self, request: Request) -> Served:
        served = self.served.get(request.path_params["id"])
        if served is None:
            raise RemoteError("unknown-batch", "no batch has this id here")
        return served

    async def _identity(self, _: Request) -> Response:
        public = offers.public(self.owner.keys.shuffler).hex()
        return _as_json(wire.ShufflerIdentity(shuffler_id=offers.SHUFFLER_ID, public_key=public))

    async def _list(self, request: Request) -> Document:
        """Lists open batches. Each time it begins with another one, for clients that take one."""
        end = time.monotonic() + min(30.0, float(request.query_params.get("wait", 0)))
        while not (listed := [s for s in self.served.values() if not s.over and s.free]):
            if time.monotonic() >= end:
                break
            await asyncio.sleep(0.02)
        self._turn = (self._turn + 1) % max(1, len(listed))
        ids = [s.offer.batch_id for s in listed[self._turn :] + listed[: self._turn]]
        rows = tuple(wire.OpenBatch(batch_id=each, free_slots=REPORTS) for each in ids)
        return wire.OpenBatches(batches=rows, lease_seconds=LEASE_SECONDS)

    async def _descriptor(self, request: Request) -> Document:
        served = self._find(request)
        served.looked_at = min(served.looked_at, time.monotonic())
        return served.signed

    async def _decline(self, request: Request) -> Document:
        return await _read(wire.DeclineNotice, request, self._find(request))

    async def _lease(self, request: Request) -> Document:
        served = self._find(request)
        users = (await _read(wire.LeaseRequest, request, served)).users
        if served.offer.fault:
            served.note("11", f"expected a refusal: {served.offer.fault}; seen a request for slots")
            served.over = True
        ends = int(time.time()) + (-1 if served.fault == OVER else LEASE_SECONDS)
        leases, refused = [], []
        for user in dict.fromkeys(users):
            if problem := self._refusal(user, served):
                refused.append(wire.Refusal(user, problem))
                continue
            lease = self.holders.get(self.people[user]) or os.urandom(wire.LEASE_BYTES).hex()
            slot = served.slots.setdefault(lease, Slot(user, min(served.free, default=0), ends))
            if served.fault != OVER:
                self.holders[self.people[user]] = lease
            leases.append(wire.Lease(user, slot.number, lease, slot.expires_at))
        served.fault = served.fault.replace(OVER, "")
        self.changed_at = time.monotonic()
        return wire.LeaseReply(leases=tuple(leases), refused=tuple(refused))

    def _refusal(self, user: str, served: Served) -> str | None:
        """Returns the problem for which a user gets no slot, if any."""
        held = self.holders.get(self.people.get(user, ""))
        if user in self.people and held is None:
            return None if served.free and not served.over else "batch-full"
        if held in served.slots and not served.slots[held].reported:
            return None
        served.note("14", "expected users of the list, each asked once; seen another, or one again")
        return "user-unavailable"

    async def _upload(self, request: Request) -> Document | Response:
        served = self._find(request)
        used, body = request.headers.get(wire.BATCH_KEY_HEADER), await request.body()
        self.changed_at = time.monotonic()
        if used not in {key_id(key.public) for key in (served.offer.batch_key, served.key)}:
            name = wire.BATCH_KEY_HEADER
            served.note("13.2", f"expected the batch key's id in {name}; seen {used}")
        elif used != key_id(served.key.public):
            raise RemoteError("outdated-key", "the batch has another key now")
        if request.headers.get("Content-Type") != wire.OCTETS:
            served.note("13.2", f"expected an upload with Content-Type {wire.OCTETS}")
        frames = self._frames(served, body)
        fault, served.fault = served.fault, ""
        for lease, report in frames:
            self._compare(served, lease, report)
        if fault == NEW_KEY:
            served.key = KeyPair.generate()
            served.signed = offers.sign(served.data, self.owner.keys, served.key.public)
            raise RemoteError("outdated-key", "the batch has another key now")
        if fault == BUSY:
            raise RemoteError("unavailable", "try again")
        results = [wire.UploadResult(lease, self._store(served, lease)) for lease, _ in frames]
        answer = wire.UploadReply(results=tuple(results))
        return _half(answer) if fault == LOST else answer

    def _frames(self, served: Served, body: bytes) -> list[tuple[str, bytes]]:
        if served.offer.case is None:
            raise RemoteError("late", "the batch is over")
        d = parse(served.data).descriptor
        try:
            leases, sealed = wire.split_frames(body, d.report_bytes)
        except RemoteError:
            waiting = sum(not slot.reported for slot in served.slots.values()) or 1
            each = len(body) // (waiting if len(body) % waiting == 0 else 1) - wire.LEASE_BYTES
            served.note("13.7", wrong_size(d, each))
            served.over = True
            raise
        return [(lease, bytes(report)) for lease, report in zip(leases, sealed, strict=True)]

    def _compare(self, served: Served, lease: str, report: bytes) -> None:
        """Compares a report with earlier uploads, under the same key and of other slots."""
        slot = served.slots.get(lease)
        if slot is None:
            served.note("13.7", "expected a frame to begin with the id of a lease of this batch")
            return
        earlier = [sent for key, sent in slot.tries if key is served.key]
        served.repeated |= bool(earlier)
        if any(sent != report for sent in earlier):
            served.note("13.7", "expected the same bytes when an upload is repeated; seen others")
        slot.tries.append((served.key, report))
        if any(s is not slot and (served.key, report) in s.tries for s in served.slots.values()):
            served.note("3.4", "expected a seal of its own for each slot; seen one seal for two")

    def _store(self, served: Served, lease: str) -> str:
        slot = served.slots.get(lease)
        if slot is None or slot.reported:
            return "replayed" if slot else "unknown-lease"
        slot.reported = slot.expires_at > time.time()
        if not slot.reported:
            served.note("13.6", "expected no report after its lease's end; seen one")
        return "accepted" if slot.reported else "late"


async def _read(model: type[D], request: Request, served: Served) -> D:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        served.note("13", f"expected a {model.__name__}; seen {first_fault(error)}")
        raise RemoteError("malformed", first_fault(error)) from error


def _as_json(document: Document) -> Response:
    return Response(document.model_dump_json(), media_type="application/json")


def _half(document: Document) -> Response:
    """Returns an answer that ends too early, as if the connection broke."""
    text = document.model_dump_json().encode()

    async def half() -> AsyncIterator[bytes]:
        yield text[: len(text) // 2]

    return StreamingResponse(half(), headers={"Content-Length": str(len(text))})


@contextmanager
def serving(recorder: Recorder) -> Iterator[str]:
    """Serves a recorder on a free port of loopback; yields its URL."""
    port = free_port()
    config = uvicorn.Config(recorder.app(), LOOPBACK, port, log_config=None, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://{LOOPBACK}:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def session(
    recorder: Recorder,
    cases: Sequence[Case],
    bad: Sequence[Offer],
    idle: float,
    longest: float,
    grace: float = GRACE_SECONDS,
) -> Iterator[Finding]:
    """Offers everything to the client; yields what is right and what is wrong, step by step.

    It ends when the client did nothing for ``idle`` seconds, or after the ``longest`` time. A bad
    offer is refused if nobody asks for its slots for ``grace`` seconds after it was fetched.
    """
    end = time.monotonic() + longest
    offered = [recorder.offer(offer) for offer in bad]
    good = [recorder.offer(offers.good_offer(cases[0], recorder.owner.keys))]

    def wait(done: Callable[[], bool]) -> None:
        while not (done() or recorder.is_over()):
            if time.monotonic() > min(end, recorder.changed_at + idle):
                return
            time.sleep(0.05)

    def refused() -> bool:
        for served in offered:
            served.over |= time.monotonic() > served.looked_at + grace
        return all(served.over for served in offered)

    wait(lambda: recorder.changed_at < math.inf)
    if math.isinf(recorder.changed_at):
        raise LocalError("unavailable", "the client sent no request; did it end?")
    wait(refused)
    yield from map(_refusal, offered)
    good += [recorder.offer(offers.good_offer(case, recorder.owner.keys)) for case in cases[1:]]
    wait(lambda: all(s.over or (len(s.reports) == REPORTS and not s.lost) for s in good))
    seen: set[bytes] = set()
    pooled: dict[str, Test] = {}
    for served in good:
        name = served.offer.case.name if served.offer.case else ""
        mistakes = [*served.mistakes.values(), *_examine(recorder, served, seen, pooled)]
        yield from (Finding(False, name, m.section, m.detail) for m in mistakes)
        if not mistakes:
            yield Finding(True, name, "5", f"{len(served.reports)} reports are right")
    faults = [*recorder.mistakes.values(), *(test.fault for test in pooled.values())]
    wrong = [Finding(False, "all batches", m.section, m.detail) for m in faults if m]
    right = "policies follow their weights, and reward bits their means"
    yield from wrong or [Finding(True, "all batches", "6", right)]


def _refusal(served: Served) -> Finding:
    step = f"check {served.offer.check}: {served.offer.fault}"
    for mistake in served.mistakes.values():
        return Finding(False, step, mistake.section, mistake.detail)
    if math.isinf(served.looked_at):
        return Finding(False, step, "13.5", "expected a request for its descriptor; seen none")
    return Finding(True, step, "11", "refused")


def _examine(
    recorder: Recorder, served: Served, seen: set[bytes], pooled: dict[str, Test]
) -> Iterator[MistakeError]:
    """Yields mistakes in a good batch; ``seen`` and ``pooled`` are as in `check_reports`."""
    reports = served.reports
    if len(reports) < REPORTS and not served.mistakes:
        detail = f"expected {REPORTS} reports for this good batch; seen {len(reports)}"
        yield MistakeError("13" if served.slots else "11", detail)
    if served.lost and reports:
        yield MistakeError("13.7", "expected the upload again after a lost answer; seen none")
    context, analyzer = parse(served.data), recorder.owner.keys.analyzer.private
    pairs = {key.private for slot in reports for key, _ in slot.tries}
    keys = {private: BatchKeys(context, served.data, analyzer, private) for private in pairs}
    tries = [[(keys[key.private], sent) for key, sent in dict(s.tries).items()] for s in reports]
    law = BatchLaw(context.descriptor, *offers.paths())
    yield from check_reports(law, tries, seen, pooled)
