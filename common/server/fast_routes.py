"""Some routes without the framework's way to them: its matching, its injection and the stacks that
it opens for both take half a millisecond a request, more than all else of one that is small.

Such a route is declared as any other, so it is documented as any other, and its function takes what
`Straight` fills in: the path's parameter, all of them ids, the request, the caller's token, and if
it asks for one its ``query``, a model. A request that does not fit, as one whose id is none, goes
the framework's way and is answered there.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any, cast, get_args

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from riffle.common.protocol.descriptor import HEX16
from riffle.common.protocol.errors import RiffleError
from riffle.common.server.service import problem_answer, token_of

Endpoint = Callable[..., Awaitable[Response]]
"""``(*ids, request=..., token=...)``: the parameters of its path by name, each a `Hex16`; and
``query``, annotated as ``Annotated[Model, Query()]``."""


class Straight:
    """ASGI middleware: answers requests for ``endpoints`` of ``router`` itself."""

    def __init__(self, app: ASGIApp, router: APIRouter, endpoints: Collection[Endpoint]) -> None:
        self._app = app
        self._routes = [
            (_pattern(route), route, _query_model(route))
            for route in router.routes
            if isinstance(route, APIRoute) and route.endpoint in endpoints
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on what is for others."""
        found = self._fitting(scope)
        if found is None:
            await self._app(scope, receive, send)
            return
        route, given = found
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request=request, token=token_of(request), **given)
        except RiffleError as error:
            response = problem_answer(request, error)
        await response(scope, receive, send)

    def _fitting(self, scope: Scope) -> tuple[APIRoute, dict[str, Any]] | None:
        """The route that a request is for, and the ids in its path with its query."""
        if scope["type"] != "http":
            return None
        for pattern, route, model in self._routes:
            if scope["method"] in (route.methods or ()) and (
                match := pattern.fullmatch(scope["path"])
            ):
                try:
                    return route, match.groupdict() | _query(scope, model)
                except ValidationError:
                    return None
        return None


def _query_model(route: APIRoute) -> type[BaseModel] | None:
    """The model of the query that the route's function asks for."""
    asked = inspect.signature(route.endpoint).parameters.get("query")
    return None if asked is None else cast("type[BaseModel]", get_args(asked.annotation)[0])


def _query(scope: Scope, model: type[BaseModel] | None) -> dict[str, BaseModel]:
    """A request's query, for the route's function."""
    if model is None:
        return {}
    return {"query": model.model_validate(dict(QueryParams(scope["query_string"])))}


def _pattern(route: APIRoute) -> re.Pattern[str]:
    """The route's path, with an id for each of its parameters."""
    return re.compile(re.sub(r"\{(\w+)\}", rf"(?P<\1>{HEX16})", route.path))
