"""What routes share: the operator's token, and the coordinator that they translate for."""

from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import Depends, Request

from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit
from riffle.common.server.service import Token
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.settings import Settings

OPERATOR = RateLimit(requests=200.0, reports=1.0, at_once=256)
"""Requests a second and at once under the operator's token; the coordinator takes no reports."""


async def authorized(request: Request, token: Token) -> AsyncIterator[None]:
    """Raise RemoteError ``unauthorized`` unless the operator asks, not too often."""
    with request.app.state.doors.authenticate(token, "operator"):
        yield


async def metrics_reader(request: Request, token: Token) -> AsyncIterator[None]:
    """Raise RemoteError ``unauthorized`` unless the operator asks, or who reads the metrics."""
    with request.app.state.doors.authenticate(token, "operator", "metrics"):
        yield


def doors(settings: Settings) -> Authenticator:
    """The callers that the settings know."""
    keys = {
        "operator": Credential(settings.operator_hash(), OPERATOR, "operator/coordinator_token")
    }
    if (reader := settings.metrics_hash()) is not None:
        keys["metrics"] = Credential(reader, OPERATOR, "operator/metrics_token")
    return Authenticator(FailedAttempts(), keys)


async def _coordinator(request: Request) -> Coordinator:
    return cast("Coordinator", request.app.state.coordinator)


Service = Annotated[Coordinator, Depends(_coordinator)]
