"""``riffle conformance``: offers batches to a client on loopback, and names its mistakes.

`Bench` is a shuffler that keeps every byte. It serves the routes of nodes and answers as the
shuffler does, but it also serves descriptors that no shuffler would countersign, loses an answer,
or changes a batch's key. `examine` compares what it got with docs/protocol.md.
"""

import asyncio
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import Context, Document, first_fault, key_id, parse
from riffle.common.protocol.errors import MEDIA_TYPE, RemoteError
from riffle.common.protocol.hpke import KeyPair
from riffle.deploy import offers
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.network.loopback import free_port
from riffle.deploy.offers import FAULTS, REPORTS, Case, Offer
from riffle.deploy.report_check import (
    BatchKeys,
    BatchLaw,
    Finding,
    MistakeError,
    OpenReport,
    Test,
    read_report,
    wrong_size,
)

LOST, BUSY, NEW_KEY, OVER = FAULTS
LEASE_SECONDS = 120
NODE_ID = "c0" * 16
ZERO = "checks"


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
    context: Context | None
    key: KeyPair
    slots: dict[str, Slot] = field(default_factory=dict)
    mistakes: dict[str, MistakeError] = field(default_factory=dict)
    looked_at: float = math.inf
    fault: str = ""
    replayed: bool = False
    over: bool = False

    @property
    def free(self) -> list[int]:
        """The numbers of slots that nobody holds."""
        now = time.time()
        held = {s.number for s in self.slots.values() if s.reported or s.expires_at > now}
        return [number for number in range(REPORTS) if number not in held]

    @property
    def reports(self) -> list[Slot]:
        """The slots that have a report."""
        return [slot for slot in self.slots.values() if slot.reported]

    @property
    def done(self) -> bool:
        """Whether nothing more is expected."""
        return self.over or (
            len(self.reports) == REPORTS
            and (self.offer.case is None or self.replayed or self.offer.case.fault != LOST)
        )

    def note(self, topic: str, detail: str) -> None:
        """Records a mistake once."""
        self.mistakes.setdefault(detail, MistakeError(topic, detail))


Handler = Callable[["Bench", Request, Served], Awaitable[Document | Response]]


