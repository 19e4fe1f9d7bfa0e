"""Common to all tests."""

import fcntl
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import hypothesis
import pytest
from numba.core.dispatcher import Dispatcher
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Receive, Scope, Send

from riffle.common.protocol.errors import MEDIA_TYPE, URN
from riffle.common.server.monitoring import PROBLEM_KEY, MetricsMiddleware, matched_route
from riffle.deploy.network import loopback
from tests import forked, postgres

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see deploy/__init__.py

# Tests end processes, not machines, so their files need no disk where memory has room for them.
MEMORY, ROOM = Path("/dev/shm"), 8 << 30  # noqa: S108
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# A shell's background job ignores Ctrl-C and hands that on: no child could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines are noisy: a slow example is no failure. Examples are the same on every run of CI.
hypothesis.settings.register_profile("riffle", deadline=None, derandomize=True)
hypothesis.settings.load_profile("riffle")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets each process start with its share of the long tests: none waits for one at the end.

    Long tests of one file share what they prepare, so one process has them all. The first process
    starts with the tests of a browser instead, which only it then has to start. xdist gives each
    process an equal stretch of the list, and later moves tests from its end.
    """
    long = defaultdict[Path, list[pytest.Item]](list)
    browser, short = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            browser.append(item)
        else:
            (long[item.path] if item.get_closest_marker("long") else short).append(item)
    others = max(1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) - 1)
    starts = [browser, *(list(chain(*[*long.values()][i::others])) for i in range(others))]
    whole = len(items)
    items.clear()
    for i, start in enumerate(starts):
        size = max(0, (whole - len(items)) // (len(starts) - i) - len(start))
        items += [*start, *short[:size]]
        del short[:size]
    items += short


def pytest_collection_finish() -> None:
    """Exempts all that is loaded by now from garbage collection, which walks it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _paths() -> Iterator[None]:
    """Takes back what `riffle` sets for its own child processes when a test calls it in-process."""
    before = os.environ.get("PYTHONSAFEPATH")
    yield
    if before is None:
        os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(scope="session", autouse=True)
def _services_are_forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loopback, "start_service", forked.start_service)
        yield


@pytest.fixture(scope="session", autouse=True)
def _loops_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets one test process compile a loop; the others wait, and load it from numba's cache."""
    compile_loop, depth, threads = Dispatcher.compile, 0, threading.RLock()

    def compile_in_turn(loop: Dispatcher, signature: str) -> object:
        nonlocal depth
        with threads:
            depth += 1  # a loop compiles the loops that it calls
            fcntl.flock(turn, fcntl.LOCK_EX)
            try:
                return compile_loop(loop, signature)
            finally:
                depth -= 1
                if depth == 0:
                    fcntl.flock(turn, fcntl.LOCK_UN)

    shared = tmp_path_factory.getbasetemp().parent / "compiling"
    with shared.open("w") as turn, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compile_in_turn)
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgres.Cluster]:
    """A PostgreSQL server; skips where there is none."""
    with postgres.cluster() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables, of each engine."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'a.sqlite'}"
        return
    with request.getfixturevalue("cluster").database("") as address:
        yield address


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans that go to the process's global provider: none of ours may."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield found
    provider.shutdown()


@pytest.fixture(scope="session", autouse=True)
def only_declared_problems() -> Iterator[None]:
    """In no test does a route of this process answer with a problem that its OpenAPI lacks."""
    answer = MetricsMiddleware.__call__

    async def checked(self: MetricsMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(self, scope, receive, send)
        slug, described = scope.get(PROBLEM_KEY), getattr(scope.get("route"), "responses", {})
        if slug and matched_route(scope) and "default" in described:
            schema = described["default"]["content"][MEDIA_TYPE]["schema"]
            declared = schema["properties"]["type"]["enum"]
            assert URN + slug in declared, f"{matched_route(scope)} does not declare {slug}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsMiddleware, "__call__", checked)
        yield
