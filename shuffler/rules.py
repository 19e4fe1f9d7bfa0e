"""What the shuffler accepts and decides, without I/O, clock or randomness.

A deposited descriptor is accepted when (`accept_deposit`, in this order)

- its bytes carry the signature of the pinned coordinator;
- it parses strictly, its id is the path's id and the one that run and deployment determine;
- it names this shuffler and has not expired, and an analyzer key that is pinned, if any is;
- its trust model is one that the owner allows;
- n is at least the owner's smallest batch, and n * L messages no more bytes than the owner takes;
- seeded noise is asked for only where the test entry point is open;
- the guarantee, recomputed at the owner's beta and dishonest fraction, is not weaker than the
  owner's, and not weaker than what the descriptor itself promises.

A user gets a slot by `decide_lease`, a frame its outcome by `judge_frame`. A user reports once,
over all batches and runs; parallel composition over batches rests on that line. A node holds at
most its share of a batch (`share_slots`). Of an open batch the coordinator learns that it is open,
and nothing that grows with single reports (`for_coordinator`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Literal

from riffle.common.mechanism.noise import Guarantee, Trust
from riffle.common.protocol.descriptor import Context, batch_id, key_id, parse, verify_deposit
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.messages import BatchState, BatchStatus, Lease
from riffle.common.protocol.verification import check_guarantee, check_trust

Outcome = Literal["accepted", "replayed", "already-reported", "late", "unknown-lease", "wrong-key"]
Closed = Literal["late", "batch-full"]
Decision = Literal[
    "grant",
    "keep",
    "forbidden",
    "already-reported",
    "late",
    "wrong-state",
    "quota-exceeded",
    "share-exceeded",
    "batch-full",
]
Standing = Literal["live", "reported", "over"]
"""Of a lease: may report, has reported, or may not any more: it expired or its user has another."""


@dataclass(frozen=True, slots=True)
class Demands:
    """What this shuffler's owner demands of every batch."""

    shuffler_id: str
    coordinator_key: bytes
    guarantee: Guarantee
    trust_models: tuple[Trust, ...]
    smallest_n: int
    test_entry: bool
    max_batch_bytes: int
    analyzer_keys: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class UserView:
    """What is known of a user who asks for a slot.

    ``here`` is its live lease in this batch; ``elsewhere``: it has one in another open batch.
    """

    owner: str | None
    reported: bool
    here: Lease | None
    elsewhere: bool


STRANGER = UserView(owner=None, reported=False, here=None, elsewhere=False)
"""A user of whom nothing is known."""


@dataclass(slots=True)
class Room:
    """What is left: users of the node's quota, free slots of the batch, slots of its share."""

    quota: int
    free_slots: int
    share: int

    def take(self, slots: int, *, strangers: int) -> None:
        """Take slots, so many of them for users who are new to the node."""
        self.quota -= strangers
        self.free_slots -= slots
        self.share -= slots


Frame = tuple[str, bytes, bytes | None]
"""One frame of an upload: its lease, the SHA-256 of its report as it came, and the report out of
its outer seal, or None if that does not open under the batch's key."""


def accept_deposit(
    data: bytes, signature: str | None, path_id: str, demands: Demands, now: int
) -> Context:
    """The descriptor's context, if every rule above holds.

    Raises:
        RemoteError: the first rule that does not hold.
    """
    if not signature:
        raise RemoteError("bad-signature", "the deposit carries no signature of the coordinator")
    verify_deposit(demands.coordinator_key, data, signature)
    context = parse(data)
    _check_identity(context, path_id, demands, now)
    _check_promise(context, demands)
    return context


