"""``riffle conformance``: offers batches to a client on loopback, and names its mistakes.

`Recorder` plays the shuffler, with faults such as a lost answer, and keeps every byte. `session`
compares the client's behaviour with docs/protocol.md. Each finding names a section of that page.
"""

import asyncio
import gzip
import json
import math
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import shuffle

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import Document, first_fault, parse
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.signatures import key_id, public_key
from riffle.common.server.service import problem_answer
from riffle.deploy import offers
from riffle.deploy import owner as test
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.offers import BLANKS, LOST, NEW_KEY, OVER, REPORTS, Case, Offer
from riffle.deploy.owner import BatchKeys, Finding, MistakeError, Owner, wrong_frames
from riffle.deploy.report_check import BatchLaw, Test, check_reports, pooled_faults
from riffle.node_client.users import opaque_id

LEASE_SECONDS, GRACE_SECONDS, MAX_WAIT, MANY_POLLS = 120, 3.0, 30, 200
AGAIN = "one again (are leases matched to users by name? 13.6)"
PASSING = {
    offers.BUSY: Response('{"type": "urn:riffle:problem:unavailable"}', 503, {"Retry-After": "1"}),
    offers.PROXY: Response("<title>404 Not Found</title>", 404, media_type="text/html"),
    offers.MOVED: Response(status_code=307, headers={"Location": "?moved"}),
    offers.EMPTY: Response('{"results": []}', media_type="application/json"),
    offers.STATUS: Response('{"type": "urn:riffle:problem:late", "status": 409}', 503),
}

Handler = Callable[[Offer, Request, bytes], Response]


