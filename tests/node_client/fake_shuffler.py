"""A shuffler in memory, with faults on demand, for the node's tests.

It keeps the protocol's rules (leases, one report a user, both seals, sizes), and counts what the
analyzer would count when a batch is full. ``faults`` is a list of what happens to the next
requests: "lost" (done, but the answer is lost), "refused" (no connection), "503", "429", "408",
"garbage" (done, but the answer is not a document), "" (nothing).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from riffle.common.protocol.descriptor import BatchDescriptor, Context, SignedDescriptor, parse
from riffle.common.protocol.errors import MEDIA_TYPE, RemoteError
from riffle.common.protocol.hpke import KeyPair, OpenError, open_histogram, open_sealed
from riffle.common.protocol.signatures import key_id
from riffle.common.protocol.wire import BATCH_KEY_HEADER, split_frames
from tests.node_client import world


@dataclass
class FakeBatch:
    signed: SignedDescriptor
    context: Context
    key: KeyPair = world.BATCH
    leases: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    reports: dict[str, bytes] = field(default_factory=dict)

    @property
    def descriptor(self) -> BatchDescriptor:
        return self.context.descriptor

    @property
    def free(self) -> int:
        return self.descriptor.n - len(self.leases)

    def free_slot(self) -> int:
        return min(set(range(self.descriptor.n)) - {slot for _, slot, _ in self.leases.values()})

    def end_leases(self, now: float) -> None:
        """Gives the slots of expired leases out again."""
        for lease in [key for key, end in self.ends.items() if end <= now]:
            if lease not in self.reports:
                self.leases.pop(lease, None)

    def lease_of(self, user: str) -> dict[str, str | int] | None:
        """Returns the lease of a user who has not reported, for a repeated request."""
        for lease, (holder, slot, _) in self.leases.items():
            if holder == user and lease not in self.reports:
                return {"user": user, "slot": slot, "lease": lease}
        return None

    def counts(self) -> tuple[np.typing.NDArray[np.int64], list[int]]:
        """Returns the analyzer's counts: histogram with dummies last, and failed messages."""
        layout = self.descriptor.layout
        inner = b"".join(
            open_sealed(self.key.private, self.context.report_info, sealed)
            for sealed in self.reports.values()
        )
        return open_histogram(
            world.ANALYZER.private, self.context.message_info, inner, layout.width, layout.counters
        )


