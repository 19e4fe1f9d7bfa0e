"""The two transactions of nodes: a lease request takes slots, and an upload fills them.

Once a lease has expired, its slot may go to another user. The expired lease stays stored without
its slot, so that a report under this lease is refused as late.

Each report is stored exactly once. One transaction decides the outcomes of an upload, stores its
accepted reports and marks the leases of these reports. With the n-th distinct report, the
transaction also seals the batch. Only a user's newest lease can be marked.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat

from sqlalchemy import Connection, bindparam, insert, update

from riffle.common.protocol.descriptor import may_report
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import KEY_BYTES, TAG_BYTES
from riffle.common.protocol.wire import Lease, LeaseReply, Refusal, UploadReply, UploadResult
from riffle.shuffler import rules
from riffle.shuffler.store import batch_rows, lease_rows, report_rows, users
from riffle.shuffler.store.lease_rows import LeaseGroup, group_of
from riffle.shuffler.store.report_rows import UploadKeys, add_reports
from riffle.shuffler.store.schema import batches, lease_groups
from riffle.shuffler.store.users import UserRecord
from riffle.shuffler.store.vault import ReportCipher

_UPDATE = update(batches).where(batches.c.batch_id == bindparam("batch"))
_SET_NEXT_SLOT = _UPDATE.values(next_slot=bindparam("next"))
_ADD_REPORTS = _UPDATE.values(reports=batches.c.reports + bindparam("more"))
_INSERT_LEASES = insert(lease_groups)


@dataclass(frozen=True, slots=True)
class UploadSummary:
    """The answer to an upload, the count of each outcome, and whether it sealed the batch."""

    reply: UploadReply
    outcomes: Counter[str]
    sealed: bool


def lease_slots(
    connection: Connection, batch_id: str, node_id: str, wanted: Sequence[str], now: int, life: int
) -> LeaseReply:
    """Returns, for each distinct user in ``wanted``, a slot or the reason why the user gets none.

    A lease lasts ``life`` seconds longer than an episode of this batch may take. If the batch is
    full or over, all users are refused and none is looked up. Raises RemoteError ``unauthorized``
    for a revoked node, and ``unknown-batch`` for an unknown batch.
    """
    owner, quota = users.lock_node(connection, node_id)
    batch = batch_rows.find(connection, batch_id, lock=True)
    if closed := rules.closed_problem(batch.state, batch.expires_at, now):
        refusals = [Refusal(user, closed) for user in dict.fromkeys(wanted)]
        return LeaseReply(leases=(), refused=tuple(refusals))
    life += batch.episode_seconds
    room = _room(connection, batch, owner, quota, now, life)
    people = {users.user_key(owner, user): user for user in wanted}
    existing = users.find_users(connection, list(people))
    kept: list[Lease] = []
    granted: list[str] = []
    refused: list[Refusal] = []
    for key, user in people.items():
        record = existing.get(key)
        live = None if record is None else record.live(now)
        if live and record and (live.batch_id, live.node_id) == (batch_id, node_id):
            lease = Lease(user, lease_rows.slot_of(record.lease), record.lease, live.expires_at)
            kept.append(lease)
            continue
        reported = record is not None and not may_report(record.barred_until, batch.epoch)
        barred = reported or live is not None
        decision = rules.decide_lease(room, new=record is None, barred=barred)
        if decision == "grant":
            granted.append(key)
            room.take(new_user=record is None)
        else:
            refused.append(Refusal(user, decision))
    new = _grant(connection, batch, node_id, granted, existing, now, life) if granted else []
    for lease in new:
        lease.user = people[lease.user]
    return LeaseReply(leases=(*kept, *new), refused=tuple(refused))


def _room(
    connection: Connection, batch: batch_rows.Batch, owner: str, quota: int, now: int, life: int
) -> rules.Room:
    leased = lease_rows.count_leased(connection, batch.batch_id, now)
    share = batch.owner_slots
    if share < batch.n:
        held, reports, *lapses = lease_rows.holding(connection, batch.batch_id, owner, now)
        waits = now < rules.waits_until(reports, lapses, life)
        share = 0 if waits else share - held - reports
    return rules.Room(quota=quota, free_slots=batch.n - batch.reports - leased, share=share)


def _grant(
    connection: Connection,
    batch: batch_rows.Batch,
    node_id: str,
    people: Sequence[str],
    existing: dict[str, UserRecord],
    now: int,
    life: int,
) -> list[Lease]:
    _supersede(connection, (existing[user] for user in people if user in existing))
    expired = lease_rows.take_expired_slots(connection, batch.batch_id, now, len(people))
    slots = rules.lowest_free(expired, batch.next_slot, batch.n, len(people))
    expires_at = min(now + life, batch.expires_at)
    group = LeaseGroup.new(batch.batch_id, node_id, expires_at, slots, people)
    connection.execute(_INSERT_LEASES, group.row())
    ids = [group.lease_id(slot) for slot in slots]
    pairs = list(zip(people, ids, strict=True))
    users.set_newest_leases(connection, node_id, pairs, existing)
    next_slot = max(batch.next_slot, slots[-1] + 1)
    connection.execute(_SET_NEXT_SLOT, {"batch": batch.batch_id, "next": next_slot})
    return list(map(Lease, people, slots, ids, repeat(expires_at)))


def _supersede(connection: Connection, people: Iterable[UserRecord]) -> None:
    changed = {}
    for record in people:
        if record.group is not None and record.index is not None and not record.reported:
            record.group.supersede(record.index)
            changed[record.group.group_id] = record.group
    lease_rows.save(connection, changed.values())


def build_frames(
    lease_ids: Sequence[str],
    sealed: Sequence[memoryview],
    opened: Iterable[bytes | None] | None = None,
    *,
    whole: bool,
) -> list[rules.Frame]:
    """Returns the frames of an upload.

    ``sealed`` has the reports as uploaded. ``opened`` has them without their outer seals, or None
    for a report that does not open. If ``opened`` is missing, no report counts as opened. If
    ``whole`` is false, a report's digest covers only the key and tag of its outer seal, which takes
    less time. Only the report's sender can make another report with the same key and tag.
    """
    parts = sealed if whole else [bytes(s[:KEY_BYTES]) + s[-TAG_BYTES:] for s in sealed]
    digests = [sha256(part).digest() for part in parts]
    return list(zip(lease_ids, digests, opened or repeat(None, len(lease_ids)), strict=True))


def store_reports(
    connection: Connection,
    batch_id: str,
    node_id: str,
    frames: Sequence[rules.Frame],
    cipher: ReportCipher | None,
    now: int,
) -> UploadSummary:
    """Encrypts and stores accepted reports; counts refusals. Raises the errors of `lease_slots`."""
    users.lock_node(connection, node_id)
    batch = batch_rows.find(connection, batch_id, lock=True)
    ids = [lease for lease, _, _ in frames]
    groups = lease_rows.groups_of_upload(connection, batch_id, node_id, ids)
    keys = UploadKeys(connection, batch, frames, cipher) if batch.word_bits and cipher else None
    accepting = rules.closed_problem(batch.state, batch.expires_at, now) is None
    reported = _reported_elsewhere(connection, groups, ids, now, accepting=accepting)
    outcomes: list[rules.Outcome] = []
    accepted: list[tuple[int, bytes]] = []
    for lease, digest, report in frames:
        standing, same, index = None, False, None
        group = groups.get(group_of(lease))
        if group is not None and (index := group.index(lease)) is not None:
            standing = group.standing(index, now)
            same = standing == "reported" and group.digest(index) == digest
        outcome = rules.judge_frame(
            standing, same, report is not None, lease in reported, accepting
        )
        if outcome == "accepted" and keys and report and not keys.take(report):
            outcome = "reused-key"
        if outcome == "accepted" and group and index is not None and report is not None:
            group.report(index, digest)
            accepted.append((group.slots[index], report))
        outcomes.append(outcome)
    if accepted:
        _write(connection, batch, groups, accepted, cipher, keys)
    counts = Counter[str](outcomes)
    refused = {outcome: count for outcome, count in counts.items() if outcome != "accepted"}
    batch_rows.count_dropped(connection, batch_id, refused)
    sealed = _seal_if_full(connection, batch, len(accepted), now)
    return UploadSummary(
        UploadReply(results=tuple(map(UploadResult, ids, outcomes))), counts, sealed
    )


def _reported_elsewhere(
    connection: Connection,
    groups: dict[str, LeaseGroup],
    lease_ids: Sequence[str],
    now: int,
    *,
    accepting: bool,
) -> set[str]:
    """Returns the leases in ``lease_ids`` whose users have reported with another lease.

    A user with a live lease has not reported with another one. So the users of a group are looked
    up only if some lease of the group is neither live nor reported.
    """
    doubtful = {name for name, group in groups.items() if not (accepting and group.all_live(now))}
    if not doubtful:
        return set()
    people: dict[str, str] = {}
    for lease in lease_ids:
        name = group_of(lease)
        if name in doubtful and (index := groups[name].index(lease)) is not None:
            people[lease] = groups[name].user(index)
    existing = users.find_users(connection, list(set(people.values())))
    return {lease for lease, user in people.items() if user in existing and existing[user].reported}


def _write(
    connection: Connection,
    batch: batch_rows.Batch,
    groups: dict[str, LeaseGroup],
    accepted: list[tuple[int, bytes]],
    cipher: ReportCipher | None,
    keys: UploadKeys | None,
) -> None:
    if cipher is None:
        raise LocalError("internal", "reports were accepted of a batch whose secret is not here")
    accepted.sort()
    stored = add_reports(connection, batch, accepted, cipher, keys) if keys else accepted
    report_rows.insert_reports(connection, batch.batch_id, stored, cipher)
    lease_rows.save(connection, groups.values())
    connection.execute(_ADD_REPORTS, {"batch": batch.batch_id, "more": len(accepted)})


def _seal_if_full(connection: Connection, batch: batch_rows.Batch, added: int, now: int) -> bool:
    """Seals the batch if a fresh count finds n reports of n distinct users.

    The noise is calibrated for n people: fewer people would get a weaker guarantee. The running
    count could be wrong, so it only decides when to count the stored rows.
    """
    if not added or batch.reports + added < batch.n:
        return False
    people, slots = lease_rows.reporters(connection, batch.batch_id)
    stored = report_rows.stored_slots(connection, batch.batch_id)
    if not len(people) == len(slots) == len(stored) == batch.n or set(slots) != set(stored):
        raise LocalError("internal", "stored reports and distinct users disagree; not sealed")
    batch_rows.transition(connection, batch, "fill", sealed_at=now)
    return True
