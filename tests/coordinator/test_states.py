"""Every pair of a state and an event, in every table of states."""

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.coordinator import states
from tests.coordinator.lease import LEASE, LeaseEvent, LeaseState

TABLES: dict[str, tuple[Mapping[tuple[Any, Any], Any], Any, Any]] = {
    "run": (states.RUN, states.RunState, states.RunEvent),
    "deployment": (states.DEPLOYMENT, states.DeploymentState, states.DeploymentEvent),
    "key": (states.KEY, states.KeyState, states.KeyEvent),
    "lease": (LEASE, LeaseState, LeaseEvent),
}
EXPECTED = {
    "run": """
        running   finish finished | fail failed | stop stopped
        finished
        failed
        stopped
    """,
    "deployment": """
        issued    deposit open | abandon abandoned
        open      seal sealed | abandon abandoned
        sealed    count counted | reject rejected | abandon abandoned
        counted   acknowledge counted
        rejected  acknowledge rejected
        abandoned
    """,
    "key": """
        pending   activate active
        active    activate active | expire expired
        expired   erase erased
        erased    erase erased
    """,
    "lease": """
        held      write held | renew held | release expired | expire expired | restart lost
        expired   write expired | renew held | release expired | expire expired | take lost
        expired   restart lost
        lost
    """,
}


def expected(name: str) -> dict[tuple[str, str], str]:
    targets = {}
    for line in EXPECTED[name].strip().splitlines():
        state, _, rest = line.strip().partition(" ")
        for transition in filter(str.strip, rest.split("|")):
            event, target = transition.split()
            targets[state, event] = target
    return targets


@pytest.mark.parametrize("name", TABLES)
def test_each_event_in_each_state_leads_where_it_should_or_is_refused(name: str) -> None:
    table, state_type, event_type = TABLES[name]
    targets = expected(name)
    assert len(targets) == len(table)
    for state in get_args(state_type):
        for event in get_args(event_type):
            if (state, event) in targets:
                assert states.after(table, state, event) == targets[state, event]
            else:
                with pytest.raises(LocalError, match=f"'{event}' is not possible") as caught:
                    states.after(table, state, event)
                assert caught.value.slug == "wrong-state"


@pytest.mark.parametrize("name", TABLES)
def test_every_state_and_event_is_used(name: str) -> None:
    table, state_type, event_type = TABLES[name]
    assert {event for _, event in table} == set(get_args(event_type))
    assert {state for state, _ in table} | set(table.values()) == set(get_args(state_type))


def test_an_ended_run_and_an_abandoned_deployment_stay_so() -> None:
    for end in ("finished", "failed", "stopped"):
        assert not any(state == end for state, _ in states.RUN)
    assert not any(state == "abandoned" for state, _ in states.DEPLOYMENT)


def test_no_key_becomes_pending_again_and_no_lost_lease_returns() -> None:
    assert "pending" not in states.KEY.values()
    assert not any(state == "lost" for state, _ in LEASE)
