"""What routes share: the operator's token, and the coordinator that they translate for."""

import time
from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import Depends, Request

from common.limits import Allowance
from common.service import Token, require_token
from coordinator.runs import Coordinator

OPERATOR = Allowance(requests=200.0, reports=1.0, at_once=256)
"""Requests a second and at once under the operator's token; the coordinator takes no reports."""


async def authorized(request: Request, token: Token) -> AsyncIterator[None]:
    """Raise RemoteError ``unauthorized`` unless the operator asks, not too often."""
    require_token(token, request.app.state.operator_hash)
    with request.app.state.callers.request("operator", time.monotonic()):
        yield


def _coordinator(request: Request) -> Coordinator:
    return cast("Coordinator", request.app.state.coordinator)


Service = Annotated[Coordinator, Depends(_coordinator)]
