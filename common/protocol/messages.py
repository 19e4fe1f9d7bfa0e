"""Documents and frames between node, shuffler and coordinator: types only, no storage.

Bulk data is raw bytes of fixed-size frames; pydantic never sees it. An upload is k frames of
lease id (16 bytes) || sealed report. A batch is handed over as n * L sealed messages end to end.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from riffle.common.protocol.descriptor import Document, Hex16, Hex32, Name
from riffle.common.protocol.errors import RemoteError

LEASE_BYTES = 16
MAX_USERS_A_LEASE = 2_048
OCTETS = "application/octet-stream"
SIGNATURE_HEADER = "Riffle-Signature"
BATCH_KEY_HEADER = "Riffle-Batch-Key"
"""With an upload: `common.protocol.descriptor.key_id` of the batch key that its reports are sealed
to.
"""
DIGEST_HEADER = "Riffle-Messages-Digest"

BatchState = Literal["open", "sealed", "forwarded", "acknowledged", "erased", "abandoned"]


class _Item:
    """Base of what documents hold by the thousand: strict where it is read, as a `Document`.

    Who writes it makes it unchecked, and not frozen: either would cost more than all else it goes
    through.
    """

    __slots__ = ()
    __pydantic_config__ = Document.model_config


class ShufflerIdentity(Document):
    """Answer of ``GET /v1/identity``: to be compared with what was pinned, never to pin from."""

    shuffler_id: Name
    public_key: Hex32


class OpenBatch(Document):
    """A batch that still has free slots."""

    batch_id: Hex16
    free_slots: int = Field(ge=0)


class OpenBatches(Document):
    """Answer of ``GET /v1/batches``."""

    batches: tuple[OpenBatch, ...]


class LeaseRequest(Document):
    """Ask for a slot for each of these users."""

    users: tuple[Hex16, ...] = Field(min_length=1, max_length=MAX_USERS_A_LEASE)


@dataclass(slots=True)
class Lease(_Item):
    """A slot in a batch, one user's until ``expires_at`` (seconds since 1970, UTC)."""

    user: Hex16
    slot: Annotated[int, Field(ge=0)]
    lease: Hex16
    expires_at: Annotated[int, Field(ge=0)]


@dataclass(slots=True)
class Refusal(_Item):
    """Why a user got no slot: a problem slug."""

    user: Hex16
    problem: str


class LeaseReply(Document):
    """Granted and refused, together every user asked for."""

    leases: tuple[Lease, ...]
    refused: tuple[Refusal, ...]


@dataclass(slots=True)
class UploadResult(_Item):
    """What became of one frame: ``accepted``, ``replayed`` (the same report again), or a slug."""

    lease: Hex16
    outcome: str


class UploadReply(Document):
    """One result a frame, in the order of the frames."""

    results: tuple[UploadResult, ...]


class BatchStatus(Document):
    """What is known of a batch: all of it to the shuffler's operator, less to the coordinator.

    To the coordinator everything but ``state`` and ``n`` is null while the batch is open, since
    numbers that grow are a clock of single reports; later it gets ``episodes`` too.
    """

    batch_id: Hex16
    state: BatchState
    n: int
    reports: int | None = Field(default=None, description="reports stored; operator only")
    leased: int | None = Field(
        default=None, description="live leases without a report; operator only"
    )
    episodes: int | None = Field(
        default=None, description="leases ever granted, an upper bound of episodes executed"
    )
    dropped: dict[str, int] | None = Field(
        default=None, description="frames refused, by problem slug; operator only"
    )


class Latencies(Document):
    """How long uploads took, in seconds; quantiles are upper edges of buckets 19 % wide."""

    uploads: int
    p50: float
    p95: float
    p99: float


class MessageFlow(Document):
    """Messages of accepted reports: accepted = held + forwarded + dropped."""

    accepted: int
    held: int
    forwarded: int
    dropped: int


class Conservation(Document):
    """What became of everything that was sent to a batch. Counts are reports, but for `messages`.

    While the batch is open the coordinator gets nulls and at most ``fill_tenths``.
    """

    batch_id: Hex16
    state: BatchState
    n: int
    messages_a_report: int = Field(description="L")
    fill_tenths: int | None = Field(default=None, description="reports in tenths of n, while open")
    accepted: int | None = None
    held: int | None = Field(default=None, description="stored, neither handed over nor dropped")
    forwarded: int | None = Field(default=None, description="handed to the analyzer")
    dropped: dict[str, int] | None = Field(
        default=None, description="accepted and never handed over, by what ended the batch"
    )
    rejected: dict[str, int] | None = Field(
        default=None, description="frames not accepted, by problem slug, and repetitions"
    )
    messages: MessageFlow | None = None
    upload_seconds: Latencies | None = None
    balanced: bool = Field(description="accepted = held + forwarded + dropped, to the message")


class Acknowledgement(Document):
    """The analyzer has these messages durably counted; the shuffler may erase."""

    messages_sha256: Hex32


class EnrolRequest(Document):
    """Enrol a node that may report for at most ``users`` users, over all batches and runs."""

    name: str = Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
    users: int = Field(ge=1, le=1 << 40)


class Enrolment(Document):
    """A node's credential, shown once; the shuffler keeps only a hash of the token."""

    node_id: Hex16
    token: str = Field(repr=False)


def frame(lease: str, sealed_report: bytes) -> bytes:
    """One frame of an upload."""
    return bytes.fromhex(lease) + sealed_report


def split_frames(body: bytes, report_bytes: int) -> tuple[list[str], list[memoryview]]:
    """Lease ids and sealed reports of all frames, in their order. The reports are parts of ``body``
    itself: megabytes that need not be copied.

    Raises:
        RemoteError: ``wrong-size``, when the body is empty or not a whole number of frames.
    """
    size = LEASE_BYTES + report_bytes
    if not body or len(body) % size:
        raise RemoteError(
            "wrong-size",
            f"an upload to this batch is a whole number of frames of {size} bytes, "
            f"not {len(body)} bytes",
        )
    whole, starts = memoryview(body), range(0, len(body), size)
    leases = [body[start : start + LEASE_BYTES].hex() for start in starts]
    return leases, [whole[start + LEASE_BYTES : start + size] for start in starts]
