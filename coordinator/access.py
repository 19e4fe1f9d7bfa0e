"""What routes share: the operator's token, and the coordinator that they translate for."""

from typing import Annotated, cast

from fastapi import Depends, Request

from common.service import require_token
from coordinator.runs import Coordinator


def authorized(request: Request) -> None:
    """Raise RemoteError ``unauthorized`` unless the operator asks."""
    require_token(request, request.app.state.operator_hash)


def _coordinator(request: Request) -> Coordinator:
    return cast("Coordinator", request.app.state.coordinator)


Service = Annotated[Coordinator, Depends(_coordinator)]
