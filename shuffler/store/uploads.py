"""Reports into the store, exactly once, and the seal.

All of an upload is one transaction: outcomes are decided, reports stored, leases marked and, when
the n-th distinct report is among them, the batch sealed. A lease is marked in the same transaction
that stores its report, so no crash lies between the two; and of a user only the newest lease can be
marked (`shuffler.store.leasing`), so a marked lease marks its user.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat

from sqlalchemy import Connection, bindparam, insert, update

from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.messages import UploadReply, UploadResult
from riffle.shuffler.rules import Frame, Outcome, closed_problem, judge_frame
from riffle.shuffler.store import leases as granted
from riffle.shuffler.store import records, users
from riffle.shuffler.store.leases import Grant
from riffle.shuffler.store.schema import batches, reports
from riffle.shuffler.store.vault import Stored

_STORE = insert(reports)
_GROW = (
    update(batches)
    .where(batches.c.batch_id == bindparam("batch"))
    .values(reports=batches.c.reports + bindparam("more"))
)


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to an upload, its outcomes counted, and whether it sealed the batch."""

    reply: UploadReply
    outcomes: Counter[str]
    sealed: bool


def framed(
    leases: Sequence[str],
    sealed: Sequence[memoryview],
    opened: Iterable[bytes | None] | None = None,
) -> list[Frame]:
    """The frames of an upload as it came, and what its reports opened to; without it none does."""
    digests = [sha256(report).digest() for report in sealed]
    return list(zip(leases, digests, opened or repeat(None, len(leases)), strict=True))


def upload(
    connection: Connection,
    batch_id: str,
    node_id: str,
    frames: Sequence[Frame],
    stored: Stored | None,
    now: int,
) -> Done:
    """Store what is accepted of ``frames``, as ``stored`` encrypts it; count the rest by reason.

    Raises:
        RemoteError: ``unauthorized`` for a revoked node, ``unknown-batch``.
    """
    users.lock(connection, node_id)
    batch = records.find(connection, batch_id, lock=True)
    leases = [lease for lease, _, _ in frames]
    held = granted.of_upload(connection, batch_id, node_id, leases)
    accepting = closed_problem(batch.state, batch.expires_at, now) is None
    reported = _reported(connection, held, leases, now, accepting=accepting)
    outcomes: list[Outcome] = []
    accepted: list[tuple[int, bytes]] = []
    for lease, digest, report in frames:
        standing, same, place = None, False, None
        grant = held.get(granted.grant_id(lease))
        if grant is not None and (place := grant.find(lease)) is not None:
            standing = grant.standing(place, now)
            same = standing == "reported" and grant.digest(place) == digest
        outcome = judge_frame(standing, same, report is not None, lease in reported, accepting)
        if outcome == "accepted" and grant and place is not None and report is not None:
            grant.report(place, digest)
            accepted.append((grant.slots[place], report))
        outcomes.append(outcome)
    if accepted:
        _write(connection, batch, held, accepted, stored)
    counts = Counter[str](outcomes)
    refused = {outcome: count for outcome, count in counts.items() if outcome != "accepted"}
    records.count_dropped(connection, batch_id, refused)
    sealed = _seal_if_full(connection, batch, len(accepted))
    return Done(UploadReply(results=tuple(map(UploadResult, leases, outcomes))), counts, sealed)


def _reported(
    connection: Connection,
    held: dict[str, Grant],
    leases: Sequence[str],
    now: int,
    *,
    accepting: bool,
) -> set[str]:
    """Of the leases that may not report any more: those whose users have, with another one.

    A live lease is its user's newest, so where all are live nothing has to be looked up.
    """
    doubtful = {name for name, grant in held.items() if not (accepting and grant.all_live(now))}
    if not doubtful:
        return set()
    whose: dict[str, str] = {}
    for lease in leases:
        name = granted.grant_id(lease)
        if name in doubtful and (place := held[name].find(lease)) is not None:
            whose[lease] = held[name].user(place)
    known = users.known(connection, list(set(whose.values())))
    return {lease for lease, user in whose.items() if user in known and known[user].reported}


def _write(
    connection: Connection,
    batch: records.Batch,
    held: dict[str, Grant],
    accepted: list[tuple[int, bytes]],
    stored: Stored | None,
) -> None:
    if stored is None:
        raise LocalError("internal", "reports were accepted of a batch whose secret is not here")
    accepted.sort()
    slots = [slot for slot, _ in accepted]
    row = {
        "batch_id": batch.batch_id,
        "slot": slots[0],
        "held": len(slots),
        "slots": granted.write_slots(slots),
        "sealed": stored.encrypt(slots, b"".join(report for _, report in accepted)),
    }
    connection.execute(_STORE, row)
    granted.save(connection, held.values())
    connection.execute(_GROW, {"batch": batch.batch_id, "more": len(slots)})


def _seal_if_full(connection: Connection, batch: records.Batch, added: int) -> bool:
    """Seal when the batch holds n reports of n distinct users, counted here and now.

    The running count only says when to count. What releases a batch is this count over stored
    rows: noise was calibrated for n people, and fewer behind n reports would get less of it.
    """
    if not added or batch.reports + added < batch.n:
        return False
    people, slots = granted.reported(connection, batch.batch_id)
    stored = records.stored_slots(connection, batch.batch_id)
    if not len(people) == len(slots) == len(stored) == batch.n or set(slots) != set(stored):
        raise LocalError("internal", "stored reports and distinct users disagree; not sealed")
    records.transition(connection, batch, "fill")
    return True
