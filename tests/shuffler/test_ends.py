"""Every way in which a batch ends: what is spent, erased and answered."""

import pytest
from pydantic import SecretStr
from sqlalchemy import func, select

from riffle.common.protocol.signatures import batch_id
from riffle.common.server.at_rest import StorageCipher
from riffle.shuffler.store.schema import declined, lease_groups, report_keys, reports, sums
from tests.shuffler.conftest import Api, both_engines, problem
from tests.shuffler.test_metrics import sample, scrape
from tests.shuffler.test_reports import refusals
from tests.shuffler.world import (
    COORDINATOR_TOKEN,
    OPERATOR_TOKEN,
    SHUFFLER_KEY,
    Batch,
    descriptor_bytes,
    user,
)

RETENTION = 1_000
FULL = ("sealed", "forwarded", "erased", "retired", "untaken")
SHORT = ("abandoned", "expired", "lost")
OVER = ("erased", "retired", "untaken", *SHORT)
stores_and_aggregations = pytest.mark.parametrize(
    ("store_url", "aggregation"),
    [("sqlite", "messages"), ("sqlite", "sums"), ("postgresql", "sums")],
    indirect=True,
)
"""Sums use every table that messages use, so PostgreSQL needs no test of both."""


def end(api: Api, batch: Batch, how: str) -> list[tuple[str, bytes]]:
    """Ends a batch of four. Returns the frames of those who had a slot and have not reported."""
    leases = api.leases(batch, [user(number) for number in range(4)])
    frames = [(lease.lease, batch.report()) for lease in leases]
    sent = 4 if how in FULL else 2
    assert api.outcomes(batch, frames[:sent]) == ["accepted"] * sent
    path = f"/batches/{batch.batch_id}/declined"
    assert api.call("POST", path, api.token, json={"reason": "too-slow"}).status_code == 200
    if how == "abandoned":
        api.abandon(batch)
    elif how == "lost":
        (api.directory / f"data/secrets/{batch.batch_id}.secret").unlink()
        api.restart()
    elif how == "erased":
        api.finish(batch)
    elif how in ("forwarded", "untaken"):
        assert api.messages(batch).status_code == 200
    if how in ("expired", "retired", "untaken"):
        api.clock.now += 3_600 if how == "expired" else RETENTION
    return frames[sent:]


@stores_and_aggregations
@pytest.mark.parametrize("how", [*FULL, *SHORT])
def test_who_has_reported_is_spent_whatever_became_of_the_batch(api: Api, how: str) -> None:
    """At the same node and others of its owner, for another batch and run, and after restarts."""
    api.restart(retention_seconds=RETENTION)
    _, fellow = api.enrol(10, "owner")
    waiting = end(api, api.deposit(), how)
    changes, run = {"expires_at": int(api.clock.now) + 3_600}, "cd" * 16
    others = [
        api.deposit(8, deployment=1, **changes),
        api.deposit(8, run_id=run, batch_id=batch_id(run, 0), **changes),
    ]
    spent = [user(number) for number in range(4 - len(waiting))]
    for token in (api.token, fellow):
        for other in others:
            assert set(refusals(api, other, spent, token)) == {"user-unavailable"}
    api.restart()
    assert set(refusals(api, others[0], spent)) == {"user-unavailable"}
    assert api.call("DELETE", f"/nodes/{api.node_id}", OPERATOR_TOKEN).status_code == 204
    _, successor = api.enrol(10, "owner")
    assert set(refusals(api, others[1], spent, successor)) == {"user-unavailable"}
    free = [user(number) for number in range(4 - len(waiting), 5)]
    assert len(api.leases(others[1], free, successor)) == len(free), "they have not reported"


@both_engines
@pytest.mark.parametrize("how", [*FULL, *SHORT])
def test_a_batch_that_takes_nothing_more_refuses_all_users_of_all_owners_alike(
    api: Api, how: str
) -> None:
    api.restart(retention_seconds=RETENTION)
    batch = api.deposit()
    tokens = [api.token, api.enrol(10, "owner")[1], api.enrol(1)[1]]
    end(api, batch, how)
    answers = {
        one for token in tokens for one in refusals(api, batch, [*map(user, range(6))], token)
    }
    assert answers == ({"batch-full"} if how in FULL else {"late"})


