"""Bounds the connections on which the server waits for a request.

A request's head has a largest size and a deadline. If too many connections have no request under
way, the server closes the connection that has waited longest. Nobody can therefore keep new callers
out by opening many connections. A stranger is a caller who has not sent a valid token yet. TLS
takes much memory, so over TLS the bound for strangers is smaller. Over TLS, the server lets each
stranger wait for at least `GRACE_SECONDS`, and meanwhile accepts no connection beyond the bound.
There is no bound per address: many honest callers may share a proxy's address.
"""

import asyncio
import json
import logging
import socket
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from riffle.common.protocol.errors import MEDIA_TYPE, RemoteError
from riffle.common.server.settings import ServerSettings

LINGER_SECONDS = 1.0
"""Time for a peer to read a refusal, or to end its TLS session. An idle peer never ends it."""
GRACE_SECONDS = 1.0
PAUSE_SECONDS = 0.02
MAX_PIPELINED = 16
ACCEPTED_AT_ONCE = 64
_SILENT = logging.Logger("lifespan", logging.CRITICAL)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with bounded heads. It exists before its connection's TLS handshake."""

    def __init__(self, server: "_Server", accepted: socket.socket) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._server, self._limits, self._socket = server, server.settings, accepted
        self._pending = 0  # bytes since the parser last delivered a head or a piece of a body
        self._fault: RemoteError | None = None
        self.known, self.since = False, 0.0  # whether a valid token came; when the wait began
        self._deadline = self.loop.call_later(self._limits.head_seconds, self._expire)
        server.wait(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def stop_waiting(self) -> None:
        self._deadline.cancel()
        self._server.waiting[self.known].pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return  # the refusal may still be on its way
        waits = self in self._server.waiting[self.known]
        if self.cycle is not None and self._pending == 0 and waits:
            self._set_deadline(self._limits.head_seconds)
        self._pending += len(data)
        super().data_received(data)
        if self._pending > self._limits.max_head_bytes and self._fault is None:
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._pending = size if size > self._limits.max_head_bytes else 0
        if self._pending or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(size)  # answered by `send_400_response`
        self.stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Passes on a piece of a body, without a copy if the app has taken all earlier pieces.

        uvicorn would copy each piece twice. Adding a piece to empty `bytes` makes no copy.
        """
        self._pending = 0
        if self.cycle is not None:
            waiting = self.cycle.body
            self.cycle.body = bytearray(waiting) if waiting else b""  # type: ignore[assignment]
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no other request is under way
            self.known = self.known or "known" in self.cycle.scope["state"]
            self._server.wait(self)
            if self._pending:  # bytes of the next head
                self._set_deadline(self._limits.head_seconds)

    def send_400_response(self, msg: str) -> None:
        most = self._limits.max_head_bytes
        if self._pending > most:
            self._refuse("head-too-large", f"a request's head may have at most {most} bytes")
        else:
            self._refuse("malformed", msg)

    def _refuse(self, slug: str, detail: str) -> None:
        """Answers with a problem document and closes the connection."""
        self._fault = RemoteError(slug, detail)
        if self.pipeline or (self.cycle is not None and not self.cycle.response_complete):
            self.drop()  # other answers are on their way
            return
        body = json.dumps(self._fault.document())
        head = f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close"
        text = f"{head}\r\n\r\n{body}"
        self.transport.write(STATUS_LINE[self._fault.status] + text.encode())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_deadline(LINGER_SECONDS)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self._pending and self._fault is None:
            self._refuse("too-slow", f"{self._limits.head_seconds} seconds for a head are over")
        else:
            self.drop()

    def drop(self) -> None:
        """Closes the connection at once, also during the TLS handshake."""
        self.stop_waiting()
        with suppress(OSError):  # the peer left first
            self._socket.shutdown(socket.SHUT_RDWR)
        if self in self.connections:
            self.transport.abort()


class _Tls(SSLProtocol):
    """asyncio's TLS with a small buffer; uvloop's TLS has a buffer of 256 KiB per connection."""

    max_size = 1 << 14


class _Server(uvicorn.Server):
    """Accepts connections itself, to count all of them. Its loop sleeps until a signal comes.

    uvicorn's own loop wakes ten times a second to refresh the date. In an idle service, this is
    most of the work. Here, `service.serve` sets the date.
    """

    def __init__(
        self, config: uvicorn.Config, settings: ServerSettings, on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.settings, most = settings, settings.max_waiting_connections
        self._limits = settings.max_strangers if config.ssl else most, most
        # Waiting connections of strangers, and of known callers. The longest wait comes first.
        self.waiting: tuple[dict[_Protocol, None], dict[_Protocol, None]] = ({}, {})
        self._on_stop = on_stop
        self._opening: set[asyncio.Task[None]] = set()
        self._signal = asyncio.Event()
        self._sleeping: asyncio.AbstractEventLoop | None = None

    def wait(self, connection: _Protocol) -> None:
        waiting = self.waiting[connection.known]
        waiting[connection], connection.since = None, connection.loop.time()
        if len(waiting) > self._limits[connection.known]:
            next(iter(waiting)).drop()

    def _listen(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.logger = _SILENT  # `service.serve` raises the app's own error
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(uvicorn.config.STARTUP_FAILURE)
        self.servers, self.started = [], True
        for listener in sockets or ():
            listener.setblocking(False)
            self._listen(listener)

    def _accept(self, listener: socket.socket) -> None:
        loop, strangers = asyncio.get_running_loop(), self.waiting[False]
        for _ in range(ACCEPTED_AT_ONCE):
            crowded = self.config.ssl and len(strangers) >= self._limits[False]
            if crowded and loop.time() < next(iter(strangers)).since + GRACE_SECONDS:
                loop.remove_reader(listener)
                loop.call_later(PAUSE_SECONDS, self._listen, listener)
                return
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is left, or the peer left
                for oldest in list(chain(*self.waiting))[:1]:
                    oldest.drop()
                return
            accepted.setblocking(False)
            task = loop.create_task(self._open(accepted, _Protocol(self, accepted)))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, protocol: _Protocol) -> None:
        loop, tls, seconds = asyncio.get_running_loop(), self.config.ssl, LINGER_SECONDS
        outer: asyncio.Protocol | _Tls = protocol
        ready = loop.create_future()
        if tls is None:
            ready.set_result(None)
        else:
            outer = _Tls(loop, protocol, tls, ready, True, ssl_shutdown_timeout=seconds)
        try:
            await loop.connect_accepted_socket(lambda: outer, accepted)
            await ready
        except OSError:  # the peer left, or does not speak TLS
            protocol.stop_waiting()
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
        self._on_stop()
        await super().shutdown(sockets)


def make_server(
    config: uvicorn.Config, settings: ServerSettings, on_stop: Callable[[], None]
) -> uvicorn.Server:
    """Returns a server that calls ``on_stop`` before it waits for unfinished answers."""
    return _Server(config, settings, on_stop)
