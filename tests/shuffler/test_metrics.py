"""Metrics and conservation records: their values, and what operator and coordinator may see."""

import re
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from sqlalchemy import delete, update
from sqlalchemy.exc import OperationalError

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import PROBLEMS
from riffle.common.protocol.wire import BatchState, BatchStatus, Conservation, MessageFlow
from riffle.shuffler import metrics, rules
from riffle.shuffler.rules import Decision, Outcome
from riffle.shuffler.store.schema import batches
from riffle.shuffler.store.schema import reports as stored
from tests.shuffler.conftest import Api, both_aggregations
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


def test_metrics_that_need_no_store_are_shown_without_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample(scrape(api)[1], 'riffle_shuffler_batches{state="open"}') == 0
    away = OperationalError("SELECT", {}, OSError())
    monkeypatch.setattr(api.core.metrics, "measure_store", Mock(side_effect=away))
    status, text = scrape(api)
    assert status == 200
    assert sample(text, "riffle_shuffler_inflight_bytes") == 0
    assert "riffle_shuffler_batches" not in text


def test_every_reason_is_0_from_the_start(api: Api) -> None:
    """A series that appears with its first loss has no increase that an alert could see."""
    text = scrape(api)[1]
    for outcome in (*get_args(Outcome), "wrong-size"):
        assert sample(text, f'riffle_shuffler_frames_total{{outcome="{outcome}"}}') == 0
        if outcome != "accepted":
            assert sample(text, f'riffle_shuffler_frames_refused{{problem="{outcome}"}}') == 0
    for decision in {"granted", "late", *get_args(Decision)} - {"grant", "keep"}:
        assert sample(text, f'riffle_shuffler_leases_total{{outcome="{decision}"}}') == 0
    for reason in ("abandon", "expire", "lost", "retire"):
        assert sample(text, f'riffle_shuffler_reports_dropped{{reason="{reason}"}}') == 0
    for problem in PROBLEMS:
        assert sample(text, f'riffle_problems_total{{problem="{problem}"}}') == 0


def test_readiness_nodes_and_their_users_are_shown(api: Api, tmp_path: Path) -> None:
    body = {"name": "second", "owner": "me", "users": 7}
    before = scrape(api)[1]
    node = api.call("POST", "/nodes", OPERATOR_TOKEN, json=body).json()["node_id"]
    after = scrape(api)[1]
    for series, more in (("nodes", 1), ("users_left", 7)):
        old, new = (sample(text, f"riffle_shuffler_{series}") for text in (before, after))
        assert new == old + more
    assert api.call("DELETE", f"/nodes/{node}", OPERATOR_TOKEN).status_code == 204
    revoked = scrape(api)[1]
    for series in ("riffle_shuffler_nodes", "riffle_shuffler_users_left"):
        assert sample(revoked, series) == sample(before, series)
    assert sample(revoked, "riffle_ready") == 1
    api.clock.now += 1  # the answer of a probe holds for a second
    (api.directory / "data" / "secrets").rename(tmp_path / "gone")
    assert sample(scrape(api)[1], "riffle_ready") == 0


