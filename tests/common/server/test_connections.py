"""Connections of strangers: heads have a size and a deadline, and the connections a number."""

import asyncio
import json
import os
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from riffle.common.server.connections import make_server
from riffle.common.server.settings import ServerSettings, Tls
from tests.common.server.test_serve import free_port, served, tls

__all__ = ["tls"]  # a fixture

REQUEST = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n"
LARGE = 300_000
SECONDS = 30
PAGE = os.sysconf("SC_PAGE_SIZE")


class Stranger:
    """A connection without a token."""

    def __init__(self, port: int, tls: Tls | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        if tls is not None:
            context = ssl.create_default_context(cafile=tls.key.with_name("ca.pem"))
            self.socket = context.wrap_socket(self.socket, server_hostname="server")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> bytes:
        """Returns all that comes until the service closes the connection."""
        parts = []
        while part := self.socket.recv(65_536):
            parts.append(part)
        return b"".join(parts)

    def one_answer(self) -> bytes:
        answer = b""
        while not answer.endswith(b'"yes"'):  # head and body may come apart
            part = self.socket.recv(65_536)
            assert part, "the connection was closed"
            answer += part
        return answer

    def is_closed(self) -> bool:
        """Returns whether the service has closed it; waits for it a while."""
        try:
            return self.socket.recv(65_536) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


@contextmanager
def strangers(port: int, number: int, data: bytes = b"") -> Iterator[list[Stranger]]:
    with ExitStack() as closing:
        opened = [Stranger(port) for _ in range(number)]
        for each in opened:
            closing.callback(each.socket.close)
            each.send(data)
        yield opened


def problem(answer: bytes) -> str:
    """Returns the slug of a problem document with its own status."""
    head, _, body = answer.partition(b"\r\n\r\n")
    document = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % document["status"]), head
    assert b"application/problem+json" in head
    return str(document["type"].rpartition(":")[2])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    with served("127.0.0.1", port, head_seconds=2, max_waiting_connections=8):
        yield port


