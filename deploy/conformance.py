"""``riffle conformance``: offers batches to a client on loopback, and names its mistakes.

`Recorder` plays the shuffler and keeps every byte. A `Recorder` answers nodes as the shuffler does,
but also serves descriptors that no shuffler would countersign, loses an answer, or changes a
batch's key. `session` compares the client's behaviour with docs/protocol.md. Each finding names a
section of that page.
"""

import asyncio
import json
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import shuffle

import numpy as np
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import Document, first_fault, parse
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.signatures import key_id
from riffle.common.server.service import problem_answer
from riffle.deploy import offers, report_check
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.offers import LOST, NEW_KEY, OVER, REPORTS, STRANGER, Case, Offer, Owner
from riffle.deploy.report_check import BatchKeys, MistakeError, Test
from riffle.node_client.users import opaque_id

LEASE_SECONDS, GRACE_SECONDS = 120, 3.0
PASSING = {
    offers.BUSY: Response('{"type": "urn:riffle:problem:unavailable"}', 503, {"Retry-After": "1"}),
    offers.PROXY: Response("<title>404 Not Found</title>", 404, media_type="text/html"),
    offers.MOVED: Response(status_code=307, headers={"Location": "?moved"}),
}

Handler = Callable[[Offer, Request, bytes], Response]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one step. ``section`` names a section of docs/protocol.md."""

    ok: bool
    step: str
    section: str
    detail: str


class Recorder:
    """The shuffler that a client talks to. ``is_over`` tells whether the client has ended."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.people = {user: user for user in owner.users}
        self.people |= {opaque_id(owner.users_key, user): user for user in owner.users}
        self.is_over: Callable[[], bool] = lambda: False
        self.offers: dict[str, Offer] = {}
        self.holders: dict[str, wire.Lease] = {}
        self.fault: MistakeError | None = None
        self.changed_at = math.inf

    def app(self) -> Starlette:
        """Returns the server, with the routes that nodes use."""
        batch, post = "/v1/batches/{id}", ["POST"]
        return Starlette(
            routes=[
                Route("/v1/identity", self._identity),
                Route("/v1/batches", self._answer()),
                Route(batch, self._answer(self._descriptor)),
                Route(f"{batch}/leases", self._answer(self._lease), methods=post),
                Route(f"{batch}/declined", self._answer(self._decline), methods=post),
                Route(f"{batch}/reports", self._answer(self._upload), methods=post),
            ]
        )

    async def _identity(self, _: Request) -> Response:
        public = offers.public(self.owner.shuffler).hex()
        return _as_json(wire.ShufflerIdentity(shuffler_id=offers.SHUFFLER_ID, public_key=public))

    def _answer(self, handler: Handler | None = None) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint that handles one batch or, without a handler, lists open batches."""

        async def answer(request: Request) -> Response:
            try:
                self._authenticate(request)
                if handler is None:
                    return _as_json(await self._list(request))
                if (offer := self._find(request.path_params["id"])) is None:
                    raise RemoteError("unknown-batch", "no batch has this id here")
                return handler(offer, request, await request.body())
            except RiffleError as error:
                return problem_answer(request.scope, error)
            except ValidationError as error:
                offer, seen = self.offers[request.path_params["id"]], first_fault(error)
                offer.note("13", f"expected a {error.title}; seen {seen}")
                return problem_answer(request.scope, RemoteError("malformed", seen))

        return answer

    def _find(self, name: str) -> Offer | None:
        """Returns the offer with this id, which for check 5 is only in the offer's descriptor."""
        inside = f'"batch_id":"{name}"'.encode()
        others = (offer for offer in self.offers.values() if inside in offer.data)
        return self.offers.get(name) or next(others, None)

    def _authenticate(self, request: Request) -> None:
        self.changed_at = min(self.changed_at, time.monotonic())
        if request.headers.get("Authorization") != f"Bearer {self.owner.token}":
            detail = "expected the header 'Authorization: Bearer TOKEN', with the node's token"
            self.fault = MistakeError("13.2", f"{detail}; seen another")
            raise RemoteError("unauthorized", "this token is not valid here")

    async def _list(self, request: Request) -> Document:
        """Lists open batches in a random order, because some clients take only the first batch."""
        end = time.monotonic() + min(30.0, float(request.query_params.get("wait", 0)))
        while not (ids := [offer.batch_id for offer in self.offers.values() if offer.free]):
            if time.monotonic() >= end:
                break
            await asyncio.sleep(0.02)
        shuffle(ids)
        rows = tuple(wire.OpenBatch(batch_id=each, free_slots=REPORTS) for each in ids)
        return wire.OpenBatches(batches=rows, lease_seconds=LEASE_SECONDS)

    def _descriptor(self, offer: Offer, _: Request, __: bytes) -> Response:
        offer.looked_at = min(offer.looked_at, time.monotonic())
        return _as_json(offer.signed)

    def _decline(self, _: Offer, __: Request, body: bytes) -> Response:
        return _as_json(wire.DeclineNotice.model_validate_json(body))

    def _lease(self, offer: Offer, _: Request, body: bytes) -> Response:
        users = wire.LeaseRequest.model_validate_json(body).users
        if offer.case is None:
            offer.note("11", f"expected a refusal: {offer.fault}; seen a request for slots")
            offer.over = True
        episode = json.loads(offer.data).get("episode_seconds") or 0
        seconds = episode + (-1 if offer.fault == OVER else LEASE_SECONDS)
        is_wrong = offer.fault == STRANGER and not offer.leases
        replies = [self._grant(user, offer, seconds) for user in dict.fromkeys(users)]
        if is_wrong:
            replies[0] = replace(replies[0], user=os.urandom(16).hex())
        elif offer.fault in {OVER, STRANGER}:
            offer.fault = ""
        self.changed_at = time.monotonic()
        leases = tuple(each for each in replies if isinstance(each, wire.Lease))
        refused = tuple(each for each in replies if isinstance(each, wire.Refusal))
        return _as_json(wire.LeaseReply(leases=leases, refused=refused))

    def _grant(self, user: str, offer: Offer, seconds: int) -> wire.Lease | wire.Refusal:
        """Leases a slot to a user, or returns the lease that the user holds in this batch."""
        person = self.people.get(user, "")
        held = self.holders.get(person)
        if held and held.lease in offer.leases.keys() - offer.reported:
            return replace(held, user=user)
        if held or not person:
            seen = "one again" if held else "one that is not on it"
            offer.note("14", f"expected users of the list, each asked once; seen {seen}")
            return wire.Refusal(user, "user-unavailable")
        if not offer.free:
            return wire.Refusal(user, "batch-full")
        slot, end = len(offer.leases) % REPORTS, int(time.time()) + seconds
        lease = wire.Lease(user, slot, os.urandom(wire.LEASE_BYTES).hex(), end)
        offer.leases[lease.lease] = lease
        if seconds >= LEASE_SECONDS:
            self.holders[person] = lease
        return lease

    def _upload(self, offer: Offer, request: Request, body: bytes) -> Response:
        used = request.headers.get(wire.BATCH_KEY_HEADER)
        self.changed_at = time.monotonic()
        if request.url.query:
            offer.note("13.1", "expected the same request again; seen a redirection followed")
        if used not in {key_id(key.public) for key in offer.keys}:
            name = wire.BATCH_KEY_HEADER
            offer.note("13.2", f"expected the batch key's id in {name}; seen {used}")
        elif used != key_id(offer.keys[-1].public):
            raise RemoteError("outdated-key", "the batch has another key now")
        if request.headers.get("Content-Type") != wire.OCTETS:
            offer.note("13.2", f"expected an upload with Content-Type {wire.OCTETS}")
        if offer.case is None:
            raise RemoteError("late", "the batch is over")
        frames = _frames(offer, body)
        fault, offer.fault = offer.fault, ""
        for lease, report in frames:
            _compare(offer, lease, report)
        if fault == NEW_KEY:
            offers.change_key(offer, self.owner)
            raise RemoteError("outdated-key", "the batch has another key now")
        if fault == STRANGER:
            detail = "expected the request again after leases for a user that it did not name"
            offer.note("13.6", f"{detail}; seen an upload")
        offer.unanswered |= fault in {LOST, *PASSING}
        if fault in PASSING:
            return PASSING[fault]
        if fault == offers.REFUSED:
            offer.leases.pop(frames[0][0], None)
        results = [wire.UploadResult(lease, self._store(offer, lease)) for lease, _ in frames]
        offer.over |= len(offer.reported) == REPORTS and not offer.unanswered
        answer = _as_json(wire.UploadReply(results=tuple(results)))
        if fault == LOST:  # as if the connection broke: the header announces the whole answer
            answer.body = answer.body[: len(answer.body) // 2]
        return answer

    def _store(self, offer: Offer, lease: str) -> str:
        """Stores a report if its lease still holds a slot; returns the outcome."""
        if lease not in offer.leases or lease in offer.reported:
            return "replayed" if lease in offer.reported else "unknown-lease"
        if offer.leases[lease] not in self.holders.values():
            offer.note("4.7", "expected no report: its lease ends before an episode may; seen one")
            return "late"
        offer.reported.add(lease)
        return "accepted"


def _as_json(document: Document) -> Response:
    return Response(document.model_dump_json(), media_type="application/json")


def _frames(offer: Offer, body: bytes) -> list[tuple[str, bytes]]:
    d = parse(offer.data).descriptor
    try:
        leases, sealed = wire.split_frames(body, d.report_bytes)
    except RemoteError:
        ids = [form for lease in offer.leases for form in (bytes.fromhex(lease), lease.encode())]
        places = [at for each in ids if (at := body.find(each)) >= 0]
        sizes = [end - at - wire.LEASE_BYTES for at, end in pairwise([*sorted(places), len(body)])]
        wrong = [size for size in sizes if size != d.report_bytes]
        offer.note("13.7", report_check.wrong_size(d, wrong[0] if wrong else len(body)))
        offer.over = True
        raise
    return [(lease, bytes(report)) for lease, report in zip(leases, sealed, strict=True)]


def _compare(offer: Offer, lease: str, report: bytes) -> None:
    """Compares a report with its lease's earlier one (same batch key) and other leases' reports."""
    if lease not in offer.leases:
        own = [sorted(bytes.fromhex(each)) for each in offer.leases]
        is_reordered = sorted(bytes.fromhex(lease)) in own
        why = "; a lease of this batch has its bytes in another order" * is_reordered
        detail = f"expected a frame to begin with the id of a lease of this batch; seen {lease}"
        offer.note("13.7", detail + why)
        offer.over = True
        raise RemoteError("wrong-size", "a frame does not begin with a lease of this batch")
    earlier, key = offer.uploads.setdefault(lease, {}), offer.keys[-1]
    offer.unanswered &= key not in earlier
    if earlier.setdefault(key, report) != report:
        offer.note("13.7", "expected the same bytes when an upload is repeated; seen others")
    if any(report in sent.values() for other, sent in offer.uploads.items() if other != lease):
        offer.note("3.4", "expected a seal of its own for each slot; seen one seal for two")


@contextmanager
def serving(recorder: Recorder) -> Iterator[str]:
    """Serves a recorder on a free port of loopback; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(recorder.app(), log_config=None, log_level="critical"))
    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
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

    The session ends when the client has sent no lease request and no upload for ``idle`` seconds,
    or after ``longest`` seconds. A bad offer counts as refused if the client fetches its descriptor
    and requests no slot in the ``grace`` seconds after its last lease request or upload.
    """
    end, owner = time.monotonic() + longest, recorder.owner
    good = [offers.good_offer(case, owner) for case in cases]
    recorder.offers = {offer.batch_id: offer for offer in (*bad, *good)}
    while not (recorder.is_over() or all(offer.over for offer in (*bad, *good))):
        now = time.monotonic()
        if now > min(end, recorder.changed_at + idle):
            break
        for offer in bad:
            offer.over |= now > max(offer.looked_at, recorder.changed_at) + grace
        time.sleep(0.05)
    if math.isinf(recorder.changed_at):
        detail = "the client sent no request; did it end? client.log has its output"
        raise LocalError("unavailable", detail)
    yield from map(_refusal, bad)
    seen: set[bytes] = set()
    pooled: dict[str, Test] = {}
    is_stuck = any(offer.mistakes for offer in good)
    for case, offer in zip(cases, good, strict=True):
        if is_stuck and not (offer.leases or offer.mistakes):
            yield Finding(False, case.name, "13", "not tried, because of mistakes in other batches")
            continue
        mistakes = [*offer.mistakes.values(), *_examine(owner, offer, seen, pooled)]
        yield from (Finding(False, case.name, *mistake.args) for mistake in mistakes)
        if not mistakes:
            yield Finding(True, case.name, "5", f"{len(offer.reported)} reports are right")
    faults = filter(None, (recorder.fault, *(test.fault for test in pooled.values())))
    wrong = [Finding(False, "all batches", *fault.args) for fault in faults]
    right = "policies follow their weights, and reward bits their means"
    yield from wrong or [Finding(True, "all batches", "6", right)]


def _refusal(offer: Offer) -> Finding:
    step = f"check {offer.check}: {offer.fault}"
    for mistake in offer.mistakes.values():
        return Finding(False, step, *mistake.args)
    if math.isinf(offer.looked_at):
        return Finding(False, step, "13.5", "expected a request for its descriptor; seen none")
    return Finding(True, step, "11", "refused")


def _examine(
    owner: Owner, offer: Offer, seen: set[bytes], pooled: dict[str, Test]
) -> Iterator[MistakeError]:
    """Yields mistakes in a good batch. For ``seen`` and ``pooled``, see `_check_reports`."""
    if offer.unanswered:
        yield MistakeError("13.7", "expected the upload again after no final answer; seen none")
    elif len(offer.reported) < REPORTS and not offer.mistakes:
        detail = f"expected {REPORTS} reports for this good batch; seen {len(offer.reported)}"
        why = "Are the bytes verified that were received (4.1)? Is each pinned key taken (11)?"
        if offer.case and offer.case.support:
            why = "Do C and check 20 leave out the states that cannot be reached (5.4)?"
        if offer.leases:
            why = f"Is one sent in each lease's {LEASE_SECONDS} s, even for a failed episode (6.4)?"
        yield MistakeError("13" if offer.leases else "11", f"{detail}. {why}")
    context = parse(offer.data)
    private = {key.public.hex(): key.private for key in (owner.analyzer, owner.second)}
    keys = partial(BatchKeys, context, offer.data, private[context.descriptor.analyzer_key])
    tries = (offer.uploads[lease] for lease in offer.reported)
    reports = [[(keys(key.private), sent) for key, sent in each.items()] for each in tries]
    law = report_check.BatchLaw(context.descriptor, offers.NEXT, offers.REWARDS)
    yield from _check_reports(law, reports, seen, pooled)


def _check_reports(
    law: report_check.BatchLaw,
    reports: Sequence[report_check.Tries],
    seen: set[bytes],
    pooled: dict[str, Test],
) -> Iterator[MistakeError]:
    """Yields mistakes in a batch.

    ``seen`` has noise and ephemeral keys of earlier reports; ``pooled`` adds up tests over batches.
    """
    opened, wrong = list[Ints](), Counter[tuple[str, str]]()
    for tries in reports:
        try:
            opened.append(report_check.open_report(tries, seen))
        except MistakeError as mistake:
            wrong[mistake.args] += 1
    for (section, detail), count in wrong.most_common(3):
        yield MistakeError(section, f"{count} of {len(reports)} reports: {detail}")
    if len(opened) == law.descriptor.n:
        yield from law.mistakes(np.stack(opened), seen, pooled)


def check_report(keys: BatchKeys, sealed: bytes) -> Iterator[Finding]:
    """Yields what is right and what is wrong about one report, whatever its episode is.

    A number of ones is wrong if a correct client has it, or one more extreme, at `ERROR_RATE`.
    """
    d, layout = keys.context.descriptor, keys.context.descriptor.layout
    try:
        counts = report_check.open_report([(keys, sealed)], set())[: layout.counters]
    except MistakeError as mistake:
        yield Finding(False, "seals", *mistake.args)
        return
    detail = f"all open, each with its own ephemeral key; {d.padding.messages} messages"
    yield Finding(True, "seals", "3.4", detail)
    (bits, p), data = report_check.noise_bits(d), layout.cells
    ones, most = int(counts.sum()), int(counts.max())
    law = report_check.binomial(bits * layout.counters, p)
    likely = min(law[: ones + 1].sum(), law[max(0, ones - data) :].sum()) > report_check.ERROR_RATE
    detail = f"{ones} ones of counters; expected about {bits * p * layout.counters:.4g} of noise"
    yield Finding(bool(likely), "noise", "7", f"{detail}, up to {data} of data")
    detail = f"at most {most} ones of a counter; expected up to {1 + bits}"
    yield Finding(most <= 1 + bits, "counters", "7", detail)