@stores_and_aggregations
@pytest.mark.parametrize("how", OVER)
def test_nothing_stays_of_a_batch_that_is_over(api: Api, how: str) -> None:
    api.restart(retention_seconds=RETENTION)
    batch = api.deposit()
    late = end(api, batch, how)
    assert api.status(batch)["state"] == ("erased" if how in ("erased", "untaken") else "abandoned")
    assert api.status(batch)["declined"] == []
    with api.core._store.engine.connect() as store:
        for table in (reports, sums, report_keys, declined):
            assert not store.scalar(select(func.count()).select_from(table)), table.name
    assert not api.core.batches._releases, "in memory neither"
    assert list((api.directory / "data/secrets").iterdir()) == []
    assert problem(api.messages(batch)) == "late"
    assert set(api.outcomes(batch, late)) == {"late"} if late else True
    assert list((api.directory / "data/secrets").iterdir()) == []


@stores_and_aggregations
@pytest.mark.parametrize("how", [*FULL, *SHORT])
def test_every_message_is_accounted_for_in_records_and_metrics(api: Api, how: str) -> None:
    api.restart(retention_seconds=RETENTION)
    batch = api.deposit()
    accepted = 4 - len(end(api, batch, how))
    path = f"/batches/{batch.batch_id}/conservation"
    record = api.call("GET", path, OPERATOR_TOKEN).json()
    reason = {"abandoned": "abandon", "expired": "expire", "lost": "lost", "retired": "retire"}
    dropped = {reason[how]: accepted} if how in reason else {}
    forwarded = accepted if how in ("forwarded", "erased", "untaken") else 0
    held = accepted if how == "sealed" else 0
    reports = [record[name] for name in ("accepted", "held", "forwarded", "dropped")]
    assert (reports, record["balanced"]) == ([accepted, held, forwarded, dropped], True)
    L = batch.context.descriptor.padding.messages
    kinds = {"accepted": accepted, "held": held, "forwarded": forwarded}
    kinds["dropped"] = accepted - held - forwarded
    assert record["messages"] == {name: count * L for name, count in kinds.items()}
    text = scrape(api)[1]
    for each in reason.values():
        series = f'riffle_shuffler_reports_dropped{{reason="{each}"}}'
        assert sample(text, series) == dropped.get(each, 0)
    state = {"retired": "abandoned", "untaken": "erased", "expired": "abandoned"}.get(how, how)
    state = "abandoned" if how == "lost" else state
    assert sample(text, f'riffle_shuffler_batches{{state="{state}"}}') == 1


@both_engines
@pytest.mark.parametrize("how", [*FULL, *SHORT])
def test_every_end_is_final_and_tells_the_coordinator_no_count(api: Api, how: str) -> None:
    """The batch's id gets no second descriptor, key or list entry, and the store is not reset."""
    api.restart(retention_seconds=RETENTION)
    batch = api.deposit()
    late = end(api, batch, how)
    state = api.status(batch)["state"]
    api.restart()
    again = api.put(batch.data)
    assert (again.status_code, again.json()["batch_key"]) == (200, batch.batch_key.hex())
    other = descriptor_bytes(expires_at=int(api.clock.now) + 100, **api.fields)
    assert problem(api.put(other)) == "descriptor-conflict"
    assert api.call("GET", "/deposits", COORDINATOR_TOKEN).json() == {"open": []}
    assert api.call("GET", "/batches", api.token).json()["batches"] == []
    assert api.status(batch)["state"] == state
    seen = api.status(batch, COORDINATOR_TOKEN)
    assert [seen[name] for name in ("reports", "leased", "dropped")] == [None] * 3
    path = f"/batches/{batch.batch_id}/conservation"
    record = api.call("GET", path, COORDINATOR_TOKEN).json()
    told = {name for name, value in record.items() if value is not None}
    secret = {"accepted", "held", "forwarded", "dropped", "rejected", "messages", "fill_tenths"}
    assert told.isdisjoint(secret if late else {"rejected"})


