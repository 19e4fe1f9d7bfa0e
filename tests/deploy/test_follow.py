"""Following a run: true values that the operator supplies, and unfinished runs."""

import time
from typing import Any, cast

import pytest

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.specs import TrueValueSpec
from riffle.deploy.follow import TrueValues, _time_left, stop_unfinished
from riffle.deploy.operator import Operator
from riffle.node_client.environments.tabular import riverswim


class Intermittent:
    """An operator's client whose coordinator may not answer."""

    def __init__(self) -> None:
        self.answers = True
        self.supplied: list[TrueValueSpec] = []

    def deployment(self, run_id: str, index: int) -> dict[str, Any]:
        if not self.answers:
            raise LocalError("unavailable", "no answer")
        left, right = [[0] * 4] * 6, [[1] * 4] * 6
        if index == 0:
            return {"mixture": {"policies": [left, right], "weights": [3 << 30, 1 << 30]}}
        return {"mixture": {"policies": [right], "weights": [1 << 32]}}

    def supply_true_values(self, run_id: str, values: TrueValueSpec) -> None:
        self.supplied.append(values)


def issued(index: int) -> dict[str, Any]:
    return {"kind": "deployment_issued", "data": {"index": index}}


def test_true_values_wait_for_a_coordinator_that_does_not_answer() -> None:
    operator = Intermittent()
    watch = TrueValues(cast("Operator", operator), "run", riverswim(4, 6))
    watch(issued(0))
    operator.answers = False
    watch(issued(1))
    assert len(operator.supplied) == 1
    operator.answers = True
    watch({"kind": "batch_counted", "data": {"index": 0}})
    first, second = operator.supplied
    assert [supplied.values[0].deployment for supplied in (first, second)] == [0, 1]
    assert first.optimal_value == pytest.approx(0.475791, abs=1e-6)
    always_left = 0.03
    mixed = 0.75 * always_left + 0.25 * second.values[0].value
    assert first.values[0].value == pytest.approx(mixed)


def test_unfinished_run_that_ends_meanwhile_needs_no_stop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Ending:
        """An operator's client; the second run ends before it can be stopped."""

        stopped: list[str] = []  # noqa: RUF012 -- of one test

        def runs(self) -> list[dict[str, str]]:
            states = ("finished", "running", "running")
            return [{"id": str(i), "state": state} for i, state in enumerate(states)]

        def stop(self, run_id: str) -> None:
            if run_id == "1":
                raise RemoteError("wrong-state", "run 1 is finished")
            self.stopped.append(run_id)

    stop_unfinished(cast("Operator", Ending()))
    assert Ending.stopped == ["2"]
    assert capsys.readouterr().err == "stopped run 2, which was left here unfinished\n"


def test_unfinished_run_that_cannot_be_stopped_raises() -> None:
    class Closed:
        def runs(self) -> list[dict[str, str]]:
            return [{"id": "1", "state": "running"}]

        def stop(self, run_id: str) -> None:
            raise RemoteError("unauthorized", "no token")

    with pytest.raises(RemoteError, match="no token"):
        stop_unfinished(cast("Operator", Closed()))


def test_no_time_is_estimated_from_the_first_small_batches() -> None:
    began = time.monotonic() - 50
    assert _time_left(began, 49, 1_000) == ""
    assert _time_left(began, 50, 1_000) == ", about 950 s left"