def test_frames_batches_and_drops_are_counted(api: Api) -> None:
    full, short = api.deposit(), api.deposit(deployment=1)
    api.fill(full)
    held = api.leases(short, [user(10)])[0]
    api.outcomes(short, [(held.lease, short.report()), ("00" * 16, short.report())])
    api.lease(short, [user(0)])  # it has reported
    api.finish(full)
    api.abandon(short)
    text = scrape(api)[1]
    for series, expected in {
        'riffle_shuffler_frames_total{outcome="accepted"}': 5,
        'riffle_shuffler_frames_total{outcome="unknown-lease"}': 1,
        'riffle_shuffler_leases_total{outcome="granted"}': 5,
        'riffle_shuffler_leases_total{outcome="user-unavailable"}': 1,
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


def test_a_first_loss_is_a_change(api: Api) -> None:
    """A series that appears with its first value has no rise for an alert to see."""
    for reason in ("abandon", "expire", "lost", "retire"):
        assert sample(scrape(api)[1], f'riffle_shuffler_reports_dropped{{reason="{reason}"}}') == 0


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


@both_aggregations
@pytest.mark.parametrize("state", ["open", "sealed", "forwarded", "erased", "abandoned"])
def test_a_lost_report_shows(api: Api, state: str) -> None:
    """To the operator, and to the coordinator at its next look."""
    batch = api.deposit()
    if state in ("open", "abandoned"):
        held = api.leases(batch, [user(0), user(1)])
        api.outcomes(batch, [(lease.lease, batch.report()) for lease in held])
    else:
        api.fill(batch)
    if state == "abandoned":
        api.abandon(batch)
    elif state == "forwarded":
        api.messages(batch)
    elif state == "erased":
        api.finish(batch)
    callers = (OPERATOR_TOKEN, COORDINATOR_TOKEN)
    assert [record(api, batch, caller)["balanced"] for caller in callers] == [True, True]
    with api.core._store.engine.begin() as store:
        store.execute(update(batches).values(reports=batches.c.reports + 1))
    api.clock.now += 10
    assert [record(api, batch, caller)["balanced"] for caller in callers] == [False, False]


def test_a_report_whose_bytes_are_lost_shows(api: Api) -> None:
    for state in ("open", "sealed"):
        batch = api.deposit(deployment=int(state == "open"))
        held = api.leases(batch, [user(int(state == "open") * 4 + number) for number in range(4)])
        frames = [(lease.lease, batch.report()) for lease in held]
        for frame in frames[: 4 if state == "sealed" else 3]:
            api.outcomes(batch, [frame])
        assert record(api, batch)["balanced"]
        with api.core._store.engine.begin() as store:
            row = (stored.c.batch_id == batch.batch_id) & (stored.c.slot == 0)
            store.execute(delete(stored).where(row))
        assert not record(api, batch)["balanced"], state


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
    api.clock.now += 9
    assert record(api, batch, COORDINATOR_TOKEN) == seen
    api.clock.now += 1
    assert record(api, batch, COORDINATOR_TOKEN)["fill_tenths"] == 5


def seen_by_the_coordinator(api: Api, batch: Batch) -> list[dict[str, Any]]:
    """Returns the coordinator's two views of a batch, without the batch's id."""
    seen = [api.status(batch, COORDINATOR_TOKEN), record(api, batch, COORDINATOR_TOKEN)]
    return [{**one, "batch_id": ""} for one in seen]


@pytest.mark.parametrize("n", [4, 100])
def test_the_coordinator_sees_nothing_of_who_was_slow(api: Api, n: int) -> None:
    """A user who is late, a refused and a repeated report change no answer to the coordinator."""
    quick, slow = api.deposit(n), api.deposit(n, deployment=1)
    api.fill(quick)
    late = api.leases(slow, [user(n)])[0]
    api.clock.now += 60
    assert api.outcomes(slow, [(late.lease, slow.report())]) == ["late"]
    held = api.leases(slow, [user(n + 1 + i) for i in range(n)])
    frames = [(lease.lease, slow.report()) for lease in held]
    api.outcomes(slow, frames[:1])
    api.outcomes(slow, [*frames, ("00" * 16, slow.report())])
    for step in (lambda _: None, api.messages, api.finish):
        step(quick), step(slow)
        assert seen_by_the_coordinator(api, quick) == seen_by_the_coordinator(api, slow)
    assert record(api, slow, COORDINATOR_TOKEN)["forwarded"] == n


@pytest.mark.parametrize("n", [4, 100])
def test_a_short_batch_tells_the_coordinator_tenths_at_most(api: Api, n: int) -> None:
    one, other = api.deposit(n), api.deposit(n, deployment=1)
    for first, batch, reports in ((0, one, 1), (n, other, max(2, n // 20))):
        held = api.leases(batch, [user(first + number) for number in range(n)])
        api.outcomes(batch, [(lease.lease, batch.report()) for lease in held[:reports]])
        api.abandon(batch)
    assert seen_by_the_coordinator(api, one) == seen_by_the_coordinator(api, other)


def whole_views(n: int, state: BatchState, k: int) -> tuple[Conservation, BatchStatus]:
    """The operator's record and status of a batch with k reports."""
    held, dropped = (k, {}) if state == "open" else (0, {"expire": k})
    record = Conservation(
        batch_id="00" * 16,
        state=state,
        n=n,
        messages_a_report=3,
        fill_tenths=10 * k // n,
        accepted=k,
        held=held,
        forwarded=0,
        dropped=dropped,
        rejected={"late": k},
        messages=MessageFlow(accepted=3 * k, held=3 * held, forwarded=0, dropped=3 * (k - held)),
        balanced=True,
    )
    status = BatchStatus(
        batch_id="00" * 16,
        state=state,
        n=n,
        declined=("too-slow",),
        reports=k,
        leased=n - k,
        episodes=n,
        dropped={"late": k},
    )
    return record, status


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("state", ["open", "abandoned"])
@pytest.mark.parametrize("n", [99, 100, 1_000])
def test_what_the_coordinator_sees_follows_from_the_tenth_alone(
    n: int, state: BatchState, show: bool
) -> None:
    """Not even the first and the last reports of a batch show more."""
    batch = {"batch_id": "00" * 16, "state": state, "n": n}
    status_seen = batch | {"declined": ["too-slow"]}
    status_seen |= {"episodes": n} if state == "abandoned" else {}
    record_seen = batch | {"messages_a_report": 3, "balanced": True}
    for k in range(n):
        record, status = whole_views(n, state, k)
        tenth = {"fill_tenths": 10 * k // n} if show and n >= rules.SMALLEST_SHOWN else {}
        seen = metrics.for_coordinator(record, show_fill=show)
        assert seen.model_dump(mode="json", exclude_none=True) == record_seen | tenth, k
        shown = rules.for_coordinator(status)
        assert shown.model_dump(mode="json", exclude_none=True) == status_seen, k


@pytest.mark.parametrize(("phase", "remembered"), [(0, 1_024), (5, 1_024), (0, 1)])
def test_every_tenth_shows_ten_seconds_after_the_one_before(
    api: Api, phase: int, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the coordinator looks first, and at however many batches."""
    monkeypatch.setattr("riffle.shuffler.core.MAX_RECORDS", remembered)
    api.clock.now += phase
    batch, other = api.deposit(100), api.deposit(100, deployment=1)
    before = seen_by_the_coordinator(api, batch)
    for tenth in range(10):
        assert before[1]["fill_tenths"] == tenth
        people = [user(number) for number in range(10 * tenth, min(10 * tenth + 10, 99))]
        for seconds, some in ((1, people[:9]), (3, people[9:]), (5, [])):
            api.clock.now += seconds
            if some:
                held = api.leases(batch, some)
                api.outcomes(batch, [(lease.lease, batch.report()) for lease in held])
            record(api, other, COORDINATOR_TOKEN)
            assert seen_by_the_coordinator(api, batch) == before
        api.clock.now += 1
        before = seen_by_the_coordinator(api, batch)


@pytest.mark.parametrize(("n", "show"), [(99, True), (100, False)])
def test_small_batches_and_a_setting_hide_the_fill(api: Api, n: int, show: bool) -> None:
    api.restart(show_fill=show)
    batch, _ = filled(api, n, n - 1)
    assert record(api, batch, COORDINATOR_TOKEN)["fill_tenths"] is None
    api.abandon(batch)
    assert record(api, batch, COORDINATOR_TOKEN)["fill_tenths"] is None
