"""What a load generator counts: reports by outcome, latencies as mergeable histograms. Pure."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LEAST_SECONDS = 1e-5
GROWTH = 1.05
"""Buckets grow by 5 %: a percentile is at most that much too high, and never too low."""

STAGES = ("lag", "batch", "lease", "episode", "sealing", "upload")
"""Where a report's time goes: late start, finding and checking a batch, a slot, the episode with
its encoding, sealing with the wait for a sealer, upload until it is stored."""


@dataclass(slots=True)
class Histogram:
    """Latencies in seconds, in buckets of constant ratio; keeps sum and largest exactly."""

    buckets: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    largest: float = 0.0

    @property
    def count(self) -> int:
        """How many were recorded."""
        return self.buckets.total()

    def record(self, seconds: float) -> None:
        """Add one; negative ones count as zero."""
        self.buckets[_bucket(seconds)] += 1
        self.total += max(seconds, 0.0)
        self.largest = max(self.largest, seconds)

    def add(self, other: "Histogram") -> None:
        """Take in another's."""
        self.buckets.update(other.buckets)
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def quantile(self, share: float) -> float:
        """The smallest bucket's upper edge below which at least this share lies; 0 when empty."""
        needed, seen = share * self.count, 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= needed:
                return min(LEAST_SECONDS * GROWTH**bucket, self.largest)
        return 0.0

    def within(self, seconds: float) -> int:
        """How many were at most this long, to a bucket."""
        edge = _bucket(seconds)
        return sum(count for bucket, count in self.buckets.items() if bucket <= edge)

    def summary(self) -> dict[str, float]:
        """Milliseconds: mean, p50, p95, p99 and the largest."""
        mean = self.total / self.count if self.count else 0.0
        quantiles = {f"p{q}": self.quantile(q / 100) for q in (50, 95, 99)}
        found = {"mean": mean, **quantiles, "max": self.largest}
        return {name: seconds * 1e3 for name, seconds in found.items()}


def _bucket(seconds: float) -> int:
    """The bucket whose upper edge is the first at or above ``seconds``."""
    ratio = max(seconds, LEAST_SECONDS) / LEAST_SECONDS
    return math.ceil(math.log(ratio, GROWTH) - 1e-9)


@dataclass(slots=True)
class Tally:
    """What became of the reports that were due so far.

    ``rejected``: reports given up, by reason. ``answers``: HTTP answers that were no success, and
    requests without one, by request and reason; most of them are tried again, as nodes do.
    ``due``: from the scheduled time until accepted. ``sent``: from the upload's first byte.
    """

    started: int = 0
    accepted: int = 0
    messages: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    due: Histogram = field(default_factory=Histogram)
    sent: Histogram = field(default_factory=Histogram)
    stages: dict[str, Histogram] = field(
        default_factory=lambda: {stage: Histogram() for stage in STAGES}
    )

    def add(self, other: "Tally") -> None:
        """Take in another process's."""
        self.started += other.started
        self.accepted += other.accepted
        self.messages += other.messages
        self.rejected.update(other.rejected)
        self.answers.update(other.answers)
        self.due.add(other.due)
        self.sent.add(other.sent)
        for stage, histogram in other.stages.items():
            self.stages[stage].add(histogram)

    @property
    def open(self) -> int:
        """Reports that are due and not decided."""
        return self.started - self.accepted - self.rejected.total()

    def summary(self) -> dict[str, Any]:
        """As the report has it."""
        return {
            "due": self.started,
            "accepted": self.accepted,
            "undecided": self.open,
            "messages": self.messages,
            "rejected": dict(self.rejected),
            "answers": dict(self.answers),
            "latency_from_due_ms": self.due.summary(),
            "latency_from_send_ms": self.sent.summary(),
            "stages_ms": {stage: times.summary() for stage, times in self.stages.items()},
        }


def merged(tallies: list[Tally]) -> Tally:
    """All of them as one."""
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    return whole
