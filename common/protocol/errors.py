"""Two kinds of error, and the table that maps both kinds to HTTP problem documents (RFC 9457).

`LocalError`: this process was configured or used wrongly, or cannot do its work now.
`RemoteError`: a peer sent something that is wrong or not allowed.

Every error has a problem slug, and every slug has one title and one status. A problem's type is
``urn:riffle:problem:<slug>``; the meaning of a type never changes.
"""

import json
import math
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

URN = "urn:riffle:problem:"
MAX_DETAIL_LENGTH = 500
LONGEST_WAIT_SECONDS = 300.0
MEDIA_TYPE = "application/problem+json"

PROBLEMS: dict[str, tuple[HTTPStatus, str]] = {
    "malformed": (HTTPStatus.BAD_REQUEST, "The request is not understood"),
    "invalid-spec": (HTTPStatus.UNPROCESSABLE_ENTITY, "The run's specification is not valid"),
    "batch-too-small": (HTTPStatus.UNPROCESSABLE_ENTITY, "The batch is too small"),
    "budget-exceeded": (HTTPStatus.CONFLICT, "The run's privacy budget would be exceeded"),
    "unauthorized": (HTTPStatus.UNAUTHORIZED, "A valid token is needed"),
    "forbidden": (HTTPStatus.FORBIDDEN, "This token may not do that"),
    "bad-signature": (HTTPStatus.FORBIDDEN, "The signature is missing or wrong"),
    "wrong-recipient": (HTTPStatus.UNPROCESSABLE_ENTITY, "The descriptor names someone else"),
    "weak-guarantee": (HTTPStatus.UNPROCESSABLE_ENTITY, "The guarantee is too weak"),
    "trust-refused": (HTTPStatus.FORBIDDEN, "The trust model is not allowed here"),
    "epoch-refused": (HTTPStatus.FORBIDDEN, "People may not report this often here"),
    "test-entry-refused": (HTTPStatus.FORBIDDEN, "Seeded noise is refused here"),
    "unknown-run": (HTTPStatus.NOT_FOUND, "There is no such run"),
    "unknown-batch": (HTTPStatus.NOT_FOUND, "There is no such batch"),
    "unknown-deployment": (HTTPStatus.NOT_FOUND, "There is no such deployment"),
    "unknown-lease": (HTTPStatus.NOT_FOUND, "There is no such lease"),
    "descriptor-conflict": (HTTPStatus.CONFLICT, "The batch id already has another descriptor"),
    "batch-full": (HTTPStatus.CONFLICT, "The batch has no free slot"),
    "batch-not-ready": (HTTPStatus.CONFLICT, "The batch is not full yet"),
    "wrong-state": (HTTPStatus.CONFLICT, "Not possible in the present state"),
    "already-reported": (HTTPStatus.CONFLICT, "This user has reported before"),
    "user-unavailable": (HTTPStatus.CONFLICT, "This user gets no slot now"),
    "quota-exceeded": (HTTPStatus.FORBIDDEN, "The node serves more users than it was enrolled for"),
    "share-exceeded": (
        HTTPStatus.CONFLICT,
        "The node's owner may take no more slots in this batch now",
    ),
    "late": (HTTPStatus.GONE, "The batch or the lease is over"),
    "wrong-size": (HTTPStatus.UNPROCESSABLE_ENTITY, "The size is wrong"),
    "wrong-key": (HTTPStatus.UNPROCESSABLE_ENTITY, "The report does not open"),
    "reused-key": (HTTPStatus.CONFLICT, "Another report has this key"),
    "outdated-key": (HTTPStatus.CONFLICT, "The key is not the one in use here; fetch it again"),
    "too-large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large"),
    "head-too-large": (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The head is too large"),
    "too-slow": (HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time; send it again"),
    "too-many-requests": (HTTPStatus.TOO_MANY_REQUESTS, "Slow down"),
    "not-found": (HTTPStatus.NOT_FOUND, "There is nothing at this address"),
    "method-not-allowed": (HTTPStatus.METHOD_NOT_ALLOWED, "Not possible at this address"),
    "unavailable": (HTTPStatus.SERVICE_UNAVAILABLE, "Not possible now, try again"),
    "internal": (HTTPStatus.INTERNAL_SERVER_ERROR, "Something is wrong here; nothing was changed"),
}


class RiffleError(Exception):
    """An error with a stable problem slug and a sentence for human readers.

    The sentence may quote a peer, so it is one line of at most MAX_DETAIL_LENGTH characters.
    """

    def __init__(self, slug: str, detail: str, *, retry_after: int | None = None) -> None:
        detail = one_line(detail, MAX_DETAIL_LENGTH)
        super().__init__(slug, detail)  # a pickled error keeps these arguments
        self.slug = slug
        self.detail = detail
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.detail

    @property
    def status(self) -> HTTPStatus:
        """The slug's HTTP status."""
        return PROBLEMS[self.slug][0]

    def document(self) -> dict[str, Any]:
        """Returns the problem document (RFC 9457)."""
        status, title = PROBLEMS[self.slug]
        kind, detail = URN + self.slug, self.detail
        return {"type": kind, "title": title, "status": int(status), "detail": detail}


def one_line(text: str, most: int = 300) -> str:
    """Returns untrusted text as one printable line, so that the text cannot forge log lines."""
    line = "".join(c if c.isprintable() else " " for c in text[: 2 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


class LocalError(RiffleError):
    """An error on this side: wrong configuration or use, or no answer from a store or peer."""


class RemoteError(RiffleError):
    """An error of a peer that sent something malformed, unsigned, late, repeated or not allowed."""


def is_temporary(status: int) -> bool:
    """Returns whether an answer's status says that the same request may succeed later."""
    temporary = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
    return status in temporary or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def parse_retry_after(value: str | None, now: datetime) -> float:
    """Returns the seconds of a ``Retry-After`` header (0 without one), at most five minutes."""
    if value is None:
        return 0.0
    try:
        seconds = float(min(max(int(value), 0), LONGEST_WAIT_SECONDS))
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT_SECONDS)


def read_refusal(
    peer: str, status: int, body: bytes, retry_after: str | None, now: datetime
) -> RiffleError:
    """Returns the error for an unsuccessful answer of ``peer``.

    A deliberate refusal is a problem document with one of Riffle's slugs and that slug's status. If
    this status is not temporary, the refusal becomes a RemoteError. Every other answer, such as a
    proxy's page, becomes LocalError ``unavailable``. ``retry_after`` is the Retry-After header.
    """
    document = problem_document(body)
    slug = problem_slug(document)
    detail = one_line(str(document.get("detail", PROBLEMS[slug][1])))
    # FastAPI's own phrase: the route is unknown, so the peer is another service or an older Riffle.
    unrouted = detail in {HTTPStatus.NOT_FOUND.phrase, HTTPStatus.METHOD_NOT_ALLOWED.phrase}
    meant = PROBLEMS[slug][0] == status and not unrouted
    if meant and not is_temporary(status):
        return RemoteError(slug, f"{peer} refused: {detail}")
    seconds = parse_retry_after(retry_after, now)
    sentence = f"{peer} cannot answer: {detail}" if meant else foreign_answer(peer, status)
    return LocalError("unavailable", sentence, retry_after=math.ceil(seconds) or None)


def foreign_answer(peer: str, status: int) -> str:
    """Returns the sentence that says that an answer did not come from ``peer``."""
    return (
        f"a server that is not {peer} answered with status {status}: "
        "a proxy in between, or another service?"
    )


def problem_document(body: bytes) -> dict[str, Any]:
    """Returns a peer's problem document; it is empty if the body is not a JSON object."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}


def problem_slug(document: dict[str, Any]) -> str:
    """Returns the slug of a peer's problem document, or ``internal`` if the slug is unknown."""
    kind = document.get("type")
    slug = kind.removeprefix(URN) if isinstance(kind, str) else ""
    return slug if slug in PROBLEMS else "internal"
