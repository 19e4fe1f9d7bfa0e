"""An interrupt while a load test starts leaves no process and no run behind."""

from typing import Any, cast

import pytest

from deploy.load import crew
from deploy.load.crew import Crew
from deploy.load.feed import Feeder, load_spec
from deploy.load.worker import Share, Worker
from deploy.operator import Operator
from deploy.presets import preset


class Interrupted:
    """A process and a pipe of which nobody hears before Ctrl-C."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.joined = False

    def poll(self, _: float) -> bool:
        raise KeyboardInterrupt

    def send(self, what: object) -> None:
        self.told.append(what)

    def join(self, _: float | None = None) -> None:
        self.joined = True

    def is_alive(self) -> bool:
        return not self.joined


def test_processes_that_were_started_are_told_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Interrupted(), Interrupted()]
    workers = iter([Worker(cast("Any", one), cast("Any", one)) for one in made])
    monkeypatch.setattr(crew, "start", lambda _: next(workers))
    with pytest.raises(KeyboardInterrupt), Crew(cast("list[Share]", [None, None])):
        pass
    assert [(one.told, one.joined) for one in made] == [([None], True)] * 2


def test_runs_that_were_made_are_stopped() -> None:
    class Half:
        """An operator whose second run is never made."""

        stopped: list[str] = []  # noqa: RUF012 -- of all that are connected

        def __enter__(self) -> "Half":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def create_run(self, spec: Any) -> dict[str, str]:
            if spec.name == "load-2":
                raise KeyboardInterrupt
            return {"id": "one"}

        def stop(self, run_id: str) -> None:
            self.stopped.append(run_id)

    feeder = Feeder(lambda: cast("Operator", Half()), load_spec(preset("demo").spec), 100)
    with pytest.raises(KeyboardInterrupt), feeder:
        pass
    assert Half.stopped == ["one"]
