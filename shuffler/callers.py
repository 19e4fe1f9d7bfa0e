"""Tells callers apart by their tokens. Decides which routes a caller may use, and how often.

The store has the hashes of nodes' tokens. The settings have the hashes of three other tokens: for
the coordinator, for the operator and for readers of the metrics.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, cast

from fastapi import Depends, Request

from riffle.common.protocol.wire import BatchStatus
from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit, only
from riffle.common.server.service import token_of
from riffle.shuffler.core import Shuffler
from riffle.shuffler.rules import for_coordinator
from riffle.shuffler.settings import Settings

COORDINATOR = RateLimit(requests=500.0, reports=1.0, at_once=4_096)
"""The limit of all coordinator replicas together. Each run holds a long poll open."""
OPERATOR = RateLimit(requests=200.0, reports=1.0, at_once=256)


def authenticator(settings: Settings) -> Authenticator:
    """Returns the authenticator of all callers except nodes, with the hashes from the settings."""
    keys = {
        "coordinator": Credential(
            settings.coordinator_hash(), COORDINATOR, "coordinator/shuffler_token"
        ),
        "operator": Credential(settings.operator_hash(), OPERATOR, "operator/shuffler_token"),
    }
    if (reader := settings.metrics_hash()) is not None:
        keys["metrics"] = Credential(reader, OPERATOR, "operator/shuffler_metrics_token")
    return Authenticator(FailedAttempts(), keys)


def shuffler_of(request: Request) -> Shuffler:
    """Returns the shuffler of an app."""
    return cast("Shuffler", request.app.state.shuffler)


@asynccontextmanager
async def node_of(request: Request, token: str) -> AsyncIterator[str]:
    """Yields the caller's node id, and counts the request toward the node's limits.

    Raises RemoteError ``unauthorized`` or LocalError ``too-many-requests``.
    """
    core = shuffler_of(request)
    with request.app.state.authenticator.failures.attempt(token):
        node = await core.admission.node(token)
    request.state.known = True
    with core.callers.request(node, asyncio.get_running_loop().time()):
        yield node


COORDINATOR_OR_OPERATOR = ("coordinator", "operator")
"""Callers of shared routes, which tell the coordinator less than the operator."""


def visible_status(status: BatchStatus, caller: str) -> BatchStatus:
    """Returns the part of a batch's status that a caller may see."""
    return status if caller == "operator" else for_coordinator(status)


async def _core(request: Request) -> Shuffler:
    return shuffler_of(request)


Core = Annotated[Shuffler, Depends(_core)]
NodeToken = Annotated[str, token_of("node")]
CoordinatorToken = Annotated[str, token_of("coordinator")]
EitherToken = Annotated[str, token_of(*COORDINATOR_OR_OPERATOR)]
CoordinatorOnly = only("coordinator")
OperatorOnly = only("operator")
MetricsOnly = only("operator", "metrics")
CoordinatorOrOperator = Annotated[str, only(*COORDINATOR_OR_OPERATOR)]
