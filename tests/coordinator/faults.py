"""Faults to inject, and the outcome of a run in spite of them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from riffle.coordinator.store.transactions import Store
from tests.coordinator.world import RUN, Crash, open_store


def read(directory: Path, look: Callable[[Store], Any]) -> Any:
    store = open_store(directory)
    try:
        return look(store)
    finally:
        store.close()


def outcome(directory: Path) -> dict[str, Any]:
    """Everything that a run left in the store, without times."""

    def look(store: Store) -> dict[str, Any]:
        run = store.run(RUN)
        return {
            "state": (run.state, run.message, run.summary),
            "histograms": {i: h.tolist() for i, h in store.histograms(RUN).items()},
            "ledger": [replace(entry, recorded_at=0.0) for entry in store.ledger(RUN)],
            "stages": store.stages(RUN),
            "states": [(r.state, r.acknowledged, r.batch_id) for r in store.deployments(RUN)],
            "events": [(e.id, e.kind) for e in store.events(RUN)],
        }

    result: dict[str, Any] = read(directory, look)
    return result


class Breaking:
    """Passes everything on, and dies before or after the ``nth`` call of one method."""

    def __init__(self, target: Any, method: str, nth: int, when: str) -> None:
        self._target, self._method = target, method
        self._left, self._when = nth, when

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._target, name)
        if name != self._method:
            return real
        return self._awaited(real) if asyncio.iscoroutinefunction(real) else self._called(real)

    def _awaited(self, real: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            dies = self._dies("before")
            result = None if dies else await real(*args, **kwargs)
            if dies or self._dies("after"):
                raise Crash
            return result

        return call

    def _called(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            dies = self._dies("before")
            result = None if dies else real(*args, **kwargs)
            if dies or self._dies("after"):
                raise Crash
            return result

        return call

    def _dies(self, when: str) -> bool:
        if when != self._when:
            return False
        self._left -= 1
        return self._left == 0


class Failing:
    """Passes everything on, but fails the first ``times`` calls of each of these methods."""

    def __init__(self, target: Any, error: Exception, times: int, *methods: str) -> None:
        self._target, self._error = target, error
        self._left = dict.fromkeys(methods, times)

    def __getattr__(self, name: str) -> Any:
        if self._left.get(name, 0) > 0:
            self._left[name] -= 1
            raise self._error
        return getattr(self._target, name)
