"""The coordinator's metrics: who may read them and what they say."""

import datetime
from unittest.mock import Mock

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import PROBLEMS
from riffle.coordinator.batches.counts import FALSE_ALARM
from riffle.coordinator.store.schema import ledger
from riffle.deploy.network.certificates import VALID_DAYS, make_authority
from tests.coordinator.calls import Api
from tests.coordinator.world import RUN, SMALL, TOKEN, open_store
from tests.shuffler.test_metrics import sample

NOW = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)


def scrape(api: Api, token: str = TOKEN) -> tuple[int, str]:
    answer = api.client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
    return answer.status_code, answer.text


def test_a_token_of_its_own_reads_them_and_nothing_else(api: Api) -> None:
    assert api.client.get("/metrics").status_code == 401
    file = api.directory / "metrics_hash"
    file.write_text(hash_token("reader"))
    assert scrape(api, "reader")[0] == 401
    api.restart(metrics_token_hash_file=file)
    assert scrape(api, "reader")[0] == scrape(api)[0] == 200
    runs = api.client.get("/v1/runs", headers={"Authorization": "Bearer reader"})
    assert runs.status_code == 401


def test_metrics_that_need_no_store_are_shown_without_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample(scrape(api)[1], "riffle_coordinator_runs_waiting") == 0
    away = OperationalError("SELECT", {}, OSError())
    monkeypatch.setattr("riffle.coordinator.store.queries.Queries.census", Mock(side_effect=away))
    status, text = scrape(api)
    assert status == 200
    assert sample(text, "riffle_coordinator_disk_free_bytes") > 0
    assert "riffle_coordinator_runs" not in text


def test_every_problem_is_0_from_the_start(api: Api) -> None:
    text = scrape(api)[1]
    for problem in PROBLEMS:
        for name in ("riffle_coordinator_steps_failed_total", "riffle_problems_total"):
            assert sample(text, f'{name}{{problem="{problem}"}}') == 0


def test_readiness_and_the_end_of_the_certificate_are_shown(api: Api) -> None:
    assert sample(scrape(api)[1], "riffle_ready") == 1
    assert sample(scrape(api)[1], "riffle_certificate_end_seconds") == 0, "there is no TLS here"
    certificate, _ = make_authority(NOW).issue("coordinator", NOW)
    (api.directory / "tls.pem").write_text(certificate)
    api.restart(tls_cert_file=api.directory / "tls.pem")
    api.shuffler.down = 1
    text = scrape(api)[1]
    assert sample(text, "riffle_ready") == 0
    end = NOW + datetime.timedelta(days=VALID_DAYS)
    assert sample(text, "riffle_certificate_end_seconds") == end.timestamp()


def test_a_run_shows_in_sums(api: Api) -> None:
    api.shuffler.broken = {0: 3}
    api.shuffler.down = 1
    api.finish()
    api.until(lambda: api.get(f"/{RUN}/deployments")["deployments"][-1]["acknowledged"])
    spent = api.get(f"/{RUN}/ledger")
    planned = 'riffle_coordinator_step_seconds_count{step="planning"}'
    api.until(lambda: sample(scrape(api)[1], planned) == 2)  # told once it is acknowledged
    text = scrape(api)[1]
    for series, expected in {
        'riffle_coordinator_runs{state="finished"}': 1,
        'riffle_coordinator_batches{state="counted"}': 2,
        "riffle_coordinator_messages_failed": 3,
        "riffle_coordinator_messages_opened": sum(e["opened"] for e in spent["entries"]),
        "riffle_coordinator_epsilon_spent": spent["epsilon"],
        "riffle_coordinator_seeded_batches": 0,
        "riffle_coordinator_suspicious_batches": 0,
        'riffle_coordinator_steps_failed_total{problem="unavailable"}': 1,
    }.items():
        assert sample(text, series) == pytest.approx(expected), series
    assert RUN not in text


def test_a_marked_batch_shows_wherever_marks_are_shown(api: Api) -> None:
    api.finish()
    store, chances = open_store(api.directory), (FALSE_ALARM * 0.99, FALSE_ALARM)
    with store._writer.begin() as connection:
        for index, chance in enumerate(chances):
            connection.execute(update(ledger).where(ledger.c.index == index).values(chance=chance))
    store.close()
    assert [entry["suspicious"] for entry in api.get(f"/{RUN}/ledger")["entries"]] == [True, False]
    assert api.get(f"/{RUN}/result")["suspicious_batches"] == 1
    assert [run["suspicious_batches"] for run in api.get("")["runs"]] == [1]
    assert sample(scrape(api)[1], "riffle_coordinator_suspicious_batches") == 1


def test_seeded_batches_are_told_apart(api: Api) -> None:
    """Their epsilon has no bound; a gauge of infinity would hide every other batch's."""
    api.restart(test_entry=True)
    assert api.call("POST", "", json={**SMALL, "test_seed": 1}).status_code == 201
    api.wait_for("finished")
    text = scrape(api)[1]
    assert sample(text, "riffle_coordinator_seeded_batches") == 2
    assert sample(text, "riffle_coordinator_epsilon_spent") == 0