@stores_and_aggregations
def test_nothing_that_happens_to_a_batch_changes_another(api: Api) -> None:
    batch, other, third = (api.deposit(deployment=number) for number in range(3))
    sent = [other.messages() for _ in range(4)]
    leases = [api.leases(other, [user(number)])[0] for number in range(3)]
    uploads = [(one.lease, other.report(part)) for one, part in zip(leases, sent, strict=False)]

    def decline(one: Batch) -> None:
        path = f"/batches/{one.batch_id}/declined"
        assert api.call("POST", path, api.token, json={"reason": "too-slow"}).status_code == 200
        assert api.status(one)["declined"] == ["too-slow"]

    def seen() -> list[object]:
        listed = api.call("GET", "/batches", api.token).json()["batches"]
        record = api.call("GET", f"/batches/{other.batch_id}/conservation", OPERATOR_TOKEN)
        mine = [one for one in listed if one["batch_id"] == other.batch_id]
        with api.core._store.engine.connect() as store:
            rows = [
                store.scalar(select(func.count()).where(table.c.batch_id == other.batch_id))
                for table in (reports, sums, report_keys, declined, lease_groups)
            ]
        return [api.status(other), record.json(), mine, rows]

    assert api.outcomes(other, uploads[:2]) == ["accepted"] * 2
    assert api.outcomes(other, [("00" * 16, other.report())]) == ["unknown-lease"]
    decline(other)
    api.clock.now += 60  # the third lease lapses
    before = seen()
    for one, first in ((batch, 10), (third, 20)):
        decline(one)
        assert api.outcomes(one, [("00" * 16, one.report())] * 2) == ["unknown-lease"] * 2
        held = api.leases(one, [user(first + number) for number in range(4)])
        frames = [(lease.lease, one.report()) for lease in held]
        assert api.outcomes(one, frames[:3]) == ["accepted"] * 3
        assert seen() == before
        if one is batch:
            assert api.outcomes(one, frames[3:]) == ["accepted"]
            api.finish(one)
        else:
            api.abandon(one)
        assert seen() == before
    last = api.leases(other, [user(2), user(3)])
    uploads[2:] = [
        (one.lease, other.report(part)) for one, part in zip(last, sent[2:], strict=True)
    ]
    assert api.outcomes(other, uploads) == ["replayed"] * 2 + ["accepted"] * 2
    assert other.parts(api.messages(other).content) == other.handed_over(sent)
    api.finish(other)


@pytest.mark.parametrize("key", [None, "ab" * 32], ids=["in clear", "storage key"])
def test_with_a_storage_key_no_file_has_a_batchs_secret_in_clear(api: Api, key: str | None) -> None:
    """Over the whole life of two batches. Without a storage key this search does find them."""
    if key is not None:
        signing = api.directory / "sealed.key"
        cipher = StorageCipher(bytes.fromhex(key))
        signing.write_bytes(cipher.seal(SHUFFLER_KEY.hex().encode(), "signing key"))
        api.restart(storage_key=SecretStr(key), signing_key_file=signing)
    batches = [api.deposit(), api.deposit(deployment=1)]
    found: set[bytes] = set()
    secrets = [api.core._vault.get(batch.batch_id) for batch in batches]
    hidden = {part for one in secrets for part in (one.outer.private, one.permutation)}

    def look() -> None:
        for file in api.settings.data_dir.rglob("*"):
            if file.is_file():
                data = file.read_bytes()
                found.update(part for part in hidden if part in data or part.hex().encode() in data)

    look()
    api.fill(batches[0])
    api.leases(batches[1], [user(8)])
    look()
    api.finish(batches[0])
    api.restart()
    api.abandon(batches[1])
    look()
    assert found == (hidden if key is None else set())
