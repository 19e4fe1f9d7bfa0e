"""Slots and reports: exactly once, over batches; every refusal counted by its reason."""

import pytest
from sqlalchemy import delete, select, update

from riffle.common.protocol import hpke
from riffle.common.protocol.wire import Lease
from riffle.shuffler.store.batch_rows import open_batches
from riffle.shuffler.store.lease_rows import write_slots
from riffle.shuffler.store.schema import batches, lease_groups, reports
from riffle.shuffler.store.users import user_key
from tests.shuffler.conftest import Api, both_aggregations, both_engines, problem
from tests.shuffler.world import COORDINATOR_TOKEN, NOW, OPERATOR_TOKEN, Batch, multiset, user

pytestmark = both_engines


def held(api: Api, batch: Batch, number: int = 0) -> Lease:
    return api.leases(batch, [user(number)])[0]


def refusals(api: Api, batch: Batch, users: list[str], token: str | None = None) -> list[str]:
    answer = api.lease(batch, users, token).json()
    assert not answer["leases"], answer
    return [refusal["problem"] for refusal in answer["refused"]]


# Slots


def test_lowest_slots_first_and_the_same_lease_again(api: Api) -> None:
    batch = api.deposit()
    first = api.leases(batch, [user(0), user(1)])
    again = api.leases(batch, [user(1), user(2)])
    assert [lease.slot for lease in first] == [0, 1]
    assert [lease.slot for lease in again] == [1, 2]
    assert again[0] == first[1]
    assert first[0].expires_at == NOW + 60


def test_a_user_asked_for_twice_in_one_request_gets_one_slot(api: Api) -> None:
    assert len(api.leases(api.deposit(), [user(0), user(0)])) == 1


def test_a_full_batch_gives_out_no_slot(api: Api) -> None:
    batch = api.deposit(n=4)
    api.leases(batch, [user(i) for i in range(4)])
    assert refusals(api, batch, [user(4)]) == ["batch-full"]
    assert api.call("GET", "/batches?accepting=1", api.token).json() == {
        "batches": [],
        "lease_seconds": 60,
    }
    everything = api.call("GET", "/batches", api.token).json()["batches"]
    assert everything == [{"batch_id": batch.batch_id, "free_slots": 0}]


def test_expired_leases_are_given_out_again_lowest_first(api: Api) -> None:
    batch = api.deposit(n=4)
    leases = api.leases(batch, [user(i) for i in range(4)])
    api.outcomes(batch, [(leases[1].lease, batch.report())])
    api.clock.now += 60
    free = api.call("GET", "/batches?accepting=1", api.token).json()["batches"]
    assert free == [{"batch_id": batch.batch_id, "free_slots": 4}]
    fresh = api.leases(batch, [user(10), user(0)])
    assert [lease.slot for lease in fresh] == [0, 2]
    assert fresh[1].lease != leases[0].lease
    status = api.status(batch)
    assert (status["leased"], status["episodes"]) == (2, 4)


def test_the_next_expiry_is_that_of_a_live_lease_or_an_open_batch(api: Api) -> None:
    def next_expiry() -> int | None:
        with api.core._store.engine.connect() as store:
            return open_batches(store, int(api.clock.now)).next_expiry

    assert next_expiry() is None
    batch = api.deposit(n=4)
    assert next_expiry() == NOW + 3_600
    lease = held(api, batch)
    assert next_expiry() == NOW + 60
    api.clock.now += 10
    held(api, api.deposit(deployment=1, expires_at=NOW + 30), 1)
    assert next_expiry() == NOW + 30
    api.outcomes(batch, [(lease.lease, batch.report())])
    api.clock.now += 20
    assert next_expiry() == NOW + 3_600


def test_a_lease_never_outlives_its_batch(api: Api) -> None:
    assert held(api, api.deposit(expires_at=NOW + 5)).expires_at == NOW + 5


def test_a_lease_lasts_longer_by_the_time_of_a_persons_episode(api: Api) -> None:
    batch = api.deposit(n=4, episode_seconds=1_000)
    lease = held(api, batch)
    assert lease.expires_at == NOW + 1_060
    api.clock.now += 1_059
    assert api.outcomes(batch, [(lease.lease, batch.report())]) == ["accepted"]
    api.clock.now = NOW + 3_000
    assert held(api, batch, 1).expires_at == NOW + 3_600, "a lease never outlives its batch"


