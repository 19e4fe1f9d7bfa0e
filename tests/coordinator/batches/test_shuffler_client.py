"""The meaning of each answer of the shuffler, and long answers that break off or hang."""

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.wire import DIGEST_HEADER, SIGNATURE_HEADER
from riffle.coordinator.batches.shuffler_client import ShufflerClient

BATCH = "ab" * 16
HANG_SECONDS = 30
Act = Callable[[ShufflerClient], Awaitable[Any]]
Handler = Callable[[httpx.Request], httpx.Response]


def api_of(handler: Handler) -> ShufflerClient:
    transport, url = httpx.MockTransport(handler), "http://shuffler"
    return ShufflerClient(httpx.AsyncClient(transport=transport, base_url=url))


def ask(handler: Handler, act: Act) -> Any:
    async def whole() -> Any:
        api = api_of(handler)
        try:
            return await act(api)
        finally:
            await api.close()

    return asyncio.run(whole())


def refusal(status: int, slug: str, **headers: str) -> Handler:
    document = {"type": f"urn:riffle:problem:{slug}", "detail": "because"}
    return lambda _: httpx.Response(status, json=document, headers=headers)


def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def garbled(_: httpx.Request) -> httpx.Response:
    """As from a proxy that declares an encoding which the body does not have."""
    stream = httpx.ByteStream(b"no gzip")
    return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=stream)


@pytest.mark.parametrize(
    ("handler", "kind", "slug"),
    [
        (refusal(422, "weak-guarantee"), RemoteError, "weak-guarantee"),
        (refusal(409, "descriptor-conflict"), RemoteError, "descriptor-conflict"),
        (refusal(410, "late"), RemoteError, "late"),
        (refusal(503, "unavailable"), LocalError, "unavailable"),
        (refusal(500, "internal"), LocalError, "unavailable"),
        (refusal(429, "too-many-requests"), LocalError, "unavailable"),
        (refusal(408, "too-slow"), LocalError, "unavailable"),
        (refusal(401, "unauthorized"), LocalError, "unavailable"),
        (unreachable, LocalError, "unavailable"),
        (lambda _: httpx.Response(502, text="<html>"), LocalError, "unavailable"),
        (garbled, LocalError, "unavailable"),
    ],
)
def test_failures_that_may_pass_are_local(
    handler: Handler, kind: type[RiffleError], slug: str
) -> None:
    for act in (
        lambda api: api.deposit(BATCH, b"{}", "00"),
        lambda api: api.status(BATCH, 1.0),
        lambda api: api.messages(BATCH, 10),
        lambda api: api.acknowledge(BATCH, "0" * 64, ()),
        lambda api: api.abandon(BATCH),
    ):
        with pytest.raises(kind) as caught:
            ask(handler, act)
        assert caught.value.slug == slug


ACTS: dict[str, Act] = {
    "deposit": lambda api: api.deposit(BATCH, b"{}", "00"),
    "status": lambda api: api.status(BATCH, 1.0),
    "conservation": lambda api: api.conservation(BATCH),
    "messages": lambda api: api.messages(BATCH, 10),
    "acknowledge": lambda api: api.acknowledge(BATCH, "0" * 64, ()),
    "abandon": lambda api: api.abandon(BATCH),
    "identity": lambda api: api.identity(),
}
HTML = "<html><body>Please log in</body></html>"
WRONG: dict[str, Handler] = {
    "half JSON": lambda _: httpx.Response(200, text='{"batch_id": "abab'),
    "empty": lambda _: httpx.Response(200),
    "no content": lambda _: httpx.Response(204),
    "a page": lambda _: httpx.Response(200, html=HTML),
    "another document": lambda _: httpx.Response(200, json={"status": "ok"}),
    "another batch's status": lambda _: httpx.Response(
        200, json={"batch_id": "cd" * 16, "state": "sealed", "n": 5}
    ),
    "moved": lambda _: httpx.Response(302, headers={"Location": "https://login.example"}),
    "a proxy's 400": lambda _: httpx.Response(400, html=HTML),
    "a proxy's 403": lambda _: httpx.Response(403, html=HTML),
    "a proxy's 404": lambda _: httpx.Response(404, json={"detail": "Not Found"}),
    "a proxy's 502": lambda _: httpx.Response(502, html=HTML),
    "an unknown problem": refusal(404, "something-else"),
    "a problem under another status": refusal(404, "weak-guarantee"),
    "no such route": lambda _: httpx.Response(
        404, json={"type": "urn:riffle:problem:not-found", "detail": "Not Found"}
    ),
    "a long page": lambda _: httpx.Response(200, content=b"x" * (1 << 20)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("act", ACTS)
def test_an_answer_that_is_not_the_shufflers_is_asked_for_again(act: str, wrong: str) -> None:
    with pytest.raises(RiffleError) as caught:
        ask(WRONG[wrong], ACTS[act])
    assert (type(caught.value), caught.value.slug) == (LocalError, "unavailable")


@pytest.mark.parametrize("act", ACTS)
def test_an_answer_takes_no_more_memory_than_it_may(act: str) -> None:
    """Compressed, it would be many times longer than what crossed the network."""
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            assert sent <= 64 << 20
            yield bytes(1 << 20)

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return httpx.Response(200, stream=Pieces(endless()))

    with pytest.raises(LocalError) as caught:
        ask(handler, ACTS[act])
    assert caught.value.slug == "unavailable"


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(("said", "kept"), [("7", 7), ("99999", 300), ("soon", None)])
def test_retry_after_is_kept_within_reason(said: str, kept: int | None) -> None:
    with pytest.raises(LocalError) as caught:
        ask(
            refusal(429, "too-many-requests", **{"Retry-After": said}),
            lambda api: api.status(BATCH, 0),
        )
    assert caught.value.retry_after == kept


def test_a_deposit_sends_exact_bytes_and_signature() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = {
            "descriptor": '{"a": 1}',
            "coordinator_signature": "0" * 128,
            "batch_key": "0" * 64,
            "shuffler_signature": "0" * 128,
        }
        return httpx.Response(201, json=answer)

    ask(handler, lambda api: api.deposit(BATCH, b'{"a": 1}', "0f"))
    assert (seen[0].method, seen[0].url.path) == ("PUT", f"/v1/batches/{BATCH}")
    assert seen[0].content == b'{"a": 1}'
    assert seen[0].headers[SIGNATURE_HEADER] == "0f"


def answering(data: bytes, digest: str) -> Handler:
    return lambda _: httpx.Response(200, content=data, headers={DIGEST_HEADER: digest})


def test_messages_are_checked_against_their_digest() -> None:
    digest = hashlib.sha256(b"sealed").hexdigest()
    result = ask(answering(b"sealed", digest), lambda api: api.messages(BATCH, 6))
    assert (result.data, result.sha256) == (b"sealed", digest)
    for data in (b"sEaled", b"seale", b""):
        with pytest.raises(LocalError, match="incomplete or changed"):
            ask(answering(data, digest), lambda api: api.messages(BATCH, 6))
    with pytest.raises(LocalError, match="more than 5 bytes"):
        ask(answering(b"sealed", digest), lambda api: api.messages(BATCH, 5))


def test_a_cancelled_wait_for_messages_ends_at_once() -> None:
    read: list[bytes] = []

    async def whole() -> None:
        called, answered = asyncio.Event(), asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            for piece in (b"se", b"al", b"ed"):
                read.append(piece)
                yield piece
                called.set()
                await answered.wait()

        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))
        api = ShufflerClient(httpx.AsyncClient(transport=transport, base_url="http://shuffler"))
        task = asyncio.create_task(api.messages(BATCH, 6))
        await called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await api.close()

    asyncio.run(whole())
    assert read == [b"se"]


