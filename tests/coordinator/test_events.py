"""Who follows a run is woken by what happens in it, and by nothing else."""

from dataclasses import replace
from pathlib import Path

from coordinator.events import Bell
from tests.coordinator.world import FakeShuffler, desk, run_to_end, spec


def test_who_waits_for_events_is_woken_when_there_are_new_ones(tmp_path: Path) -> None:
    told: list[int] = []

    class Heard(Bell):
        def ring(self, run_id: str) -> None:
            told.append(len(at.store.events(run_id)))
            super().ring(run_id)

    at = replace(desk(tmp_path, FakeShuffler()), bell=Heard())
    run_to_end(at, spec())
    assert told == [2, 3, 5, 6, 9]  # after create, sealed, settle, sealed, settle
