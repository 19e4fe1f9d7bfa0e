"""Documents and frames that node, shuffler and coordinator exchange: types only, no storage.

Reports and messages are raw bytes of fixed size, which pydantic never sees. An upload is one or
more frames; a frame is lease id (16 bytes) || sealed report.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from riffle.common.protocol.descriptor import Document, Hex16, Hex32, Name
from riffle.common.protocol.errors import RemoteError

LEASE_BYTES = 16
MAX_USERS_A_LEASE = 2_048
MAX_NAMED = 4_096
"""The most failed messages of a batch that the coordinator names: a sample, if more fail."""
OCTETS = "application/octet-stream"
SIGNATURE_HEADER = "Riffle-Signature"
BATCH_KEY_HEADER = "Riffle-Batch-Key"
"""Header of an upload: the `key_id` of the batch key to which its reports are sealed."""
DIGEST_HEADER = "Riffle-Messages-Digest"

BatchState = Literal["open", "sealed", "forwarded", "acknowledged", "erased", "abandoned"]
DeclineReason = Literal["no-users", "over-limit", "too-slow"]
"""A node's reason to stop serving a batch: no users left, users at their limit, or a slow node."""
DECLINE_SECONDS = 20
"""A node repeats its reason at this interval while the reason holds."""


class _Item:
    """Base of items that occur by the thousand in a document.

    Parsing is as strict as for a `Document`. Constructors check nothing, and items are not frozen:
    checks and freezing would cost more than all other processing of an item.
    """

    __slots__ = ()
    __pydantic_config__ = Document.model_config


class ShufflerIdentity(Document):
    """The answer of ``GET /v1/identity``. Compare it with a pinned identity, and never pin it."""

    shuffler_id: Name
    public_key: Hex32


class OpenBatch(Document):
    """An open batch.

    ``free_slots`` is rounded up to a multiple of ceil(n / 10), but is at most n. If n is below 100,
    ``free_slots`` is 0 or n.
    """

    batch_id: Hex16
    free_slots: int = Field(ge=0)


class OpenBatches(Document):
    """The answer of ``GET /v1/batches``."""

    batches: tuple[OpenBatch, ...]
    lease_seconds: int = Field(ge=1, description="life of a lease that is granted now")


class DeclineNotice(Document):
    """A node's notice that it has stopped serving an open batch."""

    reason: DeclineReason


class Deposits(Document):
    """The answer of ``GET /v1/deposits``: the ids of all open batches."""

    open: tuple[Hex16, ...]


class LeaseRequest(Document):
    """A request for one slot for each of ``users``."""

    users: tuple[Hex16, ...] = Field(min_length=1, max_length=MAX_USERS_A_LEASE)


@dataclass(slots=True)
class Lease(_Item):
    """One user's right to a slot until ``expires_at`` (seconds since 1970, UTC)."""

    user: Hex16
    slot: Annotated[int, Field(ge=0)]
    lease: Hex16
    expires_at: Annotated[int, Field(ge=0)]


@dataclass(slots=True)
class Refusal(_Item):
    """The reason why a user got no slot: a problem slug."""

    user: Hex16
    problem: str


class LeaseReply(Document):
    """The answer to a request for slots: one lease or one refusal for each user."""

    leases: tuple[Lease, ...]
    refused: tuple[Refusal, ...]


@dataclass(slots=True)
class UploadResult(_Item):
    """The outcome of a frame: ``accepted``, ``replayed`` (a report sent again), or a problem."""

    lease: Hex16
    outcome: str


class UploadReply(Document):
    """The answer to an upload: one result for each frame, in the order of the frames."""

    results: tuple[UploadResult, ...]


class BatchStatus(Document):
    """The state of a batch, complete for the shuffler's operator and partial for the coordinator.

    While the batch is open, the coordinator gets ``state``, ``n`` and ``declined``; later, also
    ``episodes``. A count of reports would show the coordinator when each report arrives.
    """

    batch_id: Hex16
    state: BatchState
    n: int
    reports: int | None = Field(default=None, description="reports stored; operator only")
    leased: int | None = Field(
        default=None, description="live leases without a report; operator only"
    )
    episodes: int | None = Field(
        default=None, description="n, or 0 if no slot was leased; lapsed leases do not count"
    )
    dropped: dict[str, int] | None = Field(
        default=None, description="frames refused, by problem slug; operator only"
    )
    declined: tuple[DeclineReason, ...] = Field(
        default=(), description="sorted reasons why nodes now decline the open batch"
    )


