"""Requests below the test client: bodies without an end, and what a server reads in the scope."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Receive, Scope, Send

CHUNK = bytes(1 << 20)


def bytes_read(client: Any, method: str, path: str, token: str, most: int) -> tuple[int, int]:
    """Sends a body without an end; returns the answer's status and how much was read of it.

    The body ends after twice ``most`` bytes and a chunk, so that a route that reads all of it ends.
    """
    read, status = 0, 0

    async def receive() -> Message:
        nonlocal read
        read += len(CHUNK)
        more = read <= 2 * most + len(CHUNK)
        return {"type": "http.request", "body": CHUNK, "more_body": more}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        **{"type": "http", "http_version": "1.1", "scheme": "http", "method": method},
        **{"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""},
        "headers": [(b"host", b"service"), (b"authorization", f"Bearer {token}".encode())],
        "state": {},
    }
    client.portal.call(client.app, scope, receive, send)
    return status, read


@contextmanager
def known_callers(app: Any) -> Iterator[list[bool]]:
    """Yields a list that gets, for each request, whether its caller counts as known afterwards."""
    inner, known = app.middleware_stack, list[bool]()

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        await inner(scope, receive, send)
        known.append("known" in scope.get("state", {}))

    app.middleware_stack = look
    try:
        yield known
    finally:
        app.middleware_stack = inner