@pytest.mark.parametrize(
    "data",
    [
        HALF + b"x: y\r\n" * (LARGE // 6),
        HALF + b"x: " + b"y" * LARGE,
        HALF + b"x" * LARGE,
        HALF + b"x: " + b"y" * LARGE + b"\r\n\r\n",
        b"GET /" + b"x" * LARGE,
        b"G" * LARGE,
        b"\r\n" * LARGE,
    ],
    ids=["lines", "value", "name", "whole", "url", "method", "blanks"],
)
def test_a_head_has_a_largest_size(port: int, data: bytes) -> None:
    with strangers(port, 1) as (stranger,):
        try:
            stranger.send(data)
            answer = stranger.answer()
        except (ConnectionError, TimeoutError) as error:
            pytest.fail(f"no answer: {error!r}")
        assert problem(answer) in {"head-too-large", "malformed"}


@pytest.mark.parametrize("rest", [b"1;" + b"x" * LARGE, b"0\r\nx: " + b"y" * LARGE])
def test_headers_within_and_after_a_body_have_a_largest_size(port: int, rest: bytes) -> None:
    head = b"POST /body HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with strangers(port, 1, head) as (stranger,), suppress(ConnectionError):
        stranger.send(rest)
        assert stranger.is_closed(), "the service reads on"


@pytest.mark.parametrize("data", [HALF, b"G", b"\r\n"])
@pytest.mark.parametrize("before", [b"", REQUEST])
def test_a_head_has_a_deadline(port: int, before: bytes, data: bytes) -> None:
    with strangers(port, 1, before) as (stranger,):
        if before:
            stranger.one_answer()
        stranger.send(data)
        try:
            assert problem(stranger.answer()) == "too-slow"
        except TimeoutError:
            pytest.fail("the service still waits for the head")


@pytest.mark.parametrize("before", [b"", REQUEST])
def test_a_head_that_goes_on_has_a_deadline(port: int, before: bytes) -> None:
    with strangers(port, 1, before) as (stranger,):
        if before:
            stranger.one_answer()
        stranger.send(HALF)
        for _ in range(100):  # 20 seconds
            if select.select([stranger.socket], [], [], 0.2)[0]:
                break
            stranger.send(b"x")
        else:
            pytest.fail("each byte gave the head more time")
        assert problem(stranger.answer()) == "too-slow"


def test_a_head_that_begins_before_the_last_answer_has_a_deadline(port: int) -> None:
    def answers() -> list[bytes]:
        with strangers(port, 1, REQUEST.replace(b"/ready", b"/work")) as (stranger,):
            time.sleep(0.5)  # the work takes a second; a busy machine may take both pieces as one
            stranger.send(HALF)
            with suppress(TimeoutError):
                return stranger.answer().split(b'"done"')
        return []

    tries = (answers() for _ in range(3))
    assert any(len(each) == 2 and each[1] and problem(each[1]) == "too-slow" for each in tries)


def test_a_connection_without_a_word_is_closed(port: int) -> None:
    with strangers(port, 1) as (stranger,):
        try:
            assert stranger.answer() == b""
        except TimeoutError:
            pytest.fail("the service still waits for the head")


def test_a_head_that_trickles_in_time_is_answered(port: int) -> None:
    with strangers(port, 1) as (stranger,):
        for _ in range(2):
            for byte in REQUEST:
                stranger.send(bytes((byte,)))
            assert b" 200 " in stranger.one_answer()


def test_of_too_many_unread_connections_the_oldest_are_closed() -> None:
    port = free_port()
    with (
        served("127.0.0.1", port, max_waiting_connections=8),
        strangers(port, 4 * 8, HALF) as opened,
    ):
        opened[0].socket.settimeout(5)
        assert opened[0].is_closed(), "the oldest is still open"
        opened[-1].send(b"\r\n")
        assert b" 200 " in opened[-1].one_answer()
        assert httpx.get(f"http://127.0.0.1:{port}/ready").json() == "yes"


def test_of_too_many_idle_connections_the_oldest_are_closed() -> None:
    port = free_port()
    with served("127.0.0.1", port, max_waiting_connections=4), ExitStack() as closing:
        opened = []
        for _ in range(6):
            opened.append(Stranger(port))
            closing.callback(opened[-1].socket.close)
            opened[-1].send(REQUEST)
            assert b" 200 " in opened[-1].one_answer()
        opened[0].socket.settimeout(5)
        assert opened[0].is_closed(), "the oldest is still open"
        opened[5].send(REQUEST)
        assert b" 200 " in opened[5].one_answer()


def test_requests_ahead_of_their_answers_are_few(port: int) -> None:
    with strangers(port, 1, REQUEST * 2_000) as (stranger,):
        try:
            answered = stranger.answer().count(b" 200 ")
        except ConnectionResetError:
            answered = 0
    assert answered <= 100


def test_what_is_not_http_gets_a_problem_document(port: int) -> None:
    with strangers(port, 1, b"\x16\x03\x01hello\r\n\r\n") as (stranger,):
        assert problem(stranger.answer()) == "malformed"


def test_strangers_are_bounded_over_tls_too(tls: Tls) -> None:
    port = free_port()
    with served("127.0.0.1", port, tls, head_seconds=60, max_strangers=4):
        known = Stranger(port, tls)
        known.send(REQUEST.replace(b"/ready", b"/known"))
        assert b" 200 " in known.one_answer()
        with known.socket, strangers(port, 9) as silent:  # none begins the handshake
            assert silent[0].is_closed(), "the oldest is still open"
            known.send(REQUEST)
            assert b" 200 " in known.one_answer()
            context = ssl.create_default_context(cafile=tls.key.with_name("ca.pem"))
            assert httpx.get(f"https://127.0.0.1:{port}/ready", verify=context).json() == "yes"


def test_who_was_answered_without_a_token_is_still_a_stranger(tls: Tls) -> None:
    port = free_port()
    with served("127.0.0.1", port, tls, head_seconds=60, max_strangers=4), ExitStack() as closing:
        opened = []
        for _ in range(6):
            opened.append(Stranger(port, tls))
            closing.callback(opened[-1].socket.close)
            opened[-1].send(REQUEST)
            assert b" 200 " in opened[-1].one_answer()
        opened[0].socket.settimeout(5)
        assert opened[0].is_closed(), "the oldest is still open"


def test_a_head_and_a_handshake_have_a_deadline_over_tls(tls: Tls) -> None:
    port = free_port()
    with served("127.0.0.1", port, tls, head_seconds=2), strangers(port, 1) as (silent,):
        half = Stranger(port, tls)
        with half.socket:
            half.send(HALF)
            assert problem(half.answer()) == "too-slow"
        assert silent.is_closed(), "a handshake has no deadline"


def test_a_late_handshake_leaves_less_time_for_the_head(tls: Tls) -> None:
    """One deadline for both: it is over when that of a connection without a handshake is over."""
    port = free_port()
    with served("127.0.0.1", port, tls, head_seconds=3), strangers(port, 2) as (silent, late):
        time.sleep(2)
        context = ssl.create_default_context(cafile=tls.key.with_name("ca.pem"))
        # A busy machine may begin the handshake after the deadline.
        with (
            suppress(OSError),
            context.wrap_socket(late.socket, server_hostname="server") as half,
        ):
            half.sendall(HALF)
            assert silent.is_closed()
            began = time.monotonic()
            assert half.recv(1) in (b"", b"H"), "closed or refused"
            assert time.monotonic() - began < 1, "the handshake gave the head more time"


def test_strangers_over_tls_take_little_memory(tls: Tls) -> None:
    port = free_port()
    with served("127.0.0.1", port, tls) as process, ExitStack() as closing:
        statm = Path(f"/proc/{process.pid}/statm")
        for number in range(520):
            if number == 20:
                before = int(statm.read_text().split()[1])
            stranger = Stranger(port, tls)
            closing.callback(stranger.socket.close)
            with suppress(ConnectionError, ssl.SSLError):
                stranger.send(HALF + b"x" * (LARGE if number < 260 else 10_000))
        assert (int(statm.read_text().split()[1]) - before) * PAGE < 24 << 20


def test_an_open_connection_over_tls_does_not_delay_the_end(tls: Tls) -> None:
    """Its client never answers the service's goodbye."""
    port = free_port()
    with served("127.0.0.1", port, tls) as process:
        stranger = Stranger(port, tls)
        with stranger.socket:
            stranger.send(REQUEST)
            assert b" 200 " in stranger.one_answer()
            process.terminate()
            process.wait(10)


async def says_yes(scope: Scope, receive: Receive, send: Send) -> None:
    """The smallest service: it answers every request with yes, and knows who sends a token."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    if (b"authorization", b"Bearer known") in scope["headers"]:
        scope["state"]["known"] = True
    while (await receive()).get("more_body"):
        pass
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
    )
    await send({"type": "http.response.body", "body": b'"yes"'})


@contextmanager
def served_here(**limits: int) -> Iterator[tuple[int, list[str]]]:
    """Serves in a thread of this process; yields the port and what happened at the end."""
    bounds = {"head_seconds": 1, "max_head_bytes": 4_096, "max_waiting_connections": 3}
    settings = cast(ServerSettings, SimpleNamespace(**bounds, max_strangers=3, **limits))
    ended: list[str] = []
    config = uvicorn.Config(says_yes, log_config=None, access_log=False)
    config.load()
    server = make_server(config, settings, lambda: ended.append("stopped"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield listener.getsockname()[1], ended
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(SECONDS)
    assert not thread.is_alive()


def test_heads_bodies_and_strangers_are_bounded_in_this_process() -> None:
    """The rules of this file in one process, where their lines can be counted."""
    with served_here() as (port, ended):
        known = Stranger(port)
        known.send(REQUEST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer known\r\n\r\n"))
        assert known.one_answer().endswith(b'"yes"')
        with strangers(port, 1) as (sender,):
            body = b"x" * 100_000
            head = f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            sender.send(head + body)
            assert sender.one_answer().endswith(b'"yes"')
            sender.send(REQUEST + REQUEST)
            assert sender.one_answer().endswith(b'"yes"')
        with strangers(port, 1, b"GET / HTTP/1.1\r\nA: " + b"a" * 5_000) as (large,):
            assert problem(large.answer()) == "head-too-large"
        with strangers(port, 1, b"no HTTP at all\r\n\r\n") as (foreign,):
            assert problem(foreign.answer()) == "malformed"
        with strangers(port, 1, HALF) as (slow,):
            assert problem(slow.answer()) == "too-slow"
        with strangers(port, 4, HALF) as (oldest, *_):
            assert oldest.is_closed(), "one more than may wait"
        known.send(REQUEST)
        assert known.one_answer().endswith(b'"yes"'), "strangers displace no known caller"
        known.socket.close()
        assert ended == []
    assert ended == ["stopped"]


def test_of_too_many_known_callers_that_wait_the_oldest_is_closed() -> None:
    with served_here() as (port, _), ExitStack() as closing:
        opened = []
        for _ in range(4):
            opened.append(Stranger(port))
            closing.callback(opened[-1].socket.close)
            opened[-1].send(
                REQUEST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer known\r\n\r\n")
            )
            assert opened[-1].one_answer().endswith(b'"yes"')
        opened[0].socket.settimeout(5)
        assert opened[0].is_closed(), "one more than may wait"
        for known in opened[1:]:
            known.send(REQUEST)
            assert known.one_answer().endswith(b'"yes"')


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 5_000 + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 5_000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 5_000 + b": b\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 900,
    ],
    ids=["url", "value", "name", "lines"],
)
def test_a_head_that_arrives_at_once_has_a_largest_size(head: bytes) -> None:
    """Also on a connection that has sent a smaller head before."""
    with served_here() as (port, _), strangers(port, 2) as opened:
        opened[1].send(REQUEST)
        assert opened[1].one_answer().endswith(b'"yes"')
        for stranger in opened:
            stranger.send(head + b"\r\n")
            assert problem(stranger.answer()) == "head-too-large"