def test_a_user_with_a_live_lease_elsewhere_gets_no_second_one(api: Api) -> None:
    first, second = api.deposit(), api.deposit(deployment=1)
    held(api, first)
    assert refusals(api, second, [user(0)]) == ["user-unavailable"]
    api.clock.now += 60
    assert held(api, second).slot == 0


def test_a_node_serves_no_more_users_than_enrolled_for(api: Api) -> None:
    batch = api.deposit()
    _, token = api.enrol(2)
    answer = api.lease(batch, [user(i) for i in range(3)], token).json()
    assert len(answer["leases"]) == 2
    assert answer["refused"] == [{"user": user(2), "problem": "quota-exceeded"}]
    api.clock.now += 60
    assert len(api.leases(batch, [user(0), user(1)], token)) == 2  # counted once, not twice


def test_an_owner_holds_no_more_than_their_share_of_a_batch(api: Api) -> None:
    """Live leases and reports count, expired leases do not; another batch is another share."""
    batch, other = api.deposit_shared(0.25), api.deposit_shared(0.25, deployment=1)
    answer = api.lease(batch, [user(i) for i in range(3)]).json()
    assert [lease["slot"] for lease in answer["leases"]] == [0, 1]
    assert answer["refused"] == [{"user": user(2), "problem": "share-exceeded"}]
    again = api.leases(batch, [user(0), user(1)])
    assert [lease.slot for lease in again] == [0, 1], "what it has it keeps"
    api.outcomes(batch, [(again[0].lease, batch.report())])
    assert refusals(api, batch, [user(2)]) == ["share-exceeded"]
    api.clock.now += 120  # its life, and the wait after a lapse
    assert held(api, batch, 2).slot == 1
    assert refusals(api, batch, [user(3)]) == ["share-exceeded"]
    assert len(api.leases(other, [user(3), user(4)])) == 2
    _, token = api.enrol(10)
    assert len(api.leases(batch, [user(10), user(11)], token)) == 2


@both_aggregations
def test_an_owner_with_many_nodes_has_one_share(api: Api) -> None:
    """Enrolling more ids does not raise it (finding A8)."""
    tokens = [api.enrol(10, "mallory")[1] for _ in range(5)]
    batch = api.deposit_shared(0.5)
    for i, token in enumerate(tokens):
        answer = api.lease(batch, [user(10 * i), user(10 * i + 1)], token).json()
        assert len(answer["leases"]) == (2 if i < 2 else 0), answer
        assert {one["problem"] for one in answer["refused"]} <= {"share-exceeded"}


def test_what_a_revoked_node_had_counts_for_its_owner(api: Api) -> None:
    """Else an owner who gets nodes revoked and enrolled again would fill a batch."""
    batch = api.deposit_shared(0.25)
    node, token = api.enrol(10, "mallory")
    first, _ = api.leases(batch, [user(0), user(1)], token)
    assert api.outcomes(batch, [(first.lease, batch.report())], token) == ["accepted"]
    assert api.call("DELETE", f"/nodes/{node}", OPERATOR_TOKEN).status_code == 204
    _, token = api.enrol(10, "mallory")
    for _ in range(2):  # the lease is live; it has lapsed, and its owner has to wait
        assert refusals(api, batch, [user(2)], token) == ["share-exceeded"]
        api.clock.now += 60
    assert len(api.leases(batch, [user(2)], token)) == 1
    assert refusals(api, batch, [user(3)], token) == ["share-exceeded"]


@pytest.mark.parametrize("owner", ["owner", "mallory"])
def test_a_lease_is_of_use_to_one_node(api: Api, owner: str) -> None:
    batch = api.deposit()
    lease = held(api, batch)
    _, other = api.enrol(10, owner)
    assert api.outcomes(batch, [(lease.lease, batch.report())], other) == ["unknown-lease"]
    assert api.status(batch)["reports"] == 0


# Reports


