"""Logs by allow-list: nothing that tells reports or people apart."""

import json
import logging

import pytest

from riffle.shuffler.metrics import JOURNAL, note
from tests.shuffler.conftest import Api
from tests.shuffler.world import NOW, user


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
    assert set(events) == {"started", "deposited", "sealed", "forwarded", "ended"}
    private = [*users, *(lease.lease for lease in leases), api.node_id, api.token, "slot"]
    everything = "\n".join(record.getMessage() for record in caplog.records)
    assert not [word for word in private if word in everything]


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

    monkeypatch.setattr("riffle.shuffler.store.slots.lease_slots", broken)
    answer = api.lease(batch, [user(0)])
    assert answer.status_code == 500
    assert "mistake" not in answer.text
    assert "Traceback" not in answer.text
    assert user(0) not in caplog.text
