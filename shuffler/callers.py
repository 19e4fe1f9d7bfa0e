"""The callers of the shuffler, told apart by their tokens: who may call which route, how often.

Nodes are known by their credential in the store. The coordinator, the operator and a reader of the
metrics are known by the hash of their token in the settings.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

from fastapi import Depends, Request

from riffle.common.protocol.messages import BatchStatus
from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit
from riffle.common.server.service import Token
from riffle.shuffler.core import Shuffler
from riffle.shuffler.rules import for_coordinator
from riffle.shuffler.settings import Settings

COORDINATOR = RateLimit(requests=500.0, reports=1.0, at_once=4_096)
"""All coordinator replicas together; each run waits for its batch in a long poll."""
OPERATOR = RateLimit(requests=200.0, reports=1.0, at_once=256)

StatusView = Callable[[BatchStatus], BatchStatus]
"""What a caller may see of a batch's status."""


def authenticator(settings: Settings, attempts: FailedAttempts) -> Authenticator:
    """Returns the authenticator of the callers whose tokens are in the settings."""
    keys = {
        "coordinator": Credential(
            settings.coordinator_hash(), COORDINATOR, "coordinator/shuffler_token"
        ),
        "operator": Credential(settings.operator_hash(), OPERATOR, "operator/shuffler_token"),
    }
    if (reader := settings.metrics_hash()) is not None:
        keys["metrics"] = Credential(reader, OPERATOR, "operator/metrics_token")
    return Authenticator(attempts, keys)


def shuffler_of(request: Request) -> Shuffler:
    """Returns the shuffler of an app."""
    core = request.app.state.shuffler
    assert isinstance(core, Shuffler)  # noqa: S101 -- narrows starlette's untyped state
    return core


def failed_attempts_of(request: Request) -> FailedAttempts:
    """Returns the limit of failed authentications of an app."""
    attempts = request.app.state.failed_attempts
    assert isinstance(attempts, FailedAttempts)  # noqa: S101
    return attempts


def authenticator_of(request: Request) -> Authenticator:
    """Returns the authenticator of an app."""
    known = request.app.state.authenticator
    assert isinstance(known, Authenticator)  # noqa: S101
    return known


@asynccontextmanager
async def node_of(request: Request, token: str) -> AsyncIterator[str]:
    """Yields the caller's node id, within its limits while the request lasts.

    Raises:
        RemoteError: ``unauthorized``.
        LocalError: ``too-many-requests``.
    """
    core = shuffler_of(request)
    with failed_attempts_of(request).attempt(token):
        node = await core.admission.node(token)
    with core.callers.request(node, asyncio.get_running_loop().time()):
        yield node


@contextmanager
def coordinator_only(request: Request, token: str) -> Iterator[None]:
    """Refuses everyone but the coordinator."""
    with authenticator_of(request).authenticate(token, "coordinator"):
        yield


@contextmanager
def is_operator(request: Request, token: str) -> Iterator[bool]:
    """Yields whether the caller is the operator, not the coordinator; refuses everyone else.

    A caller with the coordinator's token gets the coordinator's view, whatever else it may be.
    """
    with authenticator_of(request).authenticate(token, "coordinator", "operator") as name:
        yield name == "operator"


@contextmanager
def status_view(request: Request, token: str) -> Iterator[StatusView]:
    """Yields the view that the caller may have of a status; see `is_operator`."""
    with is_operator(request, token) as whole:
        yield (lambda status: status) if whole else for_coordinator


async def _core(request: Request) -> Shuffler:
    return shuffler_of(request)


async def _coordinator(request: Request, token: Token) -> AsyncIterator[None]:
    with coordinator_only(request, token):
        yield


async def _operator(request: Request, token: Token) -> AsyncIterator[None]:
    with authenticator_of(request).authenticate(token, "operator"):
        yield


async def _metrics_reader(request: Request, token: Token) -> AsyncIterator[None]:
    with authenticator_of(request).authenticate(token, "operator", "metrics"):
        yield


async def _is_operator(request: Request, token: Token) -> AsyncIterator[bool]:
    with is_operator(request, token) as whole:
        yield whole


async def _status_view(request: Request, token: Token) -> AsyncIterator[StatusView]:
    with status_view(request, token) as view:
        yield view


# Dependencies of FastAPI.
Core = Annotated[Shuffler, Depends(_core)]
CoordinatorOnly = Depends(_coordinator)
OperatorOnly = Depends(_operator)
MetricsOnly = Depends(_metrics_reader)
IsOperator = Annotated[bool, Depends(_is_operator)]
ViewOfStatus = Annotated[StatusView, Depends(_status_view)]
