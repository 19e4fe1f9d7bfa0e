"""The states of a run, a deployment and an analyzer key: one table each.

A table maps (state, event) to the next state. Some events keep the state.

A deployment is

- issued: recorded with its descriptor's bytes, and perhaps already deposited;
- open: the shuffler has its descriptor and takes reports;
- sealed: its batch holds n reports;
- counted: its spend, its counts, the stage result and the next deployment are committed together;
- rejected: its spend is committed, but its counts are not used, because too many reports were
  dishonest or the counts of a batch of sums show lies;
- abandoned: given up, or lost by the shuffler, before any message was opened here. The ledger
  records no spend.

An analyzer key is

- pending: nodes and shuffler have yet to pin it; nothing is sealed to it;
- active: messages of new batches are sealed to it;
- expired: it opens only the batches that were issued under it;
- erased: no unfinished batch needs it, and its private half is destroyed.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar

from riffle.common.protocol.errors import LocalError

RunState = Literal["running", "finished", "failed", "stopped"]
RunEvent = Literal["finish", "fail", "stop"]

RUN: dict[tuple[RunState, RunEvent], RunState] = {
    ("running", "finish"): "finished",
    ("running", "fail"): "failed",
    ("running", "stop"): "stopped",
}

DeploymentState = Literal["issued", "open", "sealed", "counted", "rejected", "abandoned"]
DeploymentEvent = Literal["deposit", "seal", "count", "reject", "acknowledge", "abandon"]

DEPLOYMENT: dict[tuple[DeploymentState, DeploymentEvent], DeploymentState] = {
    ("issued", "deposit"): "open",
    ("open", "seal"): "sealed",
    ("sealed", "count"): "counted",
    ("sealed", "reject"): "rejected",
    ("counted", "acknowledge"): "counted",
    ("rejected", "acknowledge"): "rejected",
    ("issued", "abandon"): "abandoned",
    ("open", "abandon"): "abandoned",
    ("sealed", "abandon"): "abandoned",
}

UNSETTLED: tuple[DeploymentState, ...] = ("issued", "open", "sealed")
TO_ACKNOWLEDGE: tuple[DeploymentState, ...] = ("counted", "rejected")

KeyState = Literal["pending", "active", "expired", "erased"]
KeyEvent = Literal["activate", "expire", "erase"]

KEY: dict[tuple[KeyState, KeyEvent], KeyState] = {
    ("pending", "activate"): "active",
    ("active", "activate"): "active",
    ("active", "expire"): "expired",
    ("expired", "erase"): "erased",
    ("erased", "erase"): "erased",
}

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)


def after(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """Returns the state after ``event``.

    Raises LocalError ``wrong-state`` if the table has no such transition.
    """
    target = table.get((state, event))
    if target is None:
        raise LocalError("wrong-state", f"'{event}' is not possible in the state '{state}'")
    return target
