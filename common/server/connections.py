"""Connections of a server, with limits on those that unauthenticated callers may hold open.

Anyone can connect, so a request's head has a maximum size and a deadline, and the number of
connections without a request under way is limited. Beyond that number the one that has waited
longest is closed. So a newcomer is always let in, and a caller who sends its request immediately is
answered, whatever others hold open. Nothing depends on addresses, because many honest callers may
share a proxy. Requests under way are bounded elsewhere (`limits.ConcurrencyLimit`).
"""

import asyncio
import json
import socket
import sys
from asyncio import TimerHandle
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import FrameType
from typing import TypeAlias

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from riffle.common.protocol.errors import MEDIA_TYPE, RemoteError
from riffle.common.server.settings import ServerSettings

BODY_SECONDS = 60
"""Time within which a body must arrive, and a caller must take some of its answer."""
LINGER_SECONDS = 1.0
"""Time to read a refusal. Closing a connection immediately may lose the last bytes sent."""
FAREWELL_SECONDS = 1.0
"""Time to answer the end of a TLS session. Idle clients never do, and would delay the drain."""
RETRY_SECONDS = 0.1
MAX_PIPELINED = 16
ACCEPTED_AT_ONCE = 64


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with bounded heads. It exists as soon as a connection is accepted."""

    def __init__(self, server: "_Server", accepted: socket.socket) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._server = server
        self._socket = accepted
        self._in_body = False
        self._in_head = False  # part of a head has arrived
        self._head_bytes = 0  # of the URL and headers parsed so far
        self._pending_bytes = 0  # received since the parser last delivered a head or a body
        self._fault: RemoteError | None = None
        self._stall: TimerHandle | None = None
        self._deadline: TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        self.resume_writing()
        super().connection_lost(exc)

    def forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.waiting(self, None)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return  # ignore what follows; the refusal may still be in transit
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > self._server.settings.max_head_bytes and self._fault is None:
            self._refuse(_too_large(self._server.settings.max_head_bytes))
        elif self in self._server.idle and not self._in_body:
            self._await_head()

    def _await_head(self) -> None:
        self._server.waiting(self, self._server.unread)
        self._expire_in(self._server.settings.head_seconds)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            detail = f"more than {MAX_PIPELINED} requests ahead of their answers"
            self._fault = RemoteError("malformed", detail)
            raise self._fault
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, amount: int) -> None:
        self._head_bytes += amount
        if self._head_bytes > self._server.settings.max_head_bytes:
            self._fault = _too_large(self._server.settings.max_head_bytes)
            raise self._fault

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._pending_bytes = False, True, 0
        self.forget()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Passes on a piece of a body as the parser delivers it.

        uvicorn copies each piece into a buffer and out again, a seventh of the time to read 2 MB of
        reports. This uses a buffer only if a piece arrives before the last one was taken.
        """
        self._pending_bytes = 0
        if self.cycle is not None:
            self.cycle.body = _appendable(self.cycle.body)  # type: ignore[assignment]
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._pending_bytes = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:  # the next request has already begun
            return
        if self._in_head:
            self._await_head()
            return
        self._server.waiting(self, self._server.idle)
        if self.transport.is_closing() or self._in_body:  # the peer must take or send the rest
            self._expire_in(BODY_SECONDS)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._fault or RemoteError("malformed", msg))

    def _refuse(self, error: RemoteError) -> None:
        """Answers with a problem document and closes the connection."""
        self._fault = error
        if self.pipeline or (self.cycle is not None and not self.cycle.response_complete):
            self.drop()  # earlier answers are still being sent
            return
        body = json.dumps(error.document()).encode()
        self.transport.write(
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._expire_in(LINGER_SECONDS)

    def _expire_in(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        begun = self._in_head or self._pending_bytes
        if begun and self._fault is None and not self._in_body and not self.transport.is_closing():
            detail = f"the head did not arrive within {self._server.settings.head_seconds} seconds"
            self._refuse(RemoteError("too-slow", detail))
        else:
            self.drop()

    def drop(self) -> None:
        """Closes the connection immediately, even during the TLS handshake."""
        with suppress(OSError):  # the peer closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        if self in self._server.server_state.connections:  # not there during the TLS handshake
            self.transport.abort()

    def pause_writing(self) -> None:
        self._stall = self._stall or self.loop.call_later(BODY_SECONDS, self.drop)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()


def _too_large(most: int) -> RemoteError:
    return RemoteError("head-too-large", f"a request's head may have at most {most} bytes")


def _appendable(body: bytes | bytearray) -> bytes | bytearray:
    """Returns a body to extend with ``+=``. Empty `bytes` plus a piece is that piece, uncopied."""
    if not body:
        return b""
    return body if isinstance(body, bytearray) else bytearray(body)


_Waiting: TypeAlias = dict[_Protocol, None]
"""Connections without a request under way; the one that has waited longest comes first."""


class _Server(uvicorn.Server):
    """Accepts connections itself, to count them from the first moment, and sleeps until a signal.

    ``on_stop`` is called before the server waits for unfinished answers. uvicorn's own loop wakes
    ten times a second to refresh the date, most of an idle service's work; `service.serve` sets the
    date instead.
    """

    def __init__(
        self, config: uvicorn.Config, settings: ServerSettings, on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.settings = settings
        self.unread: _Waiting = {}
        self.idle: _Waiting = {}
        self._most = settings.max_unread_connections, settings.max_idle_connections
        self._on_stop = on_stop
        self._opening: set[asyncio.Task[None]] = set()
        self._signal = asyncio.Event()
        self._sleeping: asyncio.AbstractEventLoop | None = None

    def waiting(self, connection: _Protocol, where: _Waiting | None) -> None:
        """Moves a connection to the end of a queue, or out of both; drops a full queue's first."""
        self.unread.pop(connection, None)
        self.idle.pop(connection, None)
        if where is not None:
            where[connection] = None
            if len(where) > self._most[where is self.idle]:
                oldest = next(iter(where))
                del where[oldest]
                oldest.drop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(uvicorn.config.STARTUP_FAILURE)
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            self._listen(listener)
        self.started = True

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # it was not closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # out of files or memory: close waiting connections
                for connection in [*self.unread, *self.idle][:ACCEPTED_AT_ONCE]:
                    connection.drop()
                loop.remove_reader(listener)
                loop.call_later(RETRY_SECONDS, self._listen, listener)
                return
            accepted.setblocking(False)
            task = loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        protocol = _Protocol(self, accepted)
        encrypted = self.config.ssl is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self.config.ssl,
                ssl_shutdown_timeout=FAREWELL_SECONDS if encrypted else None,
            )
        except OSError:  # the peer left, or does not speak TLS
            protocol.forget()
            accepted.close()

    async def main_loop(self) -> None:
        self._sleeping = asyncio.get_running_loop()
        if not self.should_exit:
            await self._signal.wait()
        self._sleeping = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._sleeping is not None:
            self._sleeping.call_soon_threadsafe(self._signal.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        for task in self._opening:
            task.cancel()
        self._on_stop()
        await super().shutdown(sockets)


def make_server(
    config: uvicorn.Config, settings: ServerSettings, on_stop: Callable[[], None]
) -> uvicorn.Server:
    """Returns a server with the limits of ``settings``.

    The server calls ``on_stop`` before it waits for unfinished answers.
    """
    return _Server(config, settings, on_stop)
