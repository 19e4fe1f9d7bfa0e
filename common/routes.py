"""Which route a request is for: what may be told of it where no asker's own words may stand."""

from starlette.types import Scope


def asked(scope: Scope) -> tuple[str, str] | None:
    """Method and template of a request's route.

    None: it has no such address, or none with this method; both could be anything then.
    """
    route, method = scope.get("route"), str(scope["method"])
    if route is None or method not in route.methods:
        return None
    return method, str(route.path)
