"""Assembles the coordinator's REST service and runs it as a process.

Only the operator calls the coordinator, so all routes under /v1 need the operator's token.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.middleware import Middleware
from starlette.types import Lifespan

from riffle.common.process.endpoint import hash_token, server_verification
from riffle.common.protocol.errors import LocalError
from riffle.common.server.limits import ConcurrencyLimit
from riffle.common.server.service import hold, make_app, problem_answer, serve
from riffle.coordinator.api import operations, results, runs
from riffle.coordinator.api.access import OPERATOR, make_authenticator
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import ShufflerClient
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.metrics import JOURNAL, CoordinatorMetrics
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.runs.exchange import BatchExchange
from riffle.coordinator.settings import Settings
from riffle.coordinator.store.events import ChangeSignals
from riffle.coordinator.store.schema import meta
from riffle.coordinator.store.transactions import Store


def create_app(
    settings: Settings,
    *,
    shuffler: ShufflerClient | None = None,
    registry: Registry | None = None,
    analyzer: Analyzer | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Returns the service's app. Tests pass their own shuffler, learners, analyzer and clock.

    Raises LocalError if a setting or a key file is wrong.
    """
    settings.check_test_entry()
    keys = KeyRing(settings.analyzer_keys_dir, settings.storage_cipher(), clock)
    keys.check()
    learners = registry or Registry(files=settings.learners)
    metrics = CoordinatorMetrics()
    metrics.requests.show_certificate(settings.tls_cert_file)
    verify = server_verification(settings.ca_file)
    token, signing_key = settings.shuffler_token(), settings.signing_key()
    settings.check_tokens(hash_token(token), settings.operator_hash(), settings.metrics_hash())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        prepare_directory(settings.data_dir)
        async with AsyncExitStack() as closing:
            client = shuffler
            if client is None:
                client = ShufflerClient.connect(settings.shuffler_url, token, verify)
                closing.push_async_callback(client.close)
            head = replace(settings.head("coordinator", meta), forgotten="what runs did and spent")
            store = Store(settings.url, head, keys.active)
            closing.callback(store.close)
            opener = analyzer or Analyzer(keys.private, settings.workers)
            closing.callback(opener.close)
            share, epoch = settings.max_owner_share, settings.epoch_seconds
            coordinator = Coordinator(
                store=store,
                issuer=Issuer(settings.shuffler_id, keys.active, clock, share, epoch),
                exchange=BatchExchange(client, opener, signing_key, clock),
                keys=keys,
                registry=learners,
                signals=ChangeSignals(shared=store.shared),
                metrics=metrics,
                clock=clock,
                replica=settings.replica(),
                test_entry=settings.test_entry,
                aggregations=settings.aggregations,
                stall_seconds=settings.stall_seconds,
            )
            app.state.coordinator = coordinator
            app.state.readiness = operations.shared_readiness(coordinator, settings.data_dir)
            closing.push_async_callback(coordinator.close)
            await coordinator.start()
            yield

    return _make_app(settings, lifespan, metrics)


def _make_app(
    settings: Settings, lifespan: Lifespan[FastAPI], metrics: CoordinatorMetrics
) -> FastAPI:
    inner = [Middleware(ConcurrencyLimit, limit=2 * OPERATOR.at_once)]
    routers = (
        runs.router,
        results.router,
        operations.page_router,
        operations.keys_router,
        operations.health_router,
    )
    app = make_app("Riffle coordinator", JOURNAL, metrics.requests, lifespan, inner, routers)
    app.add_exception_handler(SQLAlchemyError, _answer_store_failure)
    app.state.authenticator = make_authenticator(settings)
    app.state.data_dir = settings.data_dir
    return app


async def _answer_store_failure(request: Request, error: Exception) -> Response:
    JOURNAL.exception("store-failed", error)
    failure = LocalError("unavailable", "the store cannot be used; see the log")
    return problem_answer(request.scope, failure)


def prepare_directory(path: Path) -> None:
    """Makes the data directory, open to its owner only; raises LocalError ``unavailable``."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError("unavailable", f"cannot use data directory {path}: {error}") from error


def run(settings: Settings, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises LocalError if a setting, a key file, the store or the port cannot be used.
    """
    settings.tls()
    app = create_app(settings)
    prepare_directory(settings.data_dir)
    hold(settings.url)

    def release_waiting() -> None:
        app.state.coordinator.signals.close()

    serve(app, settings, "coordinator", on_start, release_waiting)