@contextmanager
def answered_with(head: bytes, *, hang: bool) -> Iterator[tuple[str, threading.Event]]:
    """Yields the address of a service that answers ``head`` only, and whether it was called."""
    called, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head)
                called.set()
                if hang:
                    over.wait(HANG_SECONDS)

        answering = threading.Thread(target=answer)
        answering.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", called
        over.set()
        answering.join()


HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsea"


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", HALF])
def test_a_shuffler_that_hangs_does_not_hold_a_cancelled_call(head: bytes) -> None:
    """Its thread ends as well; otherwise the coordinator could not stop."""

    async def whole(url: str, called: threading.Event) -> float:
        api = ShufflerClient.connect(url, "token", verify=False)
        task = asyncio.create_task(api.messages(BATCH, 6))
        await asyncio.to_thread(called.wait, 10)
        await asyncio.sleep(0.1)
        task.cancel()
        cancelled_at = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.get_running_loop().shutdown_default_executor()
        await api.close()
        return time.monotonic() - cancelled_at

    with answered_with(head, hang=True) as (url, called):
        assert asyncio.run(whole(url, called)) < HANG_SECONDS


@pytest.mark.parametrize(
    ("head", "trouble"),
    [
        (b"", "does not answer"),
        (b"nonsense\r\n\r\n", "does not answer"),
        (HALF, "does not answer"),
        (b"HTTP/1.1 503 No\r\n\r\n", "not the shuffler"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx", "does not answer"),
    ],
)
def test_an_answer_that_breaks_off_is_asked_for_again(head: bytes, trouble: str) -> None:
    async def whole(url: str) -> None:
        api = ShufflerClient.connect(url, "token", verify=False)
        try:
            await api.messages(BATCH, 6)
        finally:
            await api.close()

    breaks_off = answered_with(head, hang=False)
    with breaks_off as (url, _), pytest.raises(LocalError, match=trouble) as caught:
        asyncio.run(whole(url))
    assert caught.value.slug == "unavailable"
    with pytest.raises(LocalError, match="does not answer"):  # nobody listens there any more
        asyncio.run(whole(url))


def test_a_status_may_have_few_fields() -> None:
    body = {"batch_id": BATCH, "state": "open", "n": 5}
    unsaid = dict.fromkeys(("reports", "leased", "episodes", "dropped"))
    for answer in (body, {**body, **unsaid}):
        handler = answering(json.dumps(answer).encode(), "")
        status = ask(handler, lambda api: api.status(BATCH, 0))
        assert (status.state, status.n, status.episodes) == ("open", 5, None)


def test_proxies_of_the_environment_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def mounts() -> list[object]:
        api = ShufflerClient.connect("http://shuffler", "token", verify=False)
        try:
            return [mount for mount in api._client._mounts.values() if mount is not None]
        finally:
            await api.close()

    assert asyncio.run(mounts()) == []
