"""The states of a run lease, as `riffle.coordinator.states` describes them."""

from typing import Literal

LeaseState = Literal["held", "expired", "lost"]
LeaseEvent = Literal["write", "renew", "release", "expire", "take", "restart"]
"""``take``: another holder takes the run; ``restart``: the same holder takes it after a restart."""

LEASE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    ("held", "write"): "held",
    ("held", "renew"): "held",
    ("held", "release"): "expired",
    ("held", "expire"): "expired",
    ("held", "restart"): "lost",
    ("expired", "write"): "expired",
    ("expired", "renew"): "held",
    ("expired", "release"): "expired",
    ("expired", "expire"): "expired",
    ("expired", "take"): "lost",
    ("expired", "restart"): "lost",
}
