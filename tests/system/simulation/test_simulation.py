"""Exactly once, under everything: random operations on a whole network, and the faults they find.

``RIFFLE_SIMULATION_SEQUENCES`` says how many sequences are played with each aggregation,
``RIFFLE_SIMULATION_SEED`` where they begin, ``RIFFLE_SIMULATION_LENGTH`` how long each is. A
failure prints its seed and the shortest list that still fails, to be kept in ``fixtures`` and
played for ever.
"""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from riffle.common.mechanism.parameters import Aggregation
from tests.system.simulation import machine
from tests.system.simulation.installation import AGGREGATIONS
from tests.system.simulation.operations import ACTIONS, sequence
from tests.system.simulation.planted_bugs import PLANTED_BUGS
from tests.system.simulation.play import play
from tests.system.simulation.shrink import shrunk

SEQUENCES = int(os.environ.get("RIFFLE_SIMULATION_SEQUENCES", "3"))
FIRST = int(os.environ.get("RIFFLE_SIMULATION_SEED", "0"))
LENGTH = int(os.environ.get("RIFFLE_SIMULATION_LENGTH", "50"))
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.json"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Services log every death; nobody reads it here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fixture(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def aggregation_of(kept: dict[str, Any]) -> Aggregation:
    return "sums" if kept.get("aggregation") == "sums" else "messages"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEQUENCES))
def test_every_run_ends_as_if_nothing_had_happened(seed: int, aggregation: Aggregation) -> None:
    operations = sequence(seed, LENGTH)
    problems = play(operations, seed, aggregation)
    if problems:
        shortest = shrunk(operations, lambda some: bool(play(some, seed, aggregation)))
        kept = {"seed": seed, "aggregation": aggregation, "fault": None, "operations": shortest}
        pytest.fail(f"{problems}\nkeep this in fixtures/:\n{json.dumps(kept)}")


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_what_once_failed(file: Path) -> None:
    kept = fixture(file)
    assert play(kept["operations"], kept["seed"], aggregation_of(kept)) == []


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fault in the services, the list kept for it fails, and in the way that is noted."""
    (kept,) = [fixture(file) for file in FIXTURES if fixture(file)["fault"] == name]
    PLANTED_BUGS[name](monkeypatch)
    problems = play(kept["operations"], kept["seed"], aggregation_of(kept))
    assert problems
    assert kept["finds"] in problems[0]


def test_less_than_an_instant_passes_while_others_are_busy() -> None:
    async def waits() -> int:
        loop = asyncio.get_running_loop()
        busy = loop.create_task(always_busy())
        end, turns = loop.time() + 1e-12, 0
        while loop.time() < end and turns < 100:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), end - loop.time())
            turns += 1
        busy.cancel()
        return turns

    async def always_busy() -> None:
        while True:
            await asyncio.sleep(0)

    assert machine.run(waits()) < 100


def test_a_seed_is_a_sequence() -> None:
    assert sequence(3, 200) == sequence(3, 200)
    assert {name for name, *_ in sequence(3, 2_000)} == set(ACTIONS)


def test_a_failure_is_made_short() -> None:
    operations = [["advance", number] for number in range(50)]
    needed = (["advance", 7], ["advance", 41])
    found = shrunk(operations, lambda some: all(one in some for one in needed))
    assert found == list(needed)
