"""The states of a run and of a deployment, each as one table of transitions.

Each transition is one transaction of the store, which refuses every other one. A deployment is

- issued: recorded with its descriptor's bytes, perhaps deposited;
- open: the shuffler has it and takes reports;
- sealed: it holds n distinct reports;
- counted: spend, counts, stage result and next deployment are committed together;
- rejected: more reports were dishonest than promised: spend committed, counts not used;
- abandoned: given up, or lost by the shuffler, before anything of it was kept here, so nothing was
  spent.

Counted and rejected batches must still be acknowledged, so that the shuffler may erase them.
"""

from typing import Literal

from riffle.common.protocol.errors import LocalError

RunState = Literal["running", "finished", "failed", "stopped"]
DeploymentState = Literal["issued", "open", "sealed", "counted", "rejected", "abandoned"]

RUN: dict[RunState, tuple[RunState, ...]] = {
    "running": ("finished", "failed", "stopped"),
    "finished": (),
    "failed": (),
    "stopped": (),
}

DEPLOYMENT: dict[DeploymentState, tuple[DeploymentState, ...]] = {
    "issued": ("open", "abandoned"),
    "open": ("sealed", "abandoned"),
    "sealed": ("counted", "rejected", "abandoned"),
    "counted": (),
    "rejected": (),
    "abandoned": (),
}

UNSETTLED: tuple[DeploymentState, ...] = ("issued", "open", "sealed")
TO_ACKNOWLEDGE: tuple[DeploymentState, ...] = ("counted", "rejected")


def check_run(state: RunState, to: RunState) -> None:
    """Raise LocalError ``wrong-state`` unless a run may go from ``state`` to ``to``."""
    if to not in RUN[state]:
        raise LocalError("wrong-state", f"a run that is {state} cannot become {to}")


def check_deployment(state: DeploymentState, to: DeploymentState) -> None:
    """Raise LocalError ``wrong-state`` unless a deployment may go from ``state`` to ``to``."""
    if to not in DEPLOYMENT[state]:
        raise LocalError("wrong-state", f"a deployment that is {state} cannot become {to}")
