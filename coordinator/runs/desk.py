"""What all drivers of a coordinator share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from riffle.common.protocol.descriptor import parse
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.issue import Issue, Party, issue
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import Shuffler
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.metrics import CoordinatorMetrics
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.store.events import Bell
from riffle.coordinator.store.store import Store


@dataclass(frozen=True, slots=True)
class Desk:
    """What drivers share: store, peers, learners, keys and clock (seconds since 1970)."""

    store: Store
    shuffler: Shuffler
    analyzer: Analyzer
    keys: KeyRing
    registry: Registry
    bell: Bell
    shuffler_id: str
    signing_key: bytes
    clock: Callable[[], float]
    metrics: CoordinatorMetrics = field(default_factory=CoordinatorMetrics)

    def issue(
        self, run_id: str, spec: RunSpec, deployment: Deployment, *, index: int, step: int
    ) -> Issue:
        """A deployment as a batch that expires `batch_seconds` from now."""
        expires_at = int(self.clock()) + spec.batch_seconds
        party = Party(self.shuffler_id, self.analyzer.public_key)
        return issue(spec, run_id, party, deployment, index=index, step=step, expires_at=expires_at)

    def over(self, change: Callable[[], None]) -> None:
        """Commit a change after which a batch needs its key no more; erase what none needs then."""
        change()
        self.erase_keys()

    def erase_keys(self) -> None:
        """Erase expired keys that no batch needs: every one of theirs is acknowledged or over."""
        self.keys.erase_unused(
            lambda: {parse(one).descriptor.analyzer_key for one in self.store.needing_keys()}
        )