class Bench:
    """The shuffler that a client talks to; ``users`` are the people that its node may ask."""

    def __init__(self, keys: offers.Keys, token: str, users: Sequence[str]) -> None:
        self.keys, self.token, self.users = keys, token, frozenset(users)
        self.served: dict[str, Served] = {}
        self.holders: dict[str, str] = {}
        self.mistakes: dict[str, MistakeError] = {}
        self.changed_at = math.inf
        self._turn = 0

    def offer(self, offer: Offer) -> Served:
        """Lists an offer."""
        context = parse(offer.signed.descriptor.encode()) if offer.case else None
        fault = offer.case.fault if offer.case else ""
        served = Served(offer, context, offer.batch_key, fault=fault)
        self.served = {**self.served, offer.batch_id: served}
        return served

    def app(self) -> Starlette:
        """Returns the routes of nodes."""
        batch = "/v1/batches/{id}"
        return Starlette(
            routes=[
                Route("/v1/identity", self._identity),
                Route("/v1/batches", self._batches),
                Route(batch, self._on_batch(Bench._descriptor)),
                Route(f"{batch}/leases", self._on_batch(Bench._lease), methods=["POST"]),
                Route(f"{batch}/declined", self._on_batch(Bench._decline), methods=["POST"]),
                Route(f"{batch}/reports", self._on_batch(Bench._upload), methods=["POST"]),
            ]
        )

    def _on_batch(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                self._authenticate(request)
                served = self.served.get(request.path_params["id"])
                if served is None:
                    raise RemoteError("unknown-batch", "no batch has this id here")
                result = await handler(self, request, served)
            except RemoteError as error:
                return _problem(error)
            return result if isinstance(result, Response) else _document(result)

        return answer

    def _authenticate(self, request: Request) -> None:
        self.changed_at = min(self.changed_at, time.monotonic())
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            detail = "expected the header 'Authorization: Bearer TOKEN' with the node's token"
            self.mistakes.setdefault(detail, MistakeError("tokens", f"{detail}; seen another"))
            raise RemoteError("unauthorized", "this token is not valid here")

    async def _identity(self, _: Request) -> Response:
        public = offers.public(self.keys.shuffler).hex()
        return _document(wire.ShufflerIdentity(shuffler_id=offers.SHUFFLER_ID, public_key=public))

    async def _batches(self, request: Request) -> Response:
        """Lists open batches, each time beginning with another one."""
        try:
            self._authenticate(request)
        except RemoteError as error:
            return _problem(error)
        end = time.monotonic() + float(request.query_params.get("wait", 0))
        while not (listed := self._listed()) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._turn += 1
        turn = self._turn % max(1, len(listed))
        return _document(
            wire.OpenBatches(
                batches=tuple(
                    wire.OpenBatch(batch_id=s.offer.batch_id, free_slots=REPORTS)
                    for s in listed[turn:] + listed[:turn]
                ),
                lease_seconds=LEASE_SECONDS,
            )
        )

    def _listed(self) -> list[Served]:
        return [s for s in self.served.values() if not s.over and s.free]

    async def _descriptor(self, _: Request, served: Served) -> Document:
        served.looked_at = min(served.looked_at, time.monotonic())
        return (
            served.offer.signed.model_copy(
                update=offers.sign(
                    served.offer.signed.descriptor.encode(), self.keys, served.key.public
                ).model_dump()
            )
            if served.key is not served.offer.batch_key
            else served.offer.signed
        )

    async def _decline(self, request: Request, served: Served) -> Document:
        return await _read(wire.DeclineNotice, request, served)

    async def _lease(self, request: Request, served: Served) -> Document:
        wanted = await _read(wire.LeaseRequest, request, served)
        if served.offer.fault:
            served.over = True
            served.note("checks", f"it asked for slots of a batch although {served.offer.fault}")
        if len(set(wanted.users)) < len(wanted.users):
            served.note("users", "expected each user once in a request; seen one twice")
        leases, refused = [], []
        ends = int(time.time()) + (-1 if served.fault == OVER else LEASE_SECONDS)
        for user in wanted.users:
            problem = self._refusal(user, served)
            if problem:
                refused.append(wire.Refusal(user, problem))
            else:
                lease = self._grant(user, served, ends)
                slot = served.slots[lease]
                leases.append(wire.Lease(user, slot.number, lease, slot.expires_at))
        if served.fault == OVER:
            served.fault = ""
        self.changed_at = time.monotonic()
        return wire.LeaseReply(leases=tuple(leases), refused=tuple(refused))

    def _refusal(self, user: str, served: Served) -> str | None:
        if user not in self.users:
            served.note("users", f"expected a user of the list; seen {user}")
            return "user-unavailable"
        held = self.holders.get(user)
        if held is not None and held in served.slots and not served.slots[held].reported:
            return None
        if held is not None:
            served.note("users", "it asked a user again who reported, or may be running elsewhere")
            return "user-unavailable"
        return None if not served.over and served.free else "batch-full"

    def _grant(self, user: str, served: Served, ends: int) -> str:
        held = self.holders.get(user)
        if held is not None and served.slots[held].expires_at > time.time():
            return held
        lease = os.urandom(wire.LEASE_BYTES).hex()
        served.slots[lease] = Slot(user, served.free[0], ends)
        if ends > time.time():
            self.holders[user] = lease
        return lease

    async def _upload(self, request: Request, served: Served) -> Document | Response:
        self._check_key(request.headers.get(wire.BATCH_KEY_HEADER), served)
        body, context = await request.body(), served.context
        self.changed_at = time.monotonic()
        if context is None:
            raise RemoteError("late", "the batch is over")
        report_bytes = context.descriptor.report_bytes
        try:
            leases, sealed = wire.split_frames(body, report_bytes)
        except RemoteError:
            held = len([s for s in served.slots.values() if not s.reported]) or 1
            size = len(body) // (held if len(body) % held == 0 else 1) - wire.LEASE_BYTES
            served.note("frames", wrong_size(context.descriptor, size))
            served.over = True
            raise
        fault, served.fault = served.fault, ""
        for lease, report in zip(leases, sealed, strict=True):
            self._compare(served, lease, bytes(report))
        if fault == NEW_KEY:
            served.key = KeyPair.generate()
            raise RemoteError("outdated-key", "the batch has another key now: fetch its descriptor")
        if fault == BUSY:
            return _problem(RemoteError("unavailable", "try again"), {"Retry-After": "1"})
        results = [wire.UploadResult(lease, self._store(served, lease)) for lease in leases]
        answer = wire.UploadReply(results=tuple(results))
        return _half(answer) if fault == LOST else answer

    def _check_key(self, used: str | None, served: Served) -> None:
        known = {key_id(key.public) for key in (served.offer.batch_key, served.key)}
        if used not in known:
            name = wire.BATCH_KEY_HEADER
            served.note("headers", f"expected the batch key's id in {name}; seen {used}")
        if used not in (None, key_id(served.key.public)) and used in known:
            raise RemoteError("outdated-key", "the batch has another key now: fetch its descriptor")

    def _compare(self, served: Served, lease: str, report: bytes) -> None:
        """Compares a report with those that were sent before."""
        slot = served.slots.get(lease)
        if slot is None:
            served.note("frames", "expected the id of a lease of this batch; seen another")
            return
        for key, earlier in slot.tries:
            if key is served.key and earlier != report:
                detail = "expected the same bytes when an upload is repeated; seen others"
                served.note("retries", detail)
            served.replayed |= key is served.key and earlier == report
        slot.tries.append((served.key, report))
        if any(s is not slot and (served.key, report) in s.tries for s in served.slots.values()):
            served.note("uniqueness", "the same sealed report was uploaded for two slots")

    def _store(self, served: Served, lease: str) -> str:
        slot = served.slots.get(lease)
        if slot is None:
            return "unknown-lease"
        if slot.reported:
            return "replayed"
        if slot.expires_at <= time.time():
            served.note("leases", "expected no report after its lease's end; seen one")
            return "late"
        slot.reported = True
        return "accepted"


async def _read(model: type[Any], request: Request, served: Served) -> Any:  # noqa: ANN401
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        served.note("documents", f"expected a {model.__name__}; seen {first_fault(error)}")
        raise RemoteError("malformed", first_fault(error)) from error


def _document(document: Document) -> Response:
    return Response(document.model_dump_json(), media_type="application/json")


def _problem(error: RemoteError, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(error.document(), error.status, headers, media_type=MEDIA_TYPE)


def _half(document: Document) -> Response:
    """Returns an answer that ends too early, as if the connection broke."""
    text = document.model_dump_json().encode()

    async def half() -> AsyncIterator[bytes]:
        yield text[: len(text) // 2]

    headers = {"Content-Length": str(len(text))}
    return StreamingResponse(half(), headers=headers, media_type="application/json")


# ---- a session ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: how long a client may think about a bad offer before it counts as refused, how long
    it may do nothing, and how long a session lasts at most."""

    grace: float = 3.0
    idle: float = 30.0
    all: float = 900.0


@contextmanager
def serving(bench: Bench) -> Iterator[str]:
    """Serves a bench on a free port of loopback; yields its URL."""
    port = free_port()
    config = uvicorn.Config(
        bench.app(), host=LOOPBACK, port=port, log_config=None, log_level="critical"
    )
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
    bench: Bench, cases: Sequence[Case], bad: Sequence[Offer], limits: Limits
) -> Iterator[Finding]:
    """Offers everything to the client; yields what is right and what is wrong, step by step."""
    end = time.monotonic() + limits.all
    offered = [bench.offer(offer) for offer in bad]
    good = [bench.offer(offers.good_offer(cases[0], bench.keys))]

    def refused(served: Served) -> bool:
        served.over |= time.monotonic() > served.looked_at + limits.grace
        return served.over

    _wait(bench, lambda: all([refused(s) for s in offered]), limits, end)
    yield from (_refusal(served) for served in offered)
    good += [bench.offer(offers.good_offer(case, bench.keys)) for case in cases[1:]]
    _wait(bench, lambda: all(s.done for s in good), limits, end)
    yield from examine(bench, good)


def _wait(bench: Bench, done: Callable[[], bool], limits: Limits, end: float) -> None:
    while not done() and time.monotonic() < min(end, bench.changed_at + limits.idle):
        time.sleep(0.05)


def _refusal(served: Served) -> Finding:
    fault = served.offer.fault
    for mistake in served.mistakes.values():
        return _found(fault, mistake)
    if math.isinf(served.looked_at):
        detail = (
            f"expected the descriptor to be fetched and refused, since {fault}; seen no request"
        )
        return _found(fault, MistakeError("checks", detail))
    return Finding(True, fault, "checks", "refused")


def _found(step: str, mistake: MistakeError) -> Finding:
    return Finding(False, step, mistake.topic, mistake.detail)


def examine(bench: Bench, good: Sequence[Served]) -> Iterator[Finding]:
    """Yields the findings about good batches, and about all of them together."""
    seen: set[bytes] = set()
    pooled: dict[str, Test] = {}
    for served in good:
        case = served.offer.case
        name = case.name if case else ""
        mistakes = [*served.mistakes.values(), *_of_batch(bench, served, seen, pooled)]
        yield from (_found(name, mistake) for mistake in mistakes)
        if not mistakes:
            yield Finding(True, name, "reports", f"{len(served.reports)} reports are right")
    mistakes = [*bench.mistakes.values(), *(t.fault for t in pooled.values())]
    faults = [mistake for mistake in mistakes if mistake is not None]
    yield from (_found("all batches", mistake) for mistake in faults)
    if not faults:
        detail = "policies are drawn by their weights, and rewards by their means"
        yield Finding(True, "all batches", "mixture", detail)


def _of_batch(
    bench: Bench, served: Served, seen: set[bytes], pooled: dict[str, Test]
) -> Iterator[MistakeError]:
    context, reports = served.context, served.reports
    if context is None:
        return
    if len(reports) < REPORTS and not served.mistakes:
        detail = f"expected {REPORTS} reports for this good batch; seen {len(reports)}"
        yield MistakeError("checks" if not served.slots else "leases", detail)
    if served.offer.case and served.offer.case.fault == LOST and not served.replayed:
        yield MistakeError(
            "retries", "expected the same upload again after a lost answer; seen none"
        )
    opened, wrong = [], Counter[tuple[str, str]]()
    for slot in reports:
        try:
            opened.append(_open(bench, served, slot, seen))
        except MistakeError as mistake:
            wrong[mistake.topic, mistake.detail] += 1
    for (topic, detail), count in wrong.most_common(3):
        yield MistakeError(topic, f"{count} of {len(reports)} reports: {detail}")
    if len(opened) < REPORTS:
        return
    counts = np.stack([report.counts for report in opened])
    law = BatchLaw(context.descriptor, *offers.paths())
    certain = list(law.check(counts))
    yield from certain
    copies = law.noise_copies(counts)
    if len(fresh := set(copies) - seen) < len(copies):
        detail = "expected fresh noise in every report; seen the same noise in several"
        yield MistakeError("noise", detail)
    seen |= fresh
    faults = []
    for test in () if certain else law.tests(counts):
        if test.topic in {"mixture", "rewards"}:
            pooled[test.name] = pooled[test.name] + test if test.name in pooled else test
        elif fault := test.fault:
            faults.append((test.observed > 0, fault))
    # One lack of noise fails many tests: the first says how much, and an empty group says where.
    yield from (fault for _, fault in faults[:1])
    yield from [fault for some, fault in faults[1:] if not some][:1]


def _open(bench: Bench, served: Served, slot: Slot, seen: set[bytes]) -> OpenReport:
    """Opens every try of a report; raises MistakeError if they differ, or a key was used before."""
    context = served.context
    assert context is not None  # noqa: S101
    data, analyzer = served.offer.signed.descriptor.encode(), bench.keys.analyzer.private
    tries = dict(slot.tries)
    found = [
        read_report(BatchKeys(context, data, analyzer, k.private), s) for k, s in tries.items()
    ]
    if any((report.counts != found[-1].counts).any() for report in found):
        detail = "expected the same messages, sealed to the new key; seen other messages"
        raise MistakeError("retries", detail)
    fresh = {key for report in found for key in report.ephemeral}
    if fresh & seen or len(set(found[-1].ephemeral)) < len(found[-1].ephemeral):
        raise MistakeError(
            "uniqueness", "expected a new ephemeral key in every seal; seen one twice"
        )
    seen |= fresh
    return found[-1]


def write_settings(
    folder: Path, url: str, bench: Bench, trust: Sequence[str], aggregations: Sequence[str]
) -> dict[str, Any]:
    """Writes what a client needs to ``settings.json``; for Riffle's own node also ``node.env``.

    Returns the settings.
    """
    keys = bench.keys
    analyzer = keys.analyzer.public.hex()
    settings: dict[str, Any] = {
        "shuffler_url": url,
        "shuffler_id": offers.SHUFFLER_ID,
        "shuffler_key": offers.public(keys.shuffler).hex(),
        "coordinator_key": offers.public(keys.coordinator).hex(),
        "environment": offers.ENVIRONMENT,
        "max_epsilon": offers.EPSILON,
        "max_beta": offers.BETA,
        "min_dishonest_fraction": offers.OWNER_GAMMA,
        "max_owner_share": offers.GAMMA,
        "max_batch_seconds": offers.LONGEST_SECONDS,
        "trust_models": list(trust),
        "aggregations": list(aggregations),
    }
    files = {
        "environment.json": offers.environment(),
        "users.json": {NODE_ID: sorted(bench.users)},
        "credentials.json": [{"node_id": NODE_ID, "token": bench.token}],
    }
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "analyzer_keys").write_text(analyzer + "\n")
    own = settings | {
        "analyzer_keys_file": folder / "analyzer_keys",
        "users_file": folder / "users.json",
        "credentials_file": folder / "credentials.json",
        "state_dir": folder / "state",
        "environment_parameters": {"path": str(folder / "environment.json")},
    }
    lines = (
        f"RIFFLE_NODE_{k.upper()}={json.dumps(v) if isinstance(v, list | dict) else v}\n"
        for k, v in own.items()
    )
    (folder / "node.env").write_text("".join(lines))
    whole = settings | {"analyzer_keys": [analyzer], "node_token": bench.token}
    whole |= {"files": {name.partition(".")[0]: str(folder / name) for name in files}}
    (folder / "settings.json").write_text(json.dumps(whole, indent=2) + "\n")
    return whole
