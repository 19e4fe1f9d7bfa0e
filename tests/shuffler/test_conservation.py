"""Conservation of reports and messages, and what of it the coordinator is shown."""

from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import create_engine, update

from riffle.shuffler.conservation import BUCKETS, KEPT, Books, bucket, edge, quantiles
from riffle.shuffler.store.committer import Access
from riffle.shuffler.store.schema import batches
from tests.shuffler.conftest import Api
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN, Batch, user


def record(api: Api, batch: Batch, token: str = OPERATOR_TOKEN) -> dict[str, Any]:
    answer = api.call("GET", f"/batches/{batch.batch_id}/conservation", token)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def flow(api: Api, batch: Batch) -> tuple[int, int, int, int]:
    found = record(api, batch)
    assert found["balanced"]
    kinds = ("accepted", "held", "forwarded", "dropped")
    return tuple(found["messages"][kind] for kind in kinds)


def test_messages_go_from_held_to_forwarded(api: Api) -> None:
    batch = api.deposit()
    L = batch.context.descriptor.padding.messages
    assert flow(api, batch) == (0, 0, 0, 0)
    api.fill(batch)
    assert flow(api, batch) == (4 * L, 4 * L, 0, 0)
    api.messages(batch)
    assert flow(api, batch) == (4 * L, 0, 4 * L, 0)
    api.finish(batch)
    assert flow(api, batch) == (4 * L, 0, 4 * L, 0)
    assert record(api, batch)["forwarded"] == 4


@pytest.mark.parametrize("reason", ["abandon", "expire", "lost", "retire"])
def test_what_an_end_drops_is_counted_under_its_reason(api: Api, reason: str) -> None:
    batch = api.deposit()
    L = batch.context.descriptor.padding.messages
    stored = 4 if reason == "retire" else 2
    if stored == 4:
        api.fill(batch)
    else:
        held = api.leases(batch, [user(0), user(1)])
        api.outcomes(batch, [(lease.lease, batch.report()) for lease in held])
    if reason == "abandon":
        api.abandon(batch)
    elif reason == "lost":
        (api.directory / f"data/secrets/{batch.batch_id}.secret").unlink()
        api.restart()
    else:
        api.clock.now += 3_601 if reason == "expire" else 3_601 + 30 * 86_400
    assert flow(api, batch) == (stored * L, 0, 0, stored * L)
    assert record(api, batch)["dropped"] == {reason: stored}


def test_every_frame_that_is_not_accepted_has_a_reason(api: Api) -> None:
    batch = api.deposit()
    held = api.leases(batch, [user(0), user(1)])
    frame = (held[0].lease, batch.report())
    api.outcomes(batch, [frame])
    api.outcomes(batch, [frame, (held[1].lease, bytes(len(frame[1]))), ("00" * 16, frame[1])])
    api.call("POST", f"/batches/{batch.batch_id}/reports", api.token, content=b"x")
    assert record(api, batch)["rejected"] == {
        "replayed": 1,
        "wrong-key": 1,
        "unknown-lease": 1,
        "wrong-size": 1,
    }


def test_a_lost_report_shows(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    engine = create_engine(f"sqlite:///{api.directory / 'data/shuffler.sqlite'}")
    with engine.begin() as connection:
        connection.execute(update(batches).values(reports=5))
    engine.dispose()
    assert not record(api, batch)["balanced"]


def filled(api: Api, n: int, reports: int) -> tuple[Batch, list[str]]:
    batch = api.deposit(n)
    held = api.leases(batch, [user(number) for number in range(n)])
    frames = [(lease.lease, batch.report()) for lease in held[:reports]]
    api.outcomes(batch, frames)
    return batch, [lease.lease for lease in held[reports:]]


def test_of_an_open_batch_the_coordinator_sees_tenths_at_most(api: Api) -> None:
    batch, left = filled(api, 100, 29)
    seen = record(api, batch, COORDINATOR_TOKEN)
    shown = {"batch_id", "state", "n", "messages_a_report", "fill_tenths", "balanced"}
    assert {name for name, value in seen.items() if value is not None} == shown
    assert seen["fill_tenths"] == 2
    api.outcomes(batch, [(lease, batch.report()) for lease in left[:21]])
    assert record(api, batch)["fill_tenths"] == 5
    assert record(api, batch, COORDINATOR_TOKEN) == seen  # until it may look again
    api.clock.now += 10
    assert record(api, batch, COORDINATOR_TOKEN)["fill_tenths"] == 5


def test_a_full_batch_is_shown_whole(api: Api) -> None:
    batch, left = filled(api, 100, 99)
    api.restart()  # the next process has latencies of its own uploads only
    api.outcomes(batch, [(left[0], batch.report())])
    seen = record(api, batch, COORDINATOR_TOKEN)
    assert seen == record(api, batch)
    assert (seen["accepted"], seen["held"], seen["fill_tenths"]) == (100, 100, None)
    assert seen["upload_seconds"]["uploads"] == 1
    assert 0 < seen["upload_seconds"]["p50"] <= seen["upload_seconds"]["p99"] < 60


@pytest.mark.parametrize(("n", "show"), [(99, True), (100, False)])
def test_small_batches_and_a_shuffler_told_not_to_show_no_fill(
    api: Api, n: int, show: bool
) -> None:
    api.restart(show_fill=show)
    batch, left = filled(api, n, n - 1)
    assert record(api, batch, COORDINATOR_TOKEN)["fill_tenths"] is None
    api.outcomes(batch, [(left[0], batch.report())])
    told = record(api, batch, COORDINATOR_TOKEN)["upload_seconds"]
    assert (told is None) == (n < 100)


def test_latencies_survive_in_the_store(api: Api, tmp_path: Path) -> None:
    batch = api.deposit()
    api.fill(batch)
    assert record(api, batch)["upload_seconds"]["uploads"] == 1
    api.restart()
    assert record(api, batch)["upload_seconds"]["uploads"] == 1


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.0011, 0.5, 3.0, 54.0, 1e6])
def test_a_latency_lies_below_its_buckets_edge(seconds: float) -> None:
    index = bucket(seconds)
    assert 0 <= index < BUCKETS
    assert seconds <= edge(index) * (1 + 1e-9) or index == BUCKETS - 1
    assert index == 0 or seconds > edge(index - 1)


def test_quantiles_of_a_histogram() -> None:
    found = quantiles({0: 50, 8: 45, 16: 4, 20: 1})
    assert found is not None
    assert (found.uploads, found.p50, found.p95, found.p99) == (100, edge(0), edge(8), edge(16))
    assert quantiles({}) is None


def test_latencies_of_batches_that_nobody_asks_about_are_forgotten() -> None:
    """A batch's last uploads are followed by none that would write their latencies."""
    books = Books(cast("Access", None), show_fill=True)
    for batch in range(KEPT + 500):
        books.took(f"{batch:032x}", 0.01)
    assert len(books._waiting) <= KEPT
    assert books.due(f"{KEPT + 499:032x}", 0.0).total() == 1