class MessageFlow(Document):
    """The messages of accepted reports: accepted = held + forwarded + dropped."""

    accepted: int
    held: int
    forwarded: int
    dropped: int


class Conservation(Document):
    """The account of everything sent to a batch. Counts are in reports, except in `messages`.

    For a complete batch the coordinator gets the numbers that follow from state, n and L. For an
    open or abandoned batch the coordinator gets at most ``fill_tenths``; the other counts are null.
    """

    batch_id: Hex16
    state: BatchState
    n: int
    messages_a_report: int = Field(description="L")
    fill_tenths: int | None = Field(
        default=None, description="reports of an open or abandoned batch, in tenths of n"
    )
    accepted: int | None = None
    held: int | None = Field(default=None, description="stored, neither handed over nor dropped")
    forwarded: int | None = Field(default=None, description="handed to the analyzer")
    dropped: dict[str, int] | None = Field(
        default=None,
        description="accepted but never handed over, by the event that ended the batch",
    )
    rejected: dict[str, int] | None = Field(
        default=None,
        description="frames neither accepted nor replayed, by problem slug; operator only",
    )
    messages: MessageFlow | None = None
    balanced: bool = Field(
        description="whether the messages balance: accepted = held + forwarded + dropped"
    )


class Acknowledgement(Document):
    """A notice that the analyzer has durably counted a batch, so the shuffler may erase it.

    ``failed`` has the places, in the order of the hand-over, of the messages that did not open or
    named no counter. The list is the coordinator's unproven claim.
    """

    messages_sha256: Hex32
    failed: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), max_length=MAX_NAMED)


class EnrolRequest(Document):
    """A request to enrol a node for at most ``users`` users, over all batches and runs."""

    name: str = Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
    owner: Name = Field(
        description="the node's owner; all nodes of an owner together have one share"
    )
    users: int = Field(ge=1, le=1 << 40)


class Enrolment(Document):
    """A node's credential, shown once; the shuffler keeps only a hash of the token."""

    node_id: Hex16
    owner: Name
    token: str = Field(repr=False)


class NodeSummary(Document):
    """A node, for the shuffler's operator; times are seconds since 1970, UTC."""

    node_id: Hex16
    name: str
    owner: str
    enrolled_at: int
    revoked_at: int | None
    users: int = Field(description="distinct users that it was enrolled for")
    users_left: int = Field(description="distinct users that it may still name")
    reports: int = Field(description="reports accepted, over all batches")
    lapsed: int = Field(description="leases that ended without a report")
    failed_messages: int = Field(description="failed messages, as coordinators claim")
    failed_batches: int = Field(description="batches with failed messages")


class NodeList(Document):
    """The answer of ``GET /v1/nodes``, in the order of enrolment."""

    nodes: tuple[NodeSummary, ...]


def frame(lease: str, sealed_report: bytes) -> bytes:
    """Returns one frame of an upload."""
    return bytes.fromhex(lease) + sealed_report


def split_frames(body: bytes, report_bytes: int) -> tuple[list[str], list[memoryview]]:
    """Returns the lease ids and the sealed reports of all frames, in their order.

    The reports are views of ``body``. Raises RemoteError ``wrong-size`` if the body is empty or not
    a whole number of frames.
    """
    size = LEASE_BYTES + report_bytes
    if not body or len(body) % size:
        frames = f"a whole number of frames of {size} bytes"
        detail = f"an upload to this batch is {frames}, not {len(body)} bytes"
        raise RemoteError("wrong-size", detail)
    view, starts = memoryview(body), range(0, len(body), size)
    leases = [body[start : start + LEASE_BYTES].hex() for start in starts]
    return leases, [view[start + LEASE_BYTES : start + size] for start in starts]
