"""The rules by which the shuffler decides, without I/O, clock or randomness.

`accept_deposit` checks descriptors, `decide_lease` gives users slots, and `judge_frame` gives
frames their outcomes. A user reports once, over all batches and runs, because parallel composition
depends on this. If the operator allows epochs, a user reports once an epoch, and the node's owner
adds up how much privacy the user spends (`node_client.ledger`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from riffle.common.mechanism.parameters import DEFAULT_AGGREGATIONS, Aggregation, Guarantee, Trust
from riffle.common.protocol import verification
from riffle.common.protocol.descriptor import MAX_EPISODE_SECONDS, Context, parse, serialize
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.signatures import batch_id, key_id, verify_deposit
from riffle.common.protocol.wire import BatchState, BatchStatus

SMALLEST_SHOWN = 100
"""If n is at least this number, the coordinator sees how many tenths of a batch have reported.
Nodes then see how many tenths of its slots are free.
"""

REPORTS_A_LAPSE = 10
"""Reports that an owner needs for each lapsed lease. An owner with fewer must wait for slots."""

Outcome = Literal[
    "accepted",
    "replayed",
    "already-reported",
    "late",
    "unknown-lease",
    "wrong-key",
    "reused-key",
]
"""``reused-key``: in a batch of sums, an accepted report has the same public key E."""

Closed = Literal["late", "batch-full"]
Decision = Literal["grant", "user-unavailable", "quota-exceeded", "share-exceeded", "batch-full"]
Standing = Literal["live", "reported", "over"]
"""A ``live`` lease may report. A lease that is ``over`` has no report and gets none any more."""


@dataclass(frozen=True, slots=True)
class Demands:
    """The demands of this shuffler's operator on every batch."""

    shuffler_id: str
    coordinator_key: bytes
    guarantee: Guarantee
    trust_models: tuple[Trust, ...]
    smallest_n: int
    test_entry: bool
    max_batch_bytes: int
    max_batch_seconds: int = 31 * 86_400
    max_episode_seconds: int = MAX_EPISODE_SECONDS
    max_owner_share: float = 1.0
    epoch_seconds: int | None = None
    max_report_bytes: int = 64 << 20
    aggregations: tuple[Aggregation, ...] = DEFAULT_AGGREGATIONS
    analyzer_keys: frozenset[str] | None = None


@dataclass(slots=True)
class Room:
    """The room left for a node: new users in its quota, free slots, slots of its owner's share."""

    quota: int
    free_slots: int
    share: int

    def take(self, *, new_user: bool) -> None:
        """Takes a slot."""
        self.quota -= new_user
        self.free_slots -= 1
        self.share -= 1


Frame = tuple[str, bytes, bytes | None]
"""One frame of an upload: its lease, a digest of its sealed report, and the opened report. The
opened report is None if the outer seal does not open under the batch's key.
"""


def accept_deposit(
    data: bytes, signature: str | None, path_id: str, demands: Demands, now: int
) -> Context:
    """Returns the descriptor's context; raises RemoteError for the first broken rule."""
    if not signature:
        raise RemoteError("bad-signature", "the deposit carries no signature of the coordinator")
    verify_deposit(demands.coordinator_key, data, signature)
    context = parse(data)
    if len(data) > 2 * len(serialize(context.descriptor)):
        raise RemoteError("malformed", "more than half of the descriptor is blanks")
    _check_identity(context, path_id, demands, now)
    _check_promise(context, demands, now)
    return context


def check_batch_key(batch_key: str, used: str | None) -> None:
    """Raises RemoteError ``outdated-key`` if a node seals reports to a former key of the batch.

    A shuffler that has lost its store gives the batch a new key. ``used`` is the `key_id` of the
    node's key, if the node sent it.
    """
    if used not in (None, key_id(bytes.fromhex(batch_key))):
        raise RemoteError("outdated-key", "the batch has another key now: fetch its descriptor")


def _check_identity(context: Context, path_id: str, demands: Demands, now: int) -> None:
    d = context.descriptor
    if not path_id == d.batch_id == batch_id(d.run_id, d.deployment):
        raise RemoteError(
            "malformed", "the batch id must be that of the path and follow from run and deployment"
        )
    if d.shuffler_id != demands.shuffler_id:
        detail = f"this is shuffler {demands.shuffler_id}, not {d.shuffler_id}"
        raise RemoteError("wrong-recipient", detail)
    verification.check_expiry(d, now, demands.max_batch_seconds, demands.max_episode_seconds)
    if demands.analyzer_keys is not None and d.analyzer_key not in demands.analyzer_keys:
        raise RemoteError("outdated-key", f"analyzer key {d.analyzer_key_id} is not pinned here")


