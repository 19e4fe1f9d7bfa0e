"""Counts of a load generator: reports by outcome, and latencies as mergeable histograms. Pure."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LEAST_SECONDS = 1e-5
GROWTH = 1.05
"""Each bucket is 5 % wider than the previous one, so a percentile is at most 5 % too high."""

STAGES = ("lag", "batch", "lease", "episode", "sealing", "upload")
"""Stages of a report's time: late start; finding and checking a batch; getting a slot; the episode
with its encoding; sealing with the wait for a sealer; upload until the report is stored."""


@dataclass(slots=True)
class Histogram:
    """Latencies in seconds, in buckets of constant ratio; sum and maximum are exact."""

    buckets: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    largest: float = 0.0

    @property
    def count(self) -> int:
        """The number of recorded latencies."""
        return self.buckets.total()

    def record(self, seconds: float) -> None:
        """Adds a latency. A negative latency counts as zero."""
        self.buckets[_bucket(seconds)] += 1
        self.total += max(seconds, 0.0)
        self.largest = max(self.largest, seconds)

    def add(self, other: "Histogram") -> None:
        """Adds all latencies of another histogram."""
        self.buckets.update(other.buckets)
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def since(self, before: "Histogram") -> "Histogram":
        """Returns the latencies recorded since ``before``, with the maximum of all so far."""
        return Histogram(self.buckets - before.buckets, self.total - before.total, self.largest)

    def quantile(self, share: float) -> float:
        """Returns the upper edge of the bucket that reaches this share of latencies; 0 if empty."""
        needed, seen = share * self.count, 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= needed:
                return min(LEAST_SECONDS * GROWTH**bucket, self.largest)
        return 0.0

    def within(self, seconds: float) -> int:
        """Returns how many latencies were at most this long, with the precision of a bucket."""
        edge = _bucket(seconds)
        return sum(count for bucket, count in self.buckets.items() if bucket <= edge)

    def summary(self) -> dict[str, float]:
        """Returns mean, p50, p95, p99 and maximum, in milliseconds."""
        mean = self.total / self.count if self.count else 0.0
        quantiles = {f"p{q}": self.quantile(q / 100) for q in (50, 95, 99)}
        seconds = {"mean": mean, **quantiles, "max": self.largest}
        return {name: value * 1e3 for name, value in seconds.items()}


def _bucket(seconds: float) -> int:
    """Returns the first bucket whose upper edge is at least ``seconds``."""
    ratio = max(seconds, LEAST_SECONDS) / LEAST_SECONDS
    return math.ceil(math.log(ratio, GROWTH) - 1e-9)


@dataclass(slots=True)
class Tally:
    """Outcomes of all reports that were due so far.

    ``rejected``: reports given up, by reason. ``answers``: HTTP errors and requests without an
    answer, by request and reason; nodes retry most of them. ``due``: latency from the scheduled
    time until acceptance. ``sent``: latency from the upload's first byte.
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
        """Adds the outcomes of another process."""
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
        """The number of reports that are due but not decided."""
        return self.started - self.accepted - self.rejected.total()

    def summary(self) -> dict[str, Any]:
        """Returns the tally in the form of summary.json."""
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


def merge(tallies: list[Tally]) -> Tally:
    """Adds up the tallies of all processes."""
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    return whole
