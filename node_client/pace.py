"""How fast this process runs episodes, and what that says about leases. Pure: times are arguments.

A lease ends whether or not its user's report has arrived, and a user who was asked is never asked
again. So a user is asked only when the episode can end within the lease, and a lease request is
for no more users than episodes fit well into one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from riffle.common.wire import Lease

SHARE_OF_A_LEASE = 0.25
"""Part of a lease that its portion's episodes may take: sealing, upload and retries need some."""

NEWEST = 0.3
"""Weight of the newest measurement in the running mean."""


@dataclass(slots=True)
class Pace:
    """Seconds an episode takes with its encoding (None: not known), seconds that leases last."""

    episode_seconds: float | None = None
    lease_seconds: float = 0.0

    def took(self, seconds: float, episodes: int) -> None:
        """Note that so many episodes, one or more, took so many seconds together."""
        new = seconds / episodes
        old = new if self.episode_seconds is None else self.episode_seconds
        self.episode_seconds = old + NEWEST * (new - old)

    def granted(self, leases: Sequence[Lease], now: float) -> None:
        """Note how long leases granted at time ``now`` (seconds since 1970, UTC) last."""
        if leases:
            self.lease_seconds = max(lease.expires_at for lease in leases) - now

    def most_users(self) -> int:
        """Users of one lease request; one until an episode was measured."""
        if self.episode_seconds is None:
            return 1
        share = SHARE_OF_A_LEASE * self.lease_seconds
        return max(1, int(share / max(self.episode_seconds, 1e-6)))

    def in_time(self, leases: Sequence[Lease], now: float) -> list[Lease]:
        """The leases whose episodes, run one after another from ``now``, end before they do.

        When nothing but the measurement speaks against all of them it is forgotten: one long pause
        of the machine must not stop the node for good.
        """
        each = self.episode_seconds or 0.0
        kept: list[Lease] = []
        for lease in leases:
            if lease.expires_at > now and lease.expires_at >= now + each * (len(kept) + 1):
                kept.append(lease)
        if not kept and any(lease.expires_at > now for lease in leases):
            self.episode_seconds = None
        return kept