def _check_promise(context: Context, demands: Demands, now: int) -> None:
    d = context.descriptor
    verification.check_trust(d, demands.trust_models, demands.aggregations)
    if d.epoch_seconds != demands.epoch_seconds:
        theirs, ours = (
            "once in a lifetime" if seconds is None else f"once in {seconds} s"
            for seconds in (d.epoch_seconds, demands.epoch_seconds)
        )
        detail = f"the batch lets a person report {theirs}, this shuffler {ours}"
        raise RemoteError("epoch-refused", detail)
    verification.check_epoch(d, demands.epoch_seconds, now)
    if d.n < demands.smallest_n:
        detail = f"the batch has n = {d.n}; at least {demands.smallest_n} is accepted here"
        raise RemoteError("batch-too-small", detail)
    for what, size, most in (
        ("hand-over", d.release_bytes, demands.max_batch_bytes),
        ("report", d.report_bytes, demands.max_report_bytes),
    ):
        if size > most:
            detail = f"the batch's {what} has {size} bytes; at most {most} are accepted here"
            raise RemoteError("too-large", detail)
    if d.test_seed is not None and not demands.test_entry:
        detail = "seeded noise protects nobody; the test entry is closed here"
        raise RemoteError("test-entry-refused", detail)
    verification.check_guarantee(d, demands.guarantee, demands.max_owner_share)


def for_coordinator(status: BatchStatus) -> BatchStatus:
    """Returns the coordinator's part of a status, without numbers that change with every report.

    The coordinator also sees every message, so it must not learn when people report. ``declined``
    shows why nodes decline, but not which nodes or how many. No single report changes this field.
    """
    return BatchStatus(
        batch_id=status.batch_id,
        state=status.state,
        n=status.n,
        declined=status.declined,
        episodes=None if status.state == "open" else status.episodes,
    )


def waits_until(reports: int, lapses: Sequence[int], lease_seconds: int) -> int:
    """Returns the time at which an owner may lease slots of a batch again; 0 means now.

    ``lapses`` has three numbers: how many leases expired without a report, and when the first and
    the last of these leases expired. An owner with more than one lapse for every `REPORTS_A_LAPSE`
    reports must wait, so that others can take the slots. An owner who never sends a report waits 1,
    3, 7, ... times a lease's life. No wait is endless: a batch may need the reports of all owners.
    """
    lapsed, first, last = lapses
    return 2 * last - first + lease_seconds if lapsed * REPORTS_A_LAPSE > reports else 0


def closed_problem(state: BatchState, expires_at: int, now: int) -> Closed | None:
    """Returns the reason why a batch grants no slots at all, or None if it is open."""
    if state == "abandoned" or (state == "open" and expires_at <= now):
        return "late"
    return None if state == "open" else "batch-full"


def decide_lease(room: Room, *, new: bool, barred: bool) -> Decision:
    """Returns the decision on a user who has no live lease of this open batch at this node.

    ``new``: no node of the owner has named the user before. ``barred``: the user has reported, or
    has a live lease elsewhere. The refusal does not tell which of these is true. Only a node that
    has room learns whether a user is barred: to try out an id, the node must risk a slot.
    """
    if room.free_slots < 1:
        return "batch-full"
    if room.share < 1:
        return "share-exceeded"
    if new and room.quota < 1:
        return "quota-exceeded"
    return "user-unavailable" if barred else "grant"


def coarse_slots(free: int, n: int) -> int:
    """Returns the free slots of a batch as nodes see them.

    Exact numbers would show when a single lease changes.
    """
    step = n if n < SMALLEST_SHOWN else ceil(n / 10)
    return min(n, step * ceil(free / step))


def lowest_free(returned: Iterable[int], next_slot: int, n: int, count: int) -> list[int]:
    """Returns the ``count`` lowest free slots. Slots of expired leases precede unused slots."""
    slots = sorted(returned)[:count]
    fresh = range(next_slot, min(n, next_slot + count - len(slots)))
    return slots + list(fresh)


def judge_frame(
    standing: Standing | None, same: bool, opens: bool, reported: bool, accepting: bool
) -> Outcome:
    """Returns the outcome of one frame.

    ``standing`` is the standing of the frame's lease, or None if this node has no such lease in
    this batch. ``same``: the lease has reported exactly these bytes. ``opens``: the report opens
    under the batch's key. ``reported``: the lease's user has reported with another lease, in any
    batch. ``accepting``: the batch is open and has not expired.

    A repetition is recognised first, so a node whose answer was lost always learns that its report
    is stored. Once a batch is over, its leases without a report are forgotten, so an unknown lease
    counts as late.
    """
    if standing is None:
        return "unknown-lease" if accepting else "late"
    if standing == "reported":
        return "replayed" if same else "already-reported"
    if reported:
        return "already-reported"
    if not accepting or standing == "over":
        return "late"
    return "accepted" if opens else "wrong-key"
