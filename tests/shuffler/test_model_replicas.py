"""The random operations of `test_model` with two replicas over one PostgreSQL."""

from typing import ClassVar

import pytest
from hypothesis.stateful import rule

from tests.postgres import Cluster
from tests.shuffler.model import EXAMPLES, bounded
from tests.shuffler.test_model import Shuffling


class ShufflingOnPostgres(Shuffling):
    """The same with two replicas over PostgreSQL; one of them crashes, the other does not."""

    cluster: ClassVar[Cluster]

    def __init__(self) -> None:
        super().__init__()
        self.other = self.open_core()

    def make_store(self) -> str | None:
        return self.closing.enter_context(self.cluster.database("shuffler"))

    @rule()
    def switch(self) -> None:
        """From here on everybody talks to the other replica."""
        self.core, self.other = self.other, self.core

    def teardown(self) -> None:
        self.other.close()
        super().teardown()


@pytest.fixture
def server(cluster: Cluster) -> None:
    ShufflingOnPostgres.cluster = cluster


TestShufflingOnPostgres = pytest.mark.usefixtures("server")(ShufflingOnPostgres.TestCase)
TestShufflingOnPostgres.settings = bounded(max(1, EXAMPLES // 5))
