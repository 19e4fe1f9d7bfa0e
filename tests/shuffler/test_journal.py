"""Logs by allow-list: nothing that tells reports or people apart."""

import json
import logging

import pytest

from riffle.shuffler.metrics import JOURNAL, note
from tests.shuffler.conftest import Api
from tests.shuffler.world import ANALYZER, NOW, OPERATOR_TOKEN, user


def test_only_listed_fields_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "riffle.shuffler")
    note("sealed", batch_id="ab", reports=3)
    assert json.loads(caplog.messages[0]) == {"event": "sealed", "batch_id": "ab", "reports": 3}
    with pytest.raises(ValueError, match="lease"):
        note("sealed", batch_id="ab", lease="cd")
    assert JOURNAL.allowed.isdisjoint({"node", "node_id", "user", "lease", "slot", "token"})


def test_no_line_names_node_user_lease_or_slot(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    batch, short = api.deposit(), api.deposit(deployment=1, expires_at=NOW + 30)
    users = [user(i) for i in range(5)]
    leases = api.leases(batch, users[:4])
    frames = [(lease.lease, batch.report()) for lease in leases]
    api.outcomes(batch, [*frames, ("00" * 16, frames[0][1]), frames[0]])
    api.leases(short, users[4:])
    api.finish(batch)
    api.clock.now += 31
    api.status(short)
    api.restart()
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("riffle")]
    events = [json.loads(line)["event"] for line in ours]
    named = {"started", "deposited", "sealed", "forwarded", "acknowledged", "expired", "erased"}
    assert set(events) == named
    private = [*users, *(lease.lease for lease in leases), api.node_id, api.token, "slot"]
    everything = "\n".join(record.getMessage() for record in caplog.records)
    assert not [word for word in private if word in everything]


def test_a_batch_is_followed_by_its_id(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "riffle.shuffler")
    api.restart(retention_seconds=50)
    finished, abandoned, expired, retired = (api.deposit(deployment=i) for i in range(4))
    for first_user, batch in ((0, finished), (4, retired)):
        api.fill(batch, first_user)
    api.finish(finished)
    api.abandon(abandoned)
    api.clock.now += 3_600
    api.status(expired)
    events: dict[str, list[str]] = {}
    for line in map(json.loads, caplog.messages):
        events.setdefault(line.get("batch_id"), []).append(line["event"])
    full = ["deposited", "sealed"]
    assert events[finished.batch_id] == [*full, "forwarded", "acknowledged", "erased"]
    assert events[retired.batch_id] == [*full, "retired", "erased"]
    assert events[abandoned.batch_id] == ["deposited", "abandoned", "erased"]
    assert events[expired.batch_id] == ["deposited", "expired", "erased"]


def test_what_the_operator_does_is_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "riffle.shuffler")
    pins = api.directory / "pins"
    pins.write_text(ANALYZER.public.hex() + "\n")
    api.restart(analyzer_keys_file=pins)
    node_id, _ = api.enrol(1)
    api.call("DELETE", f"/nodes/{node_id}", OPERATOR_TOKEN)
    for deployment in range(2):
        api.deposit(deployment=deployment)
    pins.write_text(ANALYZER.public.hex() + "\n" + "ab" * 32 + "\n")
    api.deposit(deployment=2)
    lines = [json.loads(message) for message in caplog.messages]
    acts = [(line["event"], line.get("keys")) for line in lines if "batch_id" not in line]
    changed = "analyzer-keys-changed"
    assert acts[1:] == [("node-enrolled", None), ("node-revoked", None), (changed, 1), (changed, 2)]


def test_a_lost_secret_is_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "riffle.shuffler")
    batch = api.deposit()
    next((api.directory / "data" / "secrets").iterdir()).unlink()
    api.restart()
    told = {"event": "secret-lost", "batch_id": batch.batch_id, "state": "open"}
    assert told in [json.loads(message) for message in caplog.messages if message[0] == "{"]


def test_an_unexpected_error_shows_nothing(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = api.deposit()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("riffle.shuffler.store.leasing.lease_slots", broken)
    answer = api.lease(batch, [user(0)])
    assert answer.status_code == 500
    assert "mistake" not in answer.text
    assert "Traceback" not in answer.text
    assert user(0) not in caplog.text
