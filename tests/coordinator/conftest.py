"""Fixtures of the coordinator's tests."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.calls import Api
from tests.coordinator.faults import outcome
from tests.coordinator.world import FakeShuffler, parts, run_to_end, spec


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with ExitStack() as stack:
        yield Api(tmp_path / "data", stack)


both_engines = pytest.mark.usefixtures("engine")


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Stores of this test are on each engine in turn; see `tests.coordinator.world.store_url`."""
    if request.param == "sqlite":
        yield "sqlite"
        return
    with request.getfixturevalue("cluster").database("coordinator") as url:
        (tmp_path / "store_url").write_text(url)
        yield "postgresql"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    run_to_end(parts(directory, FakeShuffler()), spec())
    return outcome(directory)
