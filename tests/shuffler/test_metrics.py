"""Metrics and conservation records: their values, and what operator and coordinator may see."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import create_engine, update

from riffle.common.process.endpoint import hash_token
from riffle.shuffler.metrics import BUCKETS, MAX_BATCHES, BatchStatistics, bucket, edge, quantiles
from riffle.shuffler.store.committer import Store
from riffle.shuffler.store.schema import batches
from tests.shuffler.conftest import Api
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN, Batch, user


def scrape(api: Api, token: str | None = OPERATOR_TOKEN) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = api.client.get("/metrics", headers=headers)
    return answer.status_code, answer.text


def sample(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, f"{series} is missing"
    return float(found[1])


def test_only_operator_and_metrics_token_read_them(api: Api) -> None:
    (api.directory / "metrics_hash").write_text(hash_token("reader"))
    for token, expected in ((COORDINATOR_TOKEN, 401), (api.token, 401), (None, 401)):
        assert scrape(api, token)[0] == expected
    assert scrape(api, "reader")[0] == 401
    api.restart(metrics_token_hash_file=api.directory / "metrics_hash")
    assert scrape(api, "reader")[0] == scrape(api)[0] == 200
    assert (
        api.call(
            "POST", "/nodes", "reader", json={"name": "n", "owner": "me", "users": 1}
        ).status_code
        == 401
    )


def test_frames_batches_and_drops_are_counted(api: Api) -> None:
    full, short = api.deposit(), api.deposit(deployment=1)
    api.fill(full)
    held = api.leases(short, [user(10)])[0]
    api.outcomes(short, [(held.lease, short.report()), ("00" * 16, short.report())])
    api.lease(short, [user(0)])
    api.finish(full)
    api.abandon(short)
    text = scrape(api)[1]
    for series, expected in {
        'riffle_shuffler_frames_total{outcome="accepted"}': 5,
        'riffle_shuffler_frames_total{outcome="unknown-lease"}': 1,
        'riffle_shuffler_leases_total{outcome="granted"}': 5,
        'riffle_shuffler_leases_total{outcome="already-reported"}': 1,
        'riffle_shuffler_batches{state="erased"}': 1,
        'riffle_shuffler_batches{state="abandoned"}': 1,
        'riffle_shuffler_batches{state="open"}': 0,
        'riffle_shuffler_reports_dropped{reason="abandon"}': 1,
        'riffle_shuffler_frames_refused{problem="unknown-lease"}': 1,
        "riffle_shuffler_reports_stored": 0,
        "riffle_shuffler_upload_seconds_count": 2,
        "riffle_shuffler_shuffle_seconds_count": 1,
        "riffle_shuffler_shuffled_messages_total": 4 * full.context.descriptor.padding.messages,
        "riffle_shuffler_inflight_bytes": 0,
    }.items():
        assert sample(text, series) == expected, series
    assert sample(text, "riffle_shuffler_disk_free_bytes") > 0
    opening = sample(text, "riffle_shuffler_opening_seconds_total")
    assert 5 * 10e-6 < opening < 5 * 0.1, "five outer seals opened, some 50 us each"


def test_nobody_is_named(api: Api) -> None:
    batch = api.deposit()
    held = api.leases(batch, [user(0)])[0]
    api.outcomes(batch, [(held.lease, batch.report())])
    text = scrape(api)[1]
    for name in (api.node_id, api.token, user(0), held.lease, batch.batch_id):
        assert name not in text


# Conservation records


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
def test_reports_dropped_at_an_end_are_counted_by_reason(api: Api, reason: str) -> None:
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


def test_the_coordinator_sees_at_most_the_tenths_of_an_open_batch(api: Api) -> None:
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
def test_small_batches_and_a_setting_hide_the_fill(api: Api, n: int, show: bool) -> None:
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


def test_latencies_of_batches_without_queries_are_dropped() -> None:
    """A batch's last uploads are followed by none that would write their latencies."""
    statistics = BatchStatistics(cast("Store", None), show_fill=True)
    for batch in range(MAX_BATCHES + 500):
        statistics.add_upload(f"{batch:032x}", 0.01)
    assert len(statistics._buffered) <= MAX_BATCHES
    assert statistics.take_due(f"{MAX_BATCHES + 499:032x}", 0.0).total() == 1
