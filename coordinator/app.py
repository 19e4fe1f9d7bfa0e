"""The coordinator's REST service, put together: store, keys, analyzer, learners and the routes.

All routes under /v1 need the operator's token; nobody else calls the coordinator.

Run the coordinator as a process.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import cast

from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.endpoint import server_verification
from riffle.common.process.tracing import TracingMiddleware, export_spans
from riffle.common.protocol.errors import LocalError
from riffle.common.server.limits import ConcurrencyLimit
from riffle.common.server.monitoring import MetricsMiddleware
from riffle.common.server.service import (
    FRAMEWORK,
    PROBLEM_RESPONSES,
    install_problem_handlers,
    problem_response,
    serve,
)
from riffle.coordinator.api import operations, results, runs
from riffle.coordinator.api.access import OPERATOR, doors
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import Shuffler, ShufflerApi
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.metrics import JOURNAL, CoordinatorMetrics
from riffle.coordinator.runs.coordinator import Coordinator, prepare_directory
from riffle.coordinator.runs.desk import Desk
from riffle.coordinator.settings import Settings
from riffle.coordinator.store.events import Bell
from riffle.coordinator.store.store import Store


def create_app(
    settings: Settings,
    *,
    shuffler: Shuffler | None = None,
    registry: Registry | None = None,
    analyzer: Analyzer | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The service. Peers, learners and clock can be replaced, for tests.

    Raises:
        LocalError: a setting or a key file is wrong.
    """
    settings.check_test_entry()
    keys = KeyRing(settings.analyzer_keys_dir, settings.file_cipher(), clock)
    keys.check()
    metrics = CoordinatorMetrics()
    verify, token = server_verification(settings.ca_file), settings.shuffler_token()
    desk_of = partial(
        Desk,
        keys=keys,
        registry=registry or Registry(files=settings.learners),
        shuffler_id=settings.shuffler_id,
        signing_key=settings.signing_key(),
        clock=clock,
        metrics=metrics,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        prepare_directory(settings.data_dir)
        async with AsyncExitStack() as closing:
            peer = shuffler
            if peer is None:
                peer = api = ShufflerApi.connect(settings.shuffler_url, token, verify)
                closing.push_async_callback(api.close)
            store = Store(settings.url, keys.active)
            closing.callback(store.close)
            opener = analyzer or Analyzer(keys, settings.workers)
            closing.callback(opener.close)
            bell = Bell(shared=store.shared)
            desk = desk_of(store=store, shuffler=peer, analyzer=opener, bell=bell)
            service = Coordinator(desk, test_entry=settings.test_entry, replica=settings.replica())
            app.state.coordinator = service
            app.state.ready = operations.readiness(service, settings.data_dir)
            closing.push_async_callback(service.close)
            await service.start()
            yield

    app = FastAPI(
        title="Riffle coordinator",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=PROBLEM_RESPONSES,
        telemetry=FRAMEWORK,
    )
    _know(app, settings)
    _guard(app, metrics)
    routers = (
        runs.router,
        results.router,
        operations.page_router,
        operations.keys_router,
        operations.health_router,
    )
    for router in routers:
        app.include_router(router)
    return app


def _know(app: FastAPI, settings: Settings) -> None:
    """What the routes check callers and the disk by."""
    app.state.doors = doors(settings)
    app.state.data_dir = settings.data_dir


def _guard(app: FastAPI, metrics: CoordinatorMetrics) -> None:
    """Limits, traces and measures around every call; an answer to every error."""
    app.add_middleware(ConcurrencyLimit, limit=2 * OPERATOR.at_once)
    app.add_middleware(TracingMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=metrics.requests)
    install_problem_handlers(app, JOURNAL)
    app.add_exception_handler(SQLAlchemyError, _store_down)


async def _store_down(_: Request, error: Exception) -> Response:
    JOURNAL.exception("store-failed", error)
    return problem_response(LocalError("unavailable", "the store cannot be used; see the log"))


def release_waiting(app: FastAPI) -> None:
    """End all streams and long polls: the service is about to stop."""
    cast("Coordinator", app.state.coordinator).desk.bell.close()


def run(settings: Settings, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        LocalError: a setting, a key file, the store or the port cannot be used.
    """
    tls = settings.tls()
    app = create_app(settings)
    with export_spans("coordinator"):
        serve(
            app,
            settings.host,
            settings.port,
            tls=tls,
            on_start=on_start,
            on_stop=lambda: release_waiting(app),
        )
