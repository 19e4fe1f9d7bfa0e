"""Some routes without the framework's way to them: its matching, its injection and the stacks that
it opens for both take half a millisecond a request, more than all else of one that is small.

Such a route is declared as any other, so it is documented as any other, and its function takes what
`Straight` fills in: the path's parameter, all of them ids, the request, and the caller's token. A
request that does not fit, as one whose id is none, goes the framework's way and is answered there.
"""

import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.descriptor import HEX16
from common.errors import RiffleError
from common.service import problem_answer, token_of

Endpoint = Callable[..., Awaitable[Response]]
"""``(*ids, request=..., token=...)``: the parameters of its path by name, each a `Hex16`."""


class Straight:
    """ASGI middleware: answers requests for ``endpoints`` of ``router`` itself."""

    def __init__(self, app: ASGIApp, router: APIRouter, endpoints: Collection[Endpoint]) -> None:
        self._app = app
        self._routes = [
            (_pattern(route), route)
            for route in router.routes
            if isinstance(route, APIRoute) and route.endpoint in endpoints
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on what is for others."""
        found = self._fitting(scope)
        if found is None:
            await self._app(scope, receive, send)
            return
        route, ids = found
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request=request, token=token_of(request), **ids)
        except RiffleError as error:
            response = problem_answer(request, error)
        await response(scope, receive, send)

    def _fitting(self, scope: Scope) -> tuple[APIRoute, dict[str, Any]] | None:
        """The route that a request is for, and the ids in its path."""
        if scope["type"] != "http":
            return None
        for pattern, route in self._routes:
            if scope["method"] in (route.methods or ()) and (
                match := pattern.fullmatch(scope["path"])
            ):
                return route, match.groupdict()
        return None


def _pattern(route: APIRoute) -> re.Pattern[str]:
    """The route's path, with an id for each of its parameters."""
    return re.compile(re.sub(r"\{(\w+)\}", rf"(?P<\1>{HEX16})", route.path))
