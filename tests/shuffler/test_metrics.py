"""The shuffler's metrics: who may read them and what they say."""

import re

from riffle.common.process.endpoint import hash_token
from tests.shuffler.conftest import Api
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN, user


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
    assert api.call("POST", "/nodes", "reader", json={"name": "n", "users": 1}).status_code == 401


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