@dataclass
class FakeShuffler:
    tokens: dict[str, str]
    batches: dict[str, FakeBatch] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    faulty: str = "/reports"
    quota: int | None = None
    share: int | None = None
    lease_ends: int | None = None
    lease_seconds: int = 120
    lose_leases: bool = False
    clock: Callable[[], float] = lambda: world.NOW
    polled: Callable[[], None] = lambda: None
    declined: list[str] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    served: dict[str, set[str]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    uploads: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deposit(self, signed: SignedDescriptor) -> FakeBatch:
        batch = FakeBatch(signed, parse(signed.descriptor.encode()))
        self.batches[batch.descriptor.batch_id] = batch
        return batch

    def rekey(self, batch: FakeBatch) -> None:
        """Acts as a shuffler with a new store: the same descriptor, another batch key."""
        batch.key = KeyPair.generate()
        data = batch.signed.descriptor.encode()
        batch.signed = world.sign(data, batch_key=batch.key.public)

    def client(self) -> httpx.AsyncClient:
        app = Starlette(
            routes=[
                Route("/v1/batches", self.open_batches),
                Route("/v1/batches/{id}", self.descriptor),
                Route("/v1/batches/{id}/leases", self.lease, methods=["POST"]),
                Route("/v1/batches/{id}/reports", self.reports, methods=["POST"]),
                Route("/v1/batches/{id}/declined", self.decline, methods=["POST"]),
            ]
        )
        transport = FaultyTransport(httpx.ASGITransport(app), self)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def full(self) -> bool:
        return all(len(batch.reports) == batch.descriptor.n for batch in self.batches.values())

    async def open_batches(self, request: Request) -> Response:
        self._node(request)
        self.polled()
        for batch in self.batches.values():
            batch.end_leases(self.clock())
        listed = [b for b in self.batches.values() if b.free > 0]
        if not listed:
            await asyncio.sleep(0.02)
        rows = [{"batch_id": b.descriptor.batch_id, "free_slots": b.free} for b in listed]
        return JSONResponse({"batches": rows, "lease_seconds": self.lease_seconds})

    async def descriptor(self, request: Request) -> Response:
        self._node(request)
        batch = self.batches.get(request.path_params["id"])
        if batch is None:
            error = RemoteError("unknown-batch", "no such batch")
            return JSONResponse(error.document(), error.status, media_type=MEDIA_TYPE)
        return Response(batch.signed.model_dump_json(), media_type="application/json")

    async def lease(self, request: Request) -> Response:
        node = self._node(request)
        batch = self.batches[request.path_params["id"]]
        granted, refused = [], []
        batch.end_leases(self.clock())
        seconds = self.lease_seconds + (batch.descriptor.episode_seconds or 0)
        ends = self.lease_ends or int(self.clock()) + seconds
        for user in json.loads(await request.body())["users"]:
            if kept := batch.lease_of(user):
                granted.append(kept | {"expires_at": ends})
                continue
            problem = self._refusal(node, batch, user)
            if problem is not None:
                refused.append({"user": user, "problem": problem})
                continue
            lease = f"{len(batch.ends):032x}"
            batch.leases[lease], batch.ends[lease] = (user, batch.free_slot(), node), ends
            self.served.setdefault(node, set()).add(user)
            entry = {"user": user, "slot": batch.leases[lease][1], "lease": lease}
            granted.append(entry | {"expires_at": ends})
        return JSONResponse({"leases": granted, "refused": refused})

    async def decline(self, request: Request) -> Response:
        self._node(request)
        notice = json.loads(await request.body())
        self.declined.append(notice["reason"])
        return JSONResponse(notice)

    async def reports(self, request: Request) -> Response:
        self._node(request)
        batch = self.batches[request.path_params["id"]]
        if request.headers[BATCH_KEY_HEADER] != key_id(batch.key.public):
            error = RemoteError("outdated-key", "another key")
            return JSONResponse(error.document(), error.status, media_type=MEDIA_TYPE)
        body = await request.body()
        self.uploads.append(body)
        try:
            leases, reports = split_frames(body, batch.descriptor.report_bytes)
            results = [
                {"lease": lease, "outcome": self._store(batch, lease, bytes(sealed))}
                for lease, sealed in zip(leases, reports, strict=True)
            ]
        except RemoteError as error:
            return JSONResponse(error.document(), error.status, media_type=MEDIA_TYPE)
        if self.full():
            self.changed.set()
        return JSONResponse({"results": results})

    def _node(self, request: Request) -> str:
        return self.tokens[request.headers["Authorization"].removeprefix("Bearer ")]

    def _refusal(self, node: str, batch: FakeBatch, user: str) -> str | None:
        known = self.served.get(node, set())
        if user in self.reported | self.elsewhere:
            return "user-unavailable"
        if self.quota is not None and user not in known and len(known) >= self.quota:
            return "quota-exceeded"
        held = [holder for _, _, holder in batch.leases.values()].count(node)
        if self.share is not None and held >= self.share:
            return "share-exceeded"
        return "batch-full" if batch.free == 0 else None

    def _store(self, batch: FakeBatch, lease: str, sealed: bytes) -> str:
        if self.lose_leases:
            return "late"
        batch.end_leases(self.clock())
        if lease not in batch.leases:
            return "late" if lease in batch.ends else "unknown-lease"
        if lease in batch.reports:
            return "replayed" if batch.reports[lease] == sealed else "already-reported"
        try:
            open_sealed(batch.key.private, batch.context.report_info, sealed)
        except OpenError:
            return "wrong-key"
        batch.reports[lease] = sealed
        self.reported.add(batch.leases[lease][0])
        return "accepted"


PAGE = b"<!doctype html><title>Maintenance</title>"
REFUSAL = RemoteError("not-found", HTTPStatus.NOT_FOUND.phrase).document()
FOREIGN: dict[str, tuple[int, bytes | None]] = {
    "half": (200, None),
    "empty": (200, b""),
    "page": (200, PAGE),
    "list": (200, b"[]"),
    "redirection": (302, b""),
    **{f"page {status}": (status, PAGE) for status in (400, 401, 403, 404, 409, 410, 422, 500)},
    "another service": (404, json.dumps(REFUSAL).encode()),
    "half a refusal": (410, json.dumps(REFUSAL).encode()[:40]),
    "a refusal under another status": (410, json.dumps(REFUSAL).encode()),
}
"""Answers of whatever stands between node and shuffler."""


class FaultyTransport(httpx.AsyncBaseTransport):
    """Passes requests on, or applies the next of ``faults`` to them."""

    def __init__(self, inner: httpx.AsyncBaseTransport, shuffler: FakeShuffler) -> None:
        self._inner = inner
        self._shuffler = shuffler

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        shuffler = self._shuffler
        kind = request.url.path.rpartition("/")[2]
        shuffler.requests[
            kind if kind in {"leases", "reports", "batches", "declined"} else "descriptor"
        ] += 1
        token = request.headers["Authorization"].removeprefix("Bearer ")
        if token not in shuffler.tokens:
            document = RemoteError("unauthorized", "no such node").document()
            return httpx.Response(401, json=document, request=request)
        faulty = shuffler.faults and request.url.path.endswith(shuffler.faulty)
        fault = shuffler.faults.pop(0) if faulty else ""
        if fault == "refused":
            raise httpx.ConnectError("no", request=request)
        if fault in {"503", "429", "408"}:
            return httpx.Response(int(fault), headers={"Retry-After": "0"}, request=request)
        response = await self._inner.handle_async_request(request)
        if fault == "lost":
            raise httpx.ReadTimeout("lost", request=request)
        if fault in FOREIGN:
            body = await response.aread()
            status, content = FOREIGN[fault]
            return httpx.Response(
                status, content=body[: len(body) // 2] if content is None else content
            )
        return httpx.Response(200, text="garbage", request=request) if fault else response
