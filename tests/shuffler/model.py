"""The model against which `test_model` checks random operations, and their number."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

from riffle.common.protocol.wire import Lease
from tests.shuffler.world import Batch

# Crashes here are of the process, not of the disk, so syncs may be free.
MEMORY = Path("/dev/shm")  # noqa: S108
EXAMPLES = int(os.environ.get("RIFFLE_MODEL_EXAMPLES", "15"))


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes of real syncs
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class Killed(Exception):  # noqa: N818
    """The process ends here."""


@dataclass
class Sent:
    """A frame that was sent once, and what it carried."""

    batch: int
    node: int
    lease: Lease
    sealed: bytes
    messages: bytes


@dataclass
class ModelBatch:
    """The state that a batch must have."""

    batch: Batch
    state: str = "open"
    accepted: dict[str, Sent] = field(default_factory=dict)
    episodes: int = 0
    replayed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    holders: dict[int, Lease] = field(default_factory=dict)
    released: bytes | None = None
