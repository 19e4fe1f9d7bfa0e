"""The shuffler's three kinds of caller, told apart by their token, and what they may ask for.

Nodes are known by their credential in the store, the coordinator, the operator and who reads the
metrics by the hash of their token in the settings.
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
"""All replicas together; each run waits for its batch in a long poll."""
OPERATOR = RateLimit(requests=200.0, reports=1.0, at_once=256)

View = Callable[[BatchStatus], BatchStatus]


def doors(settings: Settings, strangers: FailedAttempts) -> Authenticator:
    """The callers that the settings know."""
    keys = {
        "coordinator": Credential(
            settings.coordinator_hash(), COORDINATOR, "coordinator/shuffler_token"
        ),
        "operator": Credential(settings.operator_hash(), OPERATOR, "operator/shuffler_token"),
    }
    if (reader := settings.metrics_hash()) is not None:
        keys["metrics"] = Credential(reader, OPERATOR, "operator/metrics_token")
    return Authenticator(strangers, keys)


def shuffler_of(request: Request) -> Shuffler:
    """The shuffler behind an app."""
    core = request.app.state.shuffler
    assert isinstance(core, Shuffler)  # noqa: S101 -- narrows starlette's untyped state
    return core


def strangers_of(request: Request) -> FailedAttempts:
    """The bucket of failed authentications of an app."""
    strangers = request.app.state.strangers
    assert isinstance(strangers, FailedAttempts)  # noqa: S101
    return strangers


async def doors_of(request: Request) -> Authenticator:
    """The doors of an app."""
    found = request.app.state.doors
    assert isinstance(found, Authenticator)  # noqa: S101
    return found


async def _shuffler(request: Request) -> Shuffler:
    """See `shuffler_of`."""
    return shuffler_of(request)


Core = Annotated[Shuffler, Depends(_shuffler)]
_Doors = Annotated[Authenticator, Depends(doors_of)]


@asynccontextmanager
async def node_of(request: Request, token: str) -> AsyncIterator[str]:
    """Node id of the caller, within its limits while the request lasts.

    Raises:
        RemoteError: ``unauthorized``.
        LocalError: ``too-many-requests``.
    """
    core, strangers = shuffler_of(request), strangers_of(request)
    with strangers.attempt(token):
        node = await core.admission.node(token)
    with core.callers.request(node, asyncio.get_running_loop().time()):
        yield node


async def _coordinator(token: Token, doors: _Doors) -> AsyncIterator[None]:
    """Refuse everyone but the coordinator."""
    with doors.authenticate(token, "coordinator"):
        yield


async def _operator(token: Token, doors: _Doors) -> AsyncIterator[None]:
    """Refuse everyone but the operator."""
    with doors.authenticate(token, "operator"):
        yield


async def _metrics(token: Token, doors: _Doors) -> AsyncIterator[None]:
    """Refuse everyone but the operator and who reads the metrics."""
    with doors.authenticate(token, "operator", "metrics"):
        yield


@contextmanager
def sees_all(doors: Authenticator, token: str) -> Iterator[bool]:
    """Whether the caller is the operator and not the coordinator; refuse nodes and strangers.

    Whoever holds the coordinator's token gets the coordinator's view, whatever else it may be.
    """
    with doors.authenticate(token, "coordinator", "operator") as who:
        yield who == "operator"


@contextmanager
def seen(doors: Authenticator, token: str) -> Iterator[View]:
    """What a caller may see of a status; see `sees_all`."""
    with sees_all(doors, token) as whole:
        yield (lambda status: status) if whole else for_coordinator


async def _sees_all(token: Token, doors: _Doors) -> AsyncIterator[bool]:
    """See `sees_all`."""
    with sees_all(doors, token) as whole:
        yield whole


async def _view(token: Token, doors: _Doors) -> AsyncIterator[View]:
    """See `seen`."""
    with seen(doors, token) as view:
        yield view


CoordinatorOnly = Depends(_coordinator)
OperatorOnly = Depends(_operator)
MetricsOnly = Depends(_metrics)
SeesAll = Annotated[bool, Depends(_sees_all)]
Seen = Annotated[View, Depends(_view)]
