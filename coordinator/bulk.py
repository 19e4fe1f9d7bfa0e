"""An httpx transport for long answers, which whoever waits for one can hang up on.

Its pieces are of 1 MiB. Those of httpx's own are of 64 KiB and copied four times on their way,
which takes 23 ms of a core for 50 MB. Each request has a connection of its own.
"""

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator

import httpx

PIECE_BYTES = 1 << 20
LINE = "riffle.line"
"""Key of a request's extensions: the `Line` that it is on."""


class Line:
    """Where a thread waits for an answer: another one can `leave` it, and the wait is over."""

    def __init__(self) -> None:
        self.left = False
        self._socket: socket.socket | None = None

    def take(self, connected: socket.socket) -> None:
        """The request is on this connection now."""
        self._socket = connected
        if self.left:
            self.leave()

    def leave(self) -> None:
        """Hang up: whoever reads finds that the answer is over."""
        self.left = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it was closed
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class BulkTransport(httpx.BaseTransport):
    """See above; no proxy of the environment sees anything."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._context = httpx.create_ssl_context(verify=verify, trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        connection = self._connected(request)
        try:
            target = request.url.raw_path.decode("ascii")
            connection.request(request.method, target, headers=dict(request.headers))
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise httpx.ReadError(str(error), request=request) from error
        body = _Body(connection, answer)
        return httpx.Response(answer.status, headers=answer.getheaders(), stream=body)

    def _connected(self, request: httpx.Request) -> http.client.HTTPConnection:
        url, seconds = request.url, request.extensions["timeout"]
        host, port = url.raw_host.decode("ascii"), url.port
        connection = (
            http.client.HTTPSConnection(host, port, context=self._context)
            if url.scheme == "https"
            else http.client.HTTPConnection(host, port)
        )
        connection.timeout = seconds["connect"]
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise httpx.ConnectError(str(error), request=request) from error
        connection.sock.settimeout(seconds["read"])
        if (line := request.extensions.get(LINE)) is not None:
            line.take(connection.sock)
        return connection


class _Body(httpx.SyncByteStream):
    """An answer's body as it comes; closing it closes the connection."""

    def __init__(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        try:
            while piece := self._answer.read(PIECE_BYTES):
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise httpx.ReadError(str(error)) from error

    def close(self) -> None:
        self._answer.close()
        self._connection.close()
