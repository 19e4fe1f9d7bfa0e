"""What limits a load, by a stated rule. Pure.

Where a report's time goes says where the queue is; who is saturated says why. A process is
saturated when its threads ran or waited for a processor for `SATURATED` of the time and more: that
holds for a process with a busy neighbour too, which gets less of its processor but wants as much.
First that holds:

1. `CARRIED` of the due reports or more were accepted within `PROMPT_SECONDS` of their time:
   nothing was the limit. Where no batch filled, the coordinator had nothing to open: it is said.
2. The generator's event loops are saturated, or most time is lost before a report starts: the
   generator. What it measured of the server says nothing then.
3. Most time is lost in sealing: the generator too; real nodes bring processors of their own.
4. Most time is lost waiting for a batch, from a shuffler that is not saturated: the coordinator,
   which opens messages no faster than that; its opening processes, when they are saturated.
5. What is left is lost in requests: the shuffler. Its processor, when it is saturated; its own
   bounds, when it answered 429; else its disk.

When generator and services share the very same processors and these are busy, 2 to 5 name the
machine: more load would need more of it, on either side; the stage says where the queue was.

From samples to the report's document. Pure.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from riffle.deploy.load.generator import Sample
from riffle.deploy.network.processes import Usage

CARRIED, SATURATED, BUSY = 0.98, 0.85, 0.95
PROMPT_SECONDS = 2.0

Limit = Literal["none", "generator", "coordinator", "shuffler", "machine"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Reports due, and those accepted promptly; batches that filled; seconds of the reports' time
    by stage (`tally.STAGES`); demand in processors.

    ``loops`` is the busiest generator process's, ``opening`` of one opening process on the mean.
    Services' demands are None when they run elsewhere. ``busy``: share of all processors' time.
    """

    due: int
    prompt: int
    filled: int
    stages: dict[str, float]
    loops: float
    sealing: float
    shuffler: float | None = None
    coordinator: float | None = None
    opening: float | None = None
    refused: int = 0
    same_cores: bool = False
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits, in which stage the time is lost, and why it is said."""

    limit: Limit
    stage: str
    why: str

    def summary(self) -> dict[str, Any]:
        """As the report has it."""
        return asdict(self)


def judge(seen: Evidence) -> Verdict:
    """The verdict by the rule above."""
    share = seen.prompt / seen.due if seen.due else 1.0
    if share >= CARRIED:
        why = f"{share:.1%} of the due reports were accepted within {PROMPT_SECONDS:g} s"
        idle = "" if seen.filled else "; no batch filled, so nothing is said of the coordinator"
        return Verdict("none", "", why + idle)
    verdict = _where(seen)
    if seen.same_cores and seen.busy >= BUSY:
        why = f"all processors were busy and shared ({seen.busy:.0%}); {verdict.why}"
        return Verdict("machine", verdict.stage, why)
    return verdict


def _where(seen: Evidence) -> Verdict:
    stage = max(seen.stages, key=lambda name: seen.stages[name])
    lost = f"{seen.stages[stage] / (sum(seen.stages.values()) or 1.0):.0%} of the time is {stage}"
    if seen.loops >= SATURATED:
        return Verdict("generator", stage, f"its event loops are saturated ({seen.loops:.2f})")
    if stage in ("lag", "episode"):
        return Verdict("generator", stage, f"reports start late; {lost}")
    if stage == "sealing":
        return Verdict("generator", stage, f"{lost}; sealers want {seen.sealing:.2f} each")
    if stage == "batch" and (seen.shuffler is None or seen.shuffler < SATURATED):
        return Verdict("coordinator", stage, f"no batch was open; {lost}; {_opening(seen)}")
    return Verdict("shuffler", stage, f"{lost}; {_shuffler(seen)}")


def _opening(seen: Evidence) -> str:
    if seen.opening is None or seen.coordinator is None:
        return "it runs elsewhere"
    if seen.opening >= SATURATED:
        return f"opening processes are saturated ({seen.opening:.2f} each)"
    return f"it wants {seen.coordinator:.2f} processors, each opening process {seen.opening:.2f}"


def _shuffler(seen: Evidence) -> str:
    if seen.shuffler is None:
        return "it runs elsewhere"
    if seen.shuffler >= SATURATED:
        return f"its processor: it wants {seen.shuffler:.2f}"
    if seen.refused:
        return f"its own bounds: {seen.refused} answers were 429"
    return f"its disk: it wants only {seen.shuffler:.2f} processors"


GENERATOR = "generator "
FULL = {"sealed", "counted", "rejected"}
"""States of a batch that has all its reports."""
SETTLED = 0.3
"""Memory is judged after this share of the load: caches and pools fill first."""


def document(
    parameters: dict[str, Any], samples: Sequence[Sample], batches: list[dict[str, Any]], crew: int
) -> dict[str, Any]:
    """Everything that was seen, and what limits. Use is that from start to the last arrival."""
    end = _last_arrival(samples, parameters["seconds"])
    used = {name: now.since(samples[0].use[name]) for name, now in end.use.items()}
    seconds = max(end.at, 1e-9)
    evidence = _evidence(parameters, samples, batches, used, crew)
    return {
        "verdict": judge(evidence).summary(),
        "parameters": parameters,
        "seconds": seconds,
        "accepted_a_second": end.tally.accepted / seconds,
        "messages_a_second": end.tally.messages / seconds,
        "reports": samples[-1].tally.summary(),
        "processes": {name: _used(use) for name, use in used.items()},
        "memory": {name: _memory(samples, name) for name in used},
        "evidence": asdict(evidence),
        "batches": batches,
        "series": [_row(now, before) for before, now in pairwise(samples)],
    }


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the least-squares line; 0 with fewer than three points."""
    if len(times) < 3:
        return 0.0
    return float(np.polyfit(np.asarray(times), np.asarray(values), 1)[0])