def check_batch_key(batch_key: str, used: str | None) -> None:
    """Raise RemoteError ``outdated-key`` when reports are sealed to another key of the batch.

    A shuffler whose store was made anew has given the batch another key than nodes remember.
    ``used`` is what the node says: `key_id` of its key, or nothing.
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
        raise RemoteError(
            "wrong-recipient", f"this is shuffler {demands.shuffler_id}, not {d.shuffler_id}"
        )
    if d.expires_at <= now:
        raise RemoteError("late", f"the descriptor expired at {d.expires_at}, it is {now}")
    if demands.analyzer_keys is not None and d.analyzer_key not in demands.analyzer_keys:
        raise RemoteError("outdated-key", f"analyzer key {d.analyzer_key_id} is not pinned here")


def _check_promise(context: Context, demands: Demands) -> None:
    d = context.descriptor
    check_trust(d, demands.trust_models)
    if d.n < demands.smallest_n:
        raise RemoteError(
            "batch-too-small",
            f"the batch has n = {d.n}; at least {demands.smallest_n} is accepted here",
        )
    size = d.n * d.padding.messages * d.message_bytes
    if size > demands.max_batch_bytes:
        raise RemoteError(
            "too-large",
            f"the batch's n * L messages have {size} bytes; at most {demands.max_batch_bytes} "
            "are accepted here",
        )
    if d.test_seed is not None and not demands.test_entry:
        raise RemoteError(
            "test-entry-refused", "seeded noise protects nobody; the test entry is closed here"
        )
    check_guarantee(d, demands.guarantee)


def for_coordinator(status: BatchStatus) -> BatchStatus:
    """What the coordinator may know: numbers that grow with single reports are not among it.

    The coordinator also sees every message. Were it told when the count of reports changes, it
    would have the hours of people that the shuffle is there to hide.
    """
    return BatchStatus(
        batch_id=status.batch_id,
        state=status.state,
        n=status.n,
        episodes=None if status.state == "open" else status.episodes,
    )


def share_slots(share: float, n: int) -> int:
    """Slots of n that one node may hold: the share as its decimal says, rounded down, never 0."""
    return max(1, floor(Fraction(str(share)) * n))


def closed_problem(state: BatchState, expires_at: int, now: int) -> Closed | None:
    """Why a batch gives out no slot at all; None while it fills."""
    if state == "abandoned" or (state == "open" and expires_at <= now):
        return "late"
    return None if state == "open" else "batch-full"


def decide_lease(  # noqa: PLR0911 -- one line a rule, first that holds
    view: UserView, node_id: str, closed: Closed | None, room: Room
) -> Decision:
    """What a node gets for one user: a new slot, the slot it has, or a problem slug.

    A user belongs to the node that first named it. A user with a live lease elsewhere may be
    running that episode now, so it gets no second one (``wrong-state``).
    """
    if view.owner not in (None, node_id):
        return "forbidden"
    if view.reported:
        return "already-reported"
    if closed is not None:
        return closed
    if view.here is not None:
        return "keep"
    if view.elsewhere:
        return "wrong-state"
    if view.owner is None and room.quota < 1:
        return "quota-exceeded"
    if room.free_slots < 1:
        return "batch-full"
    return "grant" if room.share > 0 else "share-exceeded"


def strangers_granted(closed: Closed | None, room: Room) -> int:
    """How many strangers, one after another, `decide_lease` gives a slot to, each taking one."""
    return 0 if closed is not None else max(0, min(room.quota, room.free_slots, room.share))


def lowest_free(returned: Iterable[int], next_slot: int, n: int, count: int) -> list[int]:
    """The ``count`` lowest free slots: those of expired leases, then the never used ones."""
    slots = sorted(returned)[:count]
    fresh = range(next_slot, min(n, next_slot + count - len(slots)))
    return slots + list(fresh)


def judge_frame(
    standing: Standing | None, same: bool, opens: bool, reported: bool, accepting: bool
) -> Outcome:
    """What becomes of one frame, given how its lease in this batch held by this node stands.

    ``same``: the lease has reported just this. ``opens``: the report does, under the batch's key.
    ``reported``: its user has, with another lease, in any batch. ``accepting``: the batch is open
    and has not expired. A repetition is recognised first, whatever became of the batch since, so
    that a node whose answer was lost always learns that its report is stored. A batch that is over
    has forgotten the leases that never reported, so an unknown lease is late there.
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