class Recorder:
    """The shuffler that a client talks to. ``is_over`` tells whether the client has ended."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.people = {user: user for user in owner.users}
        self.people |= {opaque_id(owner.users_key, user): user for user in owner.users}
        self.is_over: Callable[[], bool] = lambda: False
        self.offers: dict[str, Offer] = {}
        self.holders: dict[str, wire.Lease] = {}
        self.faults: dict[str, MistakeError] = {}
        self.changed_at, self.polls, self.polled_at = math.inf, 0, 0.0

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
        """Answers with a key that is not the pinned key. It also signs one of the bad offers."""
        other = public_key(self.owner.impostor).hex()
        return _as_json(wire.ShufflerIdentity(shuffler_id=test.SHUFFLER_ID, public_key=other))

    def _answer(self, handler: Handler | None = None) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint that handles one batch or, without a handler, lists open batches."""

        async def answer(request: Request) -> Response:
            try:
                self._check_head(request)
                if handler is None:
                    return _as_json(await self._list(request))
                if (offer := self._find(request.path_params["id"])) is None:
                    raise RemoteError("unknown-batch", "no batch has this id here")
                if request.url.query == "moved":
                    offer.note("13.1", "expected the same request; seen a redirection followed")
                return handler(offer, request, await request.body())
            except RiffleError as error:
                return problem_answer(request.scope, error)
            except ValidationError as error:
                offer, seen = self.offers[request.path_params["id"]], first_fault(error)
                offer.note("13", f"expected a {error.title}; seen {seen}")
                return problem_answer(request.scope, RemoteError("malformed", seen))

        return answer

    def _find(self, name: str) -> Offer | None:
        """Returns the offer listed under this id, or else an offer whose descriptor has the id."""
        inside = f'"batch_id":"{name}"'.encode()
        others = (offer for offer in self.offers.values() if inside in offer.data)
        return self.offers.get(name) or next(others, None)

    def _check_head(self, request: Request) -> None:
        """Checks the headers and counts polls in a row."""
        headers, path = request.headers, request.url.path
        self.changed_at = min(self.changed_at, time.monotonic())
        self.polls = self.polls + 1 if path.endswith("/batches") else 0
        expected = {"Accept-Encoding": ("13.1", "identity")}
        if request.method == "POST":
            kind = wire.OCTETS if path.endswith("/reports") else "application/json"
            expected["Content-Type"] = ("13.2", kind)
        for name, (section, value) in expected.items():
            if (seen := headers.get(name, "none")).partition(";")[0] != value:
                self._note(section, f"expected the header '{name}: {value}'; seen {seen}")
        if headers.get("Authorization") != f"Bearer {self.owner.token}":
            self._note("13.2", "expected 'Authorization: Bearer TOKEN' of this node; seen another")
            raise RemoteError("unauthorized", "this token is not valid here")

    def _note(self, section: str, detail: str) -> None:
        self.faults.setdefault(detail, MistakeError(section, detail))

    async def _list(self, request: Request) -> Document:
        """Lists open batches in a random order, because some clients take only the first batch."""
        start, wait = time.monotonic(), request.query_params.get("wait", "")
        if wait and not (wait.isdecimal() and int(wait) <= MAX_WAIT):
            self._note("13.4", f"expected a wait of 0 to {MAX_WAIT} whole seconds; seen {wait}")
        if self.polls == 1:
            self.polled_at = start
        elif self.polls >= MANY_POLLS and start - self.polled_at < self.polls / 100:
            self._note("13.4", "expected a pause between polls while no batch suits; seen none")
        end = start + (int(wait) if wait.isdecimal() else 0)
        while not (ids := [offer.batch_id for offer in self.offers.values() if offer.free]):
            if time.monotonic() >= end:
                break
            await asyncio.sleep(0.02)
        shuffle(ids)
        rows = tuple(wire.OpenBatch(batch_id=each, free_slots=REPORTS) for each in ids)
        return wire.OpenBatches(batches=rows, lease_seconds=LEASE_SECONDS)

    def _descriptor(self, offer: Offer, _: Request, __: bytes) -> Response:
        if offer.fault == offers.AWAY:
            offer.fault = ""
            return PASSING[offers.MOVED]
        offer.looked_at = min(offer.looked_at, time.monotonic())
        return _as_json(offer.signed)

    def _decline(self, offer: Offer, _: Request, body: bytes) -> Response:
        if offer.case is None and "4.7" not in offer.fault:  # no check finds this fault
            offer.note("11", f"expected a refusal: {offer.fault}; seen a batch that was taken")
        return _as_json(wire.DeclineNotice.model_validate_json(body))

    def _lease(self, offer: Offer, _: Request, body: bytes) -> Response:
        users = wire.LeaseRequest.model_validate_json(body).users
        if offer.case is None:
            offer.note("11", f"expected a refusal: {offer.fault}; seen a request for slots")
            offer.over = True
        episode = json.loads(offer.data).get("episode_seconds") or 0
        seconds = episode + (-1 if offer.fault == OVER else LEASE_SECONDS)
        fault, is_first = offer.fault, not offer.leases
        replies = [self._grant(user, offer, seconds) for user in dict.fromkeys(users)]
        if fault in offers.WRONG_LEASES and is_first:
            first = replies.pop(0)
            if fault == offers.STRANGER:
                replies.append(replace(first, user=os.urandom(16).hex()))
            elif fault == offers.BEYOND and isinstance(first, wire.Lease):
                replies.append(replace(first, slot=REPORTS))
                offer.beyond = offer.leases.pop(first.lease).lease
                del self.holders[self.people[first.user]]
        if fault == OVER or (fault in offers.WRONG_LEASES and (offer.beyond or not is_first)):
            offer.fault = ""
        shuffle(replies)  # the answer may be in any order
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
            seen = AGAIN if held else f"one that is not on it{self.owner.hiding_mistake(user)}"
            if held and not any(held.lease in each.leases for each in self.offers.values()):
                seen = "one again whose report was refused"
            offer.note("14", f"expected users of the list, each asked once; seen {seen}")
            return wire.Refusal(user, "user-unavailable")
        if offer.fault == offers.SHUT:
            offer.fault = ""
            return wire.Refusal(user, "user-unavailable")
        if not offer.free:
            return wire.Refusal(user, "batch-full")
        slot, end = len(offer.leases) % REPORTS, int(time.time()) + seconds
        lease = wire.Lease(user, slot, os.urandom(wire.LEASE_BYTES).hex(), end)
        offer.leases[lease.lease] = lease
        if seconds >= LEASE_SECONDS:
            self.holders[person] = lease
        return lease

    def _check_upload(self, offer: Offer, request: Request, body: bytes) -> None:
        """Checks headers and time of an upload. Raises RemoteError if it names an old batch key."""
        used = request.headers.get(wire.BATCH_KEY_HEADER)
        if time.monotonic() < offer.busy_until and _is_repeated(offer, body):
            offer.note("13.3", "expected the upload again only after Retry-After: 1; seen before")
        if used not in {key_id(key.public) for key in offer.keys}:
            why = self.owner.key_id_mistake([key.public for key in offer.keys], used or "")
            expected = f"expected the batch key's id in {wire.BATCH_KEY_HEADER}; seen"
            offer.note("13.2", f"{expected} {used}{why}")
        elif used != key_id(offer.keys[-1].public):
            if _is_repeated(offer, body):
                offer.note("13.7", "expected the new key's id after outdated-key; seen the earlier")
            raise RemoteError("outdated-key", "the batch has another key now")

    def _upload(self, offer: Offer, request: Request, body: bytes) -> Response:
        self.changed_at = time.monotonic()
        self._check_upload(offer, request, body)
        if offer.case is None:
            raise RemoteError("late", "the batch is over")
        frames = _frames(offer, body)
        fault, offer.fault = offer.fault, ""
        for lease, report in frames:
            _compare(offer, lease, report)
        if fault == NEW_KEY:
            offers.change_key(offer, self.owner)
            raise RemoteError("outdated-key", "the batch has another key now")
        if fault in offers.WRONG_LEASES:
            offer.note("13.6", f"expected the request again after {fault}; seen an upload")
        offer.busy_until = time.monotonic() + 1.0 if fault == offers.BUSY else 0.0
        offer.unanswered |= fault in {LOST, offers.ZIPPED, *PASSING}
        if fault in PASSING:
            return PASSING[fault]
        if fault == offers.REFUSED:
            offer.leases.pop(frames[0][0], None)
        results = [wire.UploadResult(lease, self._store(offer, lease)) for lease, _ in frames]
        offer.over |= len(offer.reported) == REPORTS and not offer.unanswered
        answer = _as_json(wire.UploadReply(results=tuple(results)))
        if fault == LOST:  # as if the connection broke: the header announces the whole answer
            answer.body = answer.body[: len(answer.body) // 2]
        if fault == offers.ZIPPED:
            return Response(gzip.compress(answer.body), headers={"Content-Encoding": "gzip"})
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
    if wrong := wrong_frames(d, body, offer.leases):
        offer.note("13.7", wrong)
        offer.over = True
        raise RemoteError("wrong-size", wrong)
    leases, sealed = wire.split_frames(body, d.report_bytes)
    return [(lease, bytes(report)) for lease, report in zip(leases, sealed, strict=True)]


def _is_repeated(offer: Offer, body: bytes) -> bool:
    """Returns whether an upload has a report of a lease whose report was sent before."""
    return any(offer.uploads.get(lease) for lease, _ in _frames(offer, body))


def _compare(offer: Offer, lease: str, report: bytes) -> None:
    """Checks that repeated uploads have equal bytes, and that no two leases share a report."""
    if lease not in offer.leases:
        is_reordered = sorted(lease) in map(sorted, offer.leases)
        why = "; a lease of this batch has its bytes in another order" * is_reordered
        why += f"; its slot, {REPORTS}, is not below n (13.6)" * (lease == offer.beyond)
        detail = "expected a frame to begin with the id of a lease of this batch; seen"
        offer.note("13.7", f"{detail} {lease}{why}")
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
    """Offers good and bad batches to the client; yields what the client does right or wrong.

    A bad offer counts as refused if the client looks at it and never takes a slot. The session ends
    when all good batches are over and the client only lists batches for ``grace`` seconds. It also
    ends after ``longest`` seconds, or ``idle`` seconds without lease request or upload.
    """
    end, owner = time.monotonic() + longest, recorder.owner
    good = [offers.good_offer(case, owner) for case in cases]
    recorder.offers = {offer.batch_id: offer for offer in (*bad, *good)}
    while not recorder.is_over():
        now, looks = time.monotonic(), [o.looked_at for o in bad if o.looked_at < math.inf]
        is_quiet = recorder.polls > 1 and now > max(recorder.changed_at, *looks, 0.0) + grace
        if (is_quiet and all(o.over for o in good)) or now > min(end, recorder.changed_at + idle):
            break
        time.sleep(0.05)
    if math.isinf(recorder.changed_at):
        raise LocalError("unavailable", "the client sent no request; did it end? See client.log")
    yield from (Finding(False, "all batches", *each.args) for each in recorder.faults.values())
    refusals = [*map(_refusal, bad)]
    if recorder.is_over() and not all(offer.over for offer in good):
        yield Finding(False, "all batches", "2", "the client ended too early: see client.log")
    taken = {o.case.fault for o in good if o.case and (o.leases or math.isinf(o.looked_at))}
    if taken and taken <= {offers.SPACED, offers.SORTED}:
        detail = f"expected every good batch to be taken; seen only those with {' or '.join(taken)}"
        yield Finding(False, "all batches", "4.1", f"{detail}: are bytes parsed and written again?")
    yield from (each for each in refusals if each.section != "13.5")
    seen, pooled = set[bytes](), dict[str, Test]()
    is_stuck, untried = any(offer.mistakes for offer in good), []
    pairs = zip(cases, good, strict=True)
    for case, offer in sorted(pairs, key=lambda pair: pair[0].fault != offers.LARGE):
        if is_stuck and not (offer.leases or offer.mistakes):
            untried.append(case.name)
            continue
        mistakes = [*offer.mistakes.values(), *_examine(owner, offer, seen, pooled)]
        yield from (Finding(False, case.name, *mistake.args) for mistake in mistakes)
        if not mistakes:
            yield Finding(True, case.name, "5", f"{len(offer.reported)} reports are right")
    wrong = [Finding(False, "all batches", *fault.args) for fault in pooled_faults(pooled)]
    yield from wrong or [Finding(True, "all batches", "6", "all draws are right")] * bool(pooled)
    yield from (each for each in refusals if each.section == "13.5")
    yield from (Finding(False, n, "13", "not tried: mistakes in other batches") for n in untried)


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
    """Yields mistakes in a good batch. For ``seen`` and ``pooled``, see `check_reports`."""
    if offer.unanswered:
        yield MistakeError("13.7", "expected the upload again after no final answer; seen none")
    elif len(offer.reported) < REPORTS and not offer.mistakes:
        detail = f"expected {REPORTS} reports for this good batch; seen {len(offer.reported)}"
        why = "Which check (11) fails? client.log may say it"
        if offer.case and not offer.leases:
            why += "; the bytes are verified as received (4.1)" * (offer.case.fault == BLANKS)
            why += "; check 15 takes each pinned key" * (offer.case.fault == offers.ROTATED)
            why += "; a support may allow more than yours (check 20, 5.4)" * offer.case.support
        if offer.leases:
            why = f"Is one sent in each lease's {LEASE_SECONDS} s, even for a failed episode (6.4)?"
        yield MistakeError("13" if offer.leases else "11", f"{detail}. {why}")
    context = parse(offer.data)
    private = {key.public.hex(): key.private for key in (owner.analyzer, owner.second)}
    analyzer = private[context.descriptor.analyzer_key]
    keys = partial(BatchKeys, context, offer.data, analyzer, earlier=offer.keys[0].private)
    tries = (each for lease, each in offer.uploads.items() if lease in offer.reported)
    reports = [[(keys(key.private), sent) for key, sent in each.items()] for each in tries]
    law = BatchLaw(context.descriptor, test.NEXT, test.REWARDS)
    yield from check_reports(law, reports, seen, pooled)