def _last_arrival(samples: Sequence[Sample], seconds: float) -> Sample:
    """The first sample after the last arrival, or the last one, if the load was interrupted."""
    return next((sample for sample in samples[1:] if sample.at >= seconds), samples[-1])


def _evidence(
    parameters: dict[str, Any],
    samples: Sequence[Sample],
    batches: list[dict[str, Any]],
    used: dict[str, Usage],
    crew: int,
) -> Evidence:
    tally = samples[-1].tally
    mine = [use for name, use in used.items() if name.startswith(GENERATOR)]
    services = {name: use for name, use in used.items() if not name.startswith(GENERATOR)}
    coordinator, shuffler = services.get("coordinator"), services.get("shuffler")
    same = bool(services) and parameters["generator_cores"] == parameters["service_cores"]
    return Evidence(
        due=tally.started,
        prompt=tally.due.within(PROMPT_SECONDS),
        filled=sum(batch["state"] in FULL for batch in batches),
        stages={stage: times.total for stage, times in tally.stages.items()},
        loops=max((use.demand for use in mine), default=0.0),
        sealing=sum(use.pool_demand for use in mine) / max(crew, 1),
        shuffler=None if shuffler is None else shuffler.demand,
        coordinator=None if coordinator is None else coordinator.demand,
        opening=None if coordinator is None else coordinator.pool_demand / parameters["openers"],
        refused=sum(n for what, n in tally.answers.items() if what.endswith(" 429")),
        same_cores=same,
        busy=_busy(samples, parameters),
    )


def _busy(samples: Sequence[Sample], parameters: dict[str, Any]) -> float:
    """Share of the time that the processors in use were busy, whoever used them."""
    cores = {*parameters["generator_cores"], *parameters["service_cores"]}
    first, last = samples[0].cores, samples[-1].cores
    busy = sum(last[core][0] - first[core][0] for core in cores if core in last)
    whole = sum(last[core][1] - first[core][1] for core in cores if core in last)
    return busy / whole if whole > 0 else 0.0


def _used(use: Usage) -> dict[str, float]:
    return {
        "processors": use.own / use.at,
        "demand": use.demand,
        "pool_processors": use.pool / use.at,
        "pool_demand": use.pool_demand,
    }


def _memory(samples: Sequence[Sample], name: str) -> dict[str, float]:
    """MiB at the end, the most, and growth a minute once the load has settled."""
    points = [(sample.at, sample.use[name].rss / 2**20) for sample in samples if name in sample.use]
    settled = [point for point in points if point[0] >= SETTLED * points[-1][0]]
    return {
        "last_mib": points[-1][1],
        "most_mib": max(size for _, size in points),
        "growth_mib_a_minute": 60 * slope(*zip(*settled, strict=True)) if settled else 0.0,
    }


def _row(now: Sample, before: Sample) -> dict[str, float]:
    """Rates between two samples, and what was used."""
    seconds = max(now.at - before.at, 1e-9)
    fresh = {
        "due": now.tally.started - before.tally.started,
        "accepted": now.tally.accepted - before.tally.accepted,
        "rejected": now.tally.rejected.total() - before.tally.rejected.total(),
        "messages": now.tally.messages - before.tally.messages,
    }
    row = {"at": now.at, "open": float(now.tally.open)}
    row |= {f"{name}_a_second": count / seconds for name, count in fresh.items()}
    for name, use in now.use.items():
        if name in before.use:
            row[f"{name} processors"] = use.since(before.use[name]).total / seconds
        row[f"{name} mib"] = use.rss / 2**20
    return row
