"""Conservation over both services, as the coordinator answers it."""

from dataclasses import replace

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.api.presentation import conservation_model
from tests.coordinator.calls import Api
from tests.coordinator.faults import read
from tests.coordinator.world import RUN, SMALL


def test_a_finished_run_balances_to_the_message(api: Api) -> None:
    api.shuffler.broken = {0: 3}
    api.finish()
    result = api.get(f"/{RUN}/conservation")
    total = sum(batch["expected"] for batch in result["batches"])
    assert result["balanced"] is True
    assert (result["accepted"], result["forwarded"]) == (total, total)
    assert (result["held"], result["dropped"]) == (0, 0)
    assert (result["opened"], result["failed"]) == (total - 3, 3)


def test_an_open_batch_balances_and_says_no_more(api: Api) -> None:
    api.shuffler.fills = False
    assert api.call("POST", "", json=SMALL).status_code == 201
    api.until(lambda: api.get(f"/{RUN}/deployments")["deployments"][0]["state"] == "open")
    result = api.get(f"/{RUN}/conservation")
    assert result["balanced"] is True
    assert result["batches"][0]["opened"] is None
    assert result["batches"][0]["shuffler"]["accepted"] is None


def test_a_shuffler_that_is_away_is_named(api: Api) -> None:
    api.finish()
    api.shuffler.down = 1
    result = api.get(f"/{RUN}/conservation")
    assert result["balanced"] is None
    assert "does not answer" in result["batches"][0]["trouble"]
    assert result["batches"][1]["trouble"] is None


def test_a_batch_that_was_never_deposited_balances(api: Api) -> None:
    """It expired while the shuffler was away; whatever the shuffler has no row of is empty."""
    api.shuffler.refusal = RemoteError("weak-guarantee", "never deposited")
    assert api.call("POST", "", json=SMALL).status_code == 201
    api.wait_for("failed")
    result = api.get(f"/{RUN}/conservation")
    assert result["balanced"] is True
    assert result["batches"][0]["trouble"] is None


def test_a_deposited_batch_that_the_shuffler_does_not_know_is_not_balanced(api: Api) -> None:
    api.finish()
    api.shuffler.states.clear()
    result = api.get(f"/{RUN}/conservation")
    assert result["balanced"] is None
    assert "no such batch" in result["batches"][0]["trouble"]


def test_an_imbalance_shows(api: Api) -> None:
    api.finish()
    rows, spends = read(api.directory, lambda store: (store.deployments(RUN), store.ledger(RUN)))
    away = [LocalError("unavailable", "away")] * len(rows)
    assert conservation_model(rows, spends, away).balanced is None
    spends[1] = replace(spends[1], opened=spends[1].opened - 1)
    assert conservation_model(rows, spends, away).balanced is False


def test_an_unknown_run(api: Api) -> None:
    assert api.call("GET", f"/{RUN}/conservation").status_code == 404
