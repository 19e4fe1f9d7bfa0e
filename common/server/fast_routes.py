"""Fast path for hot routes: skips FastAPI's routing and dependency injection.

Routing and injection cost more than all other work of a small request. `FastRoutes` calls the
route's function with the path's parameters (all are ids), the request and the caller's token. If
the function has a parameter ``query``, it also gets a model of the query string. FastAPI answers
every other request, and requests to fast routes with a malformed id or query.
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
from riffle.common.server.service import bearer_token, problem_answer

Endpoint = Callable[..., Awaitable[Response]]
"""A route's function. A parameter ``query`` must be annotated as ``Annotated[Model, Query()]``."""


class FastRoutes:
    """ASGI middleware that itself answers requests for the ``endpoints`` of ``router``."""

    def __init__(self, app: ASGIApp, router: APIRouter, endpoints: Collection[Endpoint]) -> None:
        self._app = app
        self._routes = [
            # The pattern matches every path parameter as an id.
            (
                re.compile(re.sub(r"\{(\w+)\}", rf"(?P<\1>{HEX16})", route.path)),
                route,
                _query_model(route),
            )
            for route in router.routes
            if isinstance(route, APIRoute) and route.endpoint in endpoints
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or passes it on if its route is not a fast route."""
        match = self._match(scope)
        if match is None:
            await self._app(scope, receive, send)
            return
        route, arguments = match
        scope["route"] = route
        request = Request(scope, receive)
        try:
            token = await bearer_token(request)
            response = await route.endpoint(request=request, token=token, **arguments)
        except RiffleError as error:
            response = problem_answer(scope, error)
        await response(scope, receive, send)

    def _match(self, scope: Scope) -> tuple[APIRoute, dict[str, Any]] | None:
        """Returns the route, the ids in its path and the query; None if FastAPI must answer."""
        if scope["type"] != "http":
            return None
        for pattern, route, model in self._routes:
            if scope["method"] in (route.methods or ()) and (
                match := pattern.fullmatch(scope["path"])
            ):
                arguments: dict[str, Any] = match.groupdict()
                if model is not None:
                    values = dict(QueryParams(scope["query_string"]))
                    try:
                        arguments["query"] = model.model_validate(values)
                    except ValidationError:
                        return None
                return route, arguments
        return None


def _query_model(route: APIRoute) -> type[BaseModel] | None:
    query = inspect.signature(route.endpoint).parameters.get("query")
    return None if query is None else cast("type[BaseModel]", get_args(query.annotation)[0])
