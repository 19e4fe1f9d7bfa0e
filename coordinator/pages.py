"""The operator's page: static files of this package, and the headers that confine them.

The page is one document whose scripts and styles are files beside it. It asks the REST routes like
any other client, with the operator's token, so the files themselves need none. The policy allows
nothing inline, nothing from elsewhere, no frames and no HTML made from strings.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Response

from riffle.common.errors import RemoteError

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The page itself."""
    return _answer("index.html", if_none_match)


@router.get("/page/{name:path}")
async def file(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """One of its files."""
    return _answer(name, if_none_match)


def _answer(name: str, known: str | None) -> Response:
    # Only names that were found in the folder are ever opened: no path of a client's is.
    path = _files().get(name)
    if path is None:
        raise RemoteError("not-found", "the page has no such file")
    content = path.read_bytes()
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if known == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[path.suffix], headers=headers)


@cache
def _files() -> dict[str, Path]:
    found = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path for path in found}
