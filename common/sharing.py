"""One answer for many who ask at the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """What was read under the present key: read again only when the key has changed."""

    def __init__(self, read: Callable[[], Awaitable[T]], key: Callable[[], object]) -> None:
        self._read = read
        self._key = key
        self._lock = asyncio.Lock()
        self._held: tuple[object, T] | None = None

    async def get(self) -> T:
        """The answer under the present key."""
        async with self._lock:
            key = self._key()  # taken before reading: what changes meanwhile makes it stale
            if self._held is None or self._held[0] != key:
                self._held = (key, await self._read())
            return self._held[1]