def test_a_replayed_report_is_stored_once(api: Api) -> None:
    batch = api.deposit()
    frame = (held(api, batch).lease, batch.report())
    assert api.outcomes(batch, [frame, frame]) == ["accepted", "replayed"]
    api.restart()
    assert api.outcomes(batch, [frame]) == ["replayed"]
    status = api.status(batch)
    assert (status["reports"], status["dropped"]) == (1, {})


def test_a_replay_is_known_for_what_it_is_after_the_batch_is_over(api: Api) -> None:
    batch = api.deposit()
    frame = (held(api, batch).lease, batch.report())
    api.outcomes(batch, [frame])
    rest = api.leases(batch, [user(i) for i in range(1, 4)])
    api.outcomes(batch, [(lease.lease, batch.report()) for lease in rest])
    api.finish(batch)
    assert api.outcomes(batch, [frame]) == ["replayed"]


def test_a_second_report_of_a_user_is_refused(api: Api) -> None:
    batch = api.deposit()
    lease = held(api, batch).lease
    frames = [(lease, batch.report()), (lease, batch.report())]
    assert api.outcomes(batch, frames) == ["accepted", "already-reported"]
    assert refusals(api, batch, [user(0)]) == ["user-unavailable"]
    assert api.status(batch)["dropped"] == {"already-reported": 1}


def test_a_user_reports_once_over_batches_runs_and_restarts(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    api.finish(batch)
    api.restart()
    other = api.deposit(deployment=5)
    assert refusals(api, other, [user(0), user(3)]) == ["user-unavailable"] * 2


def test_an_old_lease_does_not_help_a_user_who_reported_elsewhere(api: Api) -> None:
    """A user's lease expired and it reported elsewhere: the old lease must not count it twice."""
    first, second = api.deposit(), api.deposit(deployment=1)
    old = held(api, first)
    api.clock.now += 60
    api.outcomes(second, [(held(api, second).lease, second.report())])
    api.clock.now -= 60  # a clock that jumps back makes the old lease look alive
    assert api.outcomes(first, [(old.lease, first.report())]) == ["already-reported"]


@pytest.mark.parametrize("where", ["the same batch", "another batch"])
def test_the_newest_of_a_users_two_leases_alone_reports(api: Api, where: str) -> None:
    """Two replicas whose clocks differ: both leases are live for one of them."""
    first = api.deposit()
    second = first if where == "the same batch" else api.deposit(deployment=1)
    old = held(api, first)
    api.clock.now += 60
    new = held(api, second)
    api.clock.now -= 60
    assert api.outcomes(first, [(old.lease, first.report())]) == ["late"]
    assert api.outcomes(second, [(new.lease, second.report())]) == ["accepted"]
    assert api.outcomes(first, [(old.lease, first.report())]) == ["already-reported"]
    api.clock.now += 60
    assert len(api.leases(first, [user(i) for i in range(1, 4)])) == 3  # its old slot is free


def test_reports_of_several_requests_come_in_one_upload_in_any_order(api: Api) -> None:
    batch = api.deposit(n=6)
    leases = [*api.leases(batch, [user(0), user(1)]), held(api, batch, 2)]
    api.clock.now += 60
    leases = [held(api, batch, 9), *api.leases(batch, [user(i) for i in range(3, 8)])]
    assert sorted(lease.slot for lease in leases) == [0, 1, 2, 3, 4, 5]
    frames = [(lease.lease, batch.report()) for lease in leases[::-1]]
    assert api.outcomes(batch, frames[:4]) == ["accepted"] * 4
    assert api.outcomes(batch, frames[2:]) == ["replayed"] * 2 + ["accepted"] * 2
    assert len(api.finish(batch)) == 6 * batch.context.descriptor.padding.messages


def test_users_who_never_reported_are_forgotten_with_the_batch(api: Api) -> None:
    batch = api.deposit()
    leases = api.leases(batch, [user(1), user(2)])
    api.leases(batch, [user(3)])
    api.outcomes(batch, [(leases[0].lease, batch.report())])
    api.abandon(batch)
    engine = api.core._store.engine
    with engine.connect() as connection:
        (kept,) = connection.scalars(select(lease_groups.c.users))
    assert bytes(kept) == bytes.fromhex(user_key("owner", user(1))) + bytes(16)
    late = api.outcomes(batch, [(leases[1].lease, batch.report())])
    assert late == ["late"]


def test_a_report_that_does_not_open_is_refused(api: Api) -> None:
    batch, other = api.deposit(), api.deposit(deployment=1)
    lease = held(api, batch).lease
    stranger = hpke.KeyPair.generate()
    good = batch.report()
    tampered = good[:40] + bytes([good[40] ^ 1]) + good[41:]
    frames = [
        (lease, batch.report(key=stranger.public)),
        (lease, other.report()),
        (lease, tampered),
        (lease, bytes(len(good))),
        (lease, good),
    ]
    assert api.outcomes(batch, frames) == ["wrong-key"] * 4 + ["accepted"]
    assert api.status(batch)["dropped"] == {"wrong-key": 4}


def test_late_reports_are_refused(api: Api) -> None:
    batch = api.deposit()
    early, taken = api.leases(batch, [user(0), user(1)])
    api.clock.now += 60
    held(api, batch, 7)
    frames = [(early.lease, batch.report()), (taken.lease, batch.report())]
    assert api.outcomes(batch, frames) == ["late", "late"]
    assert api.status(batch)["dropped"] == {"late": 2}


def test_unknown_leases_are_refused(api: Api) -> None:
    batch, other = api.deposit(), api.deposit(deployment=1)
    elsewhere = held(api, other).lease
    frames = [("00" * 16, batch.report()), (elsewhere, batch.report())]
    assert api.outcomes(batch, frames) == ["unknown-lease", "unknown-lease"]
    for count in (1, 2):
        assert api.outcomes(other, frames[:1]) == ["unknown-lease"]
        dropped = [api.status(one)["dropped"]["unknown-lease"] for one in (batch, other)]
        assert dropped == [2, count], "each batch has its own counts"


@pytest.mark.parametrize("size", [0, 1, 16, -1, 1_000])
def test_a_body_that_is_not_whole_frames_is_refused(api: Api, size: int) -> None:
    batch = api.deposit()
    frame = bytes.fromhex(held(api, batch).lease) + batch.report()
    body = (frame * 2)[: len(frame) + size] if size else b""
    path = f"/batches/{batch.batch_id}/reports"
    answer = api.call("POST", path, api.token, content=body)
    assert (answer.status_code, problem(answer)) == (422, "wrong-size")
    status = api.status(batch)
    assert (status["reports"], status["dropped"]) == (0, {"wrong-size": 1})


def test_a_sealed_batch_takes_nothing_more(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    assert refusals(api, batch, [user(0), user(50)]) == ["batch-full"] * 2
    status = api.status(batch)
    assert (status["state"], status["reports"], status["leased"]) == ("sealed", 4, 0)


# Hand-over and end


def test_nothing_is_handed_over_before_the_batch_is_full(api: Api) -> None:
    batch = api.deposit()
    leases = api.leases(batch, [user(i) for i in range(3)])
    api.outcomes(batch, [(lease.lease, batch.report()) for lease in leases])
    answer = api.messages(batch)
    assert (answer.status_code, problem(answer)) == (409, "batch-not-ready")
    answer = api.acknowledge(batch, "00" * 32)
    assert (answer.status_code, problem(answer)) == (409, "batch-not-ready")


@both_aggregations
@pytest.mark.parametrize("fault", ["none", "count", "person", "report", "slot"])
def test_a_batch_is_sealed_with_n_stored_reports_of_n_people_only(api: Api, fault: str) -> None:
    """Whatever the running count of a damaged store says. The noise is that of n people."""
    batch = api.deposit()
    frames = [(one.lease, batch.report()) for one in api.leases(batch, [*map(user, range(4))])]
    for frame in frames[: 2 if fault == "count" else 3]:
        assert api.outcomes(batch, [frame]) == ["accepted"]
    people = [user_key("owner", user(number)) for number in (0, 0, 2, 3)]
    damage = {
        "count": update(batches).values(reports=3),
        "person": update(lease_groups).values(users=bytes.fromhex("".join(people))),
        "report": delete(reports).where(reports.c.slot == 1),
        "slot": update(reports).where(reports.c.slot == 1).values(slots=write_slots([0])),
    }
    if fault in damage:
        with api.core._store.engine.begin() as store:
            store.execute(damage[fault])
    answer = api.upload(batch, frames[3:])
    assert answer.status_code == (200 if fault == "none" else 500)
    assert api.status(batch)["state"] == ("sealed" if fault == "none" else "open")
    assert fault == "none" or problem(api.messages(batch)) == "batch-not-ready"


def test_the_same_bytes_until_acknowledged_then_none(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    first, second = api.messages(batch), api.messages(batch)
    api.restart()
    third = api.messages(batch)
    assert first.content == second.content == third.content
    digest = first.headers["Riffle-Messages-Digest"]
    wrong = api.acknowledge(batch, "00" * 32)
    assert (wrong.status_code, problem(wrong)) == (409, "wrong-state")
    assert api.status(batch)["state"] == "forwarded"
    for _ in range(2):
        assert api.acknowledge(batch, digest).json()["state"] == "erased"
    assert problem(api.acknowledge(batch, "00" * 32)) == "wrong-state"
    gone = api.messages(batch)
    assert (gone.status_code, problem(gone)) == (410, "late")


@pytest.mark.parametrize("forwarded", [False, True])
def test_a_full_batch_does_not_expire(api: Api, *, forwarded: bool) -> None:
    """Its users have reported. It is kept for as long as the operator's settings say."""
    batch = api.deposit(expires_at=NOW + 60)
    sent = api.fill(batch)
    if forwarded:
        assert api.messages(batch).status_code == 200
    api.clock.now += 61
    api.restart()
    assert api.status(batch)["state"] == ("forwarded" if forwarded else "sealed")
    assert multiset(api.finish(batch)) == multiset(sent)


def test_equal_reports_of_two_batches_are_permuted_differently(api: Api) -> None:
    orders = []
    for deployment in range(2):
        batch = api.deposit(deployment=deployment)
        sent = api.fill(batch, first_user=10 * deployment)
        position = {row: index for index, row in enumerate(sent)}
        orders.append([position[row] for row in api.finish(batch)])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] != orders[1]


def test_a_batch_that_expires_short_is_abandoned_and_its_users_stay_marked(api: Api) -> None:
    batch = api.deposit()
    leases = api.leases(batch, [user(i) for i in range(3)])
    frames = [(lease.lease, batch.report()) for lease in leases]
    assert api.outcomes(batch, frames[:2]) == ["accepted"] * 2
    api.clock.now = NOW + 3_600
    assert api.outcomes(batch, frames[1:]) == ["replayed", "late"]
    assert refusals(api, batch, [user(9)]) == ["late"]
    assert api.status(batch)["state"] == "abandoned"
    assert not any((api.directory / "data" / "secrets").iterdir())
    answer = api.messages(batch)
    assert (answer.status_code, problem(answer)) == (410, "late")
    other = api.deposit(deployment=1, expires_at=NOW + 9_000)
    assert refusals(api, other, [user(0), user(1)]) == ["user-unavailable"] * 2
    assert held(api, other, 2).slot == 0  # it had not reported


@pytest.mark.parametrize("token", [COORDINATOR_TOKEN, OPERATOR_TOKEN])
def test_only_a_batch_that_is_short_is_abandoned(api: Api, token: str) -> None:
    batch, other = api.deposit(), api.deposit(deployment=1)
    for _ in range(2):
        assert api.abandon(batch, token).json()["state"] == "abandoned"
    api.fill(other, first_user=10)
    sealed = api.abandon(other, token)
    api.messages(other)
    forwarded = api.abandon(other, token)
    for refused in (sealed, forwarded):
        assert (refused.status_code, problem(refused)) == (409, "wrong-state")
    assert api.finish(other)


def test_frames_are_conserved(api: Api) -> None:
    """Every frame is accepted, replayed or dropped for a reason that is counted."""
    batch = api.deposit()
    lease = held(api, batch).lease
    good = (lease, batch.report())
    frames = [good, good, (lease, batch.report()), ("11" * 16, batch.report())]
    outcomes = api.outcomes(batch, frames)
    status = api.status(batch)
    dropped = sum(status["dropped"].values())
    assert status["reports"] + outcomes.count("replayed") + dropped == len(frames)
