"""The summary of a load test, with the rule of docs/load.md that names its bottleneck. No I/O."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import linear_regression
from typing import Any, Literal

from riffle.deploy.load.generator import Sample
from riffle.deploy.network.processes import Usage

CARRIED, SATURATED, BUSY, ANSWERING = 0.98, 0.85, 0.85, 0.5
PROMPT_SECONDS = 2.0
PROMPT = f"accepted within {PROMPT_SECONDS:g} s, %"
GENERATOR = "generator "
OTHERS = "other programs"
FULL = {"sealed", "counted", "rejected"}  # states of a batch with all its reports
# Memory growth is measured after the first part SETTLED of a load of at least a MINUTE.
SETTLED, MINUTE = 0.3, 60

MOST_STEPS, PRECISE = 12, 1.2  # most loads in a search; ratio of rates that ends the search

Limit = Literal["none", "generator", "coordinator", "shuffler", "database", "network", "machine"]
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurements that decide the verdict.

    ``started``, ``prompt``: reports started, and accepted promptly. ``filled``: full batches.
    ``stages``: seconds of the reports' time by stage (`fleet.STAGES`). ``refused``: answers with
    status 429. ``same_cores``: whether generator and services share all processors. ``busy``: the
    busy share of all processors' time. ``others``: processors that other programs used (0 if the
    services run elsewhere). ``answering``: of the time for which nodes wait for slots and uploads,
    the share in which the shuffler works on these requests (None if this share is unknown).

    Five fields are demands (`Usage.demand`). ``loops`` is the demand of the busiest generator
    process. ``sealing`` and ``opening`` are the demands of an average sealing or opening process.
    If the services run elsewhere, ``shuffler``, ``coordinator`` and ``opening`` are None.
    """

    started: int
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
    others: float = 0.0
    answering: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit of a network under load, the stage that takes the most time, and the reason."""

    limit: Limit
    stage: str
    why: str


def judge(evidence: Evidence) -> Verdict:
    """Returns the verdict by the rule of docs/load.md."""
    share = evidence.prompt / evidence.started if evidence.started else 1.0
    if share >= CARRIED:
        why = f"{share:.1%} of the started reports were accepted within {PROMPT_SECONDS:g} s"
        return Verdict("none", "", why)
    stages = evidence.stages
    stage = max(stages, key=lambda name: stages[name])
    lost = f"{stages[stage] / (sum(stages.values()) or 1.0):.0%} of the reports' time is {stage}"
    if evidence.same_cores and evidence.busy >= BUSY:
        why = "all processors were busy, and generator and services share them"
        return Verdict("machine", stage, f"{why} ({evidence.busy:.0%}); {lost}")
    return _bottleneck(evidence, stage, lost)


def _bottleneck(evidence: Evidence, stage: str, lost: str) -> Verdict:
    if evidence.loops >= SATURATED:
        why = f"its event loops are saturated (demand {evidence.loops:.2f} processors)"
        return Verdict("generator", stage, why)
    if stage in ("lag", "episode"):
        return Verdict("generator", stage, f"reports start late; {lost}")
    if stage == "sealing":
        return Verdict(
            "generator", stage, f"{lost}; each sealing process has demand {evidence.sealing:.2f}"
        )
    if stage == "batch" and (evidence.shuffler is None or evidence.shuffler < SATURATED):
        why = f"no batch was open; {lost}; {_why_coordinator(evidence)}"
        return Verdict("coordinator", stage, why)
    limit, why = _slow_requests(evidence)
    return Verdict(limit, stage, f"{lost}; {why}")


def _why_coordinator(evidence: Evidence) -> str:
    opening, coordinator = evidence.opening, evidence.coordinator
    if opening is None or coordinator is None:
        return "it runs elsewhere"
    if opening >= SATURATED:
        return f"opening processes are saturated (demand {opening:.2f} each)"
    return f"its demand is {coordinator:.2f} processors, that of each opening process {opening:.2f}"


def _slow_requests(evidence: Evidence) -> tuple[Limit, str]:
    """Returns what limits a load test in which requests take most of the time, and the reason."""
    answering, demand = evidence.answering, evidence.shuffler
    if demand is not None and demand >= SATURATED:
        return "shuffler", f"its processor: demand {demand:.2f}"
    if evidence.refused:
        return "shuffler", f"its own bounds: {evidence.refused} answers were 429"
    if answering is not None and answering < ANSWERING:
        return "network", f"the shuffler worked on requests for only {answering:.0%} of their time"
    if demand is None:
        return "shuffler", "it runs elsewhere"
    return "database", f"the shuffler waits for it, with a demand of only {demand:.2f} processors"


def next_rate(steps: Sequence[tuple[float, bool]], start: float) -> float | None:
    """Returns the next rate of a search for capacity, in reports a second; None ends the search.

    ``steps`` has each load so far: its rate, and True if the network carried it. A rate counts as
    carried if the network carried any load at this rate. docs/load.md describes the search.
    """
    carried = max((rate for rate, ok in steps if ok), default=0.0)
    failed = min((rate for rate, ok in steps if not ok and rate > carried), default=math.inf)
    if len(steps) >= MOST_STEPS:
        return None
    if failed <= PRECISE * carried:  # one unlucky load must not decide the answer
        return failed if steps.count((failed, False)) == 1 else None
    if not steps:
        return start
    if failed == math.inf:
        return 2 * carried
    return math.sqrt(carried * failed) if carried else failed / 2


def capacity(steps: Sequence[Summary]) -> Summary:
    """Returns the summary of one load of a search, with the field ``capacity``.

    Chooses the load of the lowest rate that was not carried, or the last load if all rates were
    carried. ``capacity`` has the largest carried rate (in started reports a second), whether a
    batch filled at this rate, and a row for each rate. A rate with several loads is carried if one
    of them was carried. An interrupted load counts only if it is the only one.
    """
    whole = [step for step in steps if not step.get("interrupted")] or steps
    tries = Counter(step["parameters"]["rate"] for step in whole)
    ordered = sorted(whole, key=lambda step: step["verdict"]["limit"] == "none")
    rates_of = {step["parameters"]["rate"]: step for step in ordered}
    failed = [rate for rate, step in rates_of.items() if step["verdict"]["limit"] != "none"]
    best = max((rate for rate in rates_of if rate not in failed), default=None)
    carried = 0.0 if best is None else started_a_second(rates_of[best])
    filled = best is not None and rates_of[best]["evidence"]["filled"] > 0
    report = rates_of[min(failed)] if failed else steps[-1]
    rows = {
        f"{rate:.3g}": step_row(step) | {"tries": tries[rate]}
        for rate, step in sorted(rates_of.items())
    }
    beyond = started_a_second(rates_of[min(failed)]) if failed else None
    found = {"carried_a_second": carried, "not_carried": beyond, "filled": filled, "steps": rows}
    interrupted = any(step.get("interrupted") for step in steps)
    return report | {"capacity": found, "interrupted": interrupted}


def started_a_second(summary: Summary) -> float:
    """Returns the reports started a second. If arrivals are random, the set rate differs."""
    return float(summary["evidence"]["started"] / summary["parameters"]["seconds"])


def step_row(step: Summary) -> Summary:
    """Returns the row for one load in the table of a search for the highest carried rate."""
    latency, limit = step["reports"]["latency_from_due_ms"], step["verdict"]["limit"]
    known = step["evidence"]
    row = {
        "result": "carried" if limit == "none" else f"not carried: {limit}",
        "started": started_a_second(step),
        PROMPT: 100 * known["prompt"] / max(known["started"], 1),
    }
    return row | {f"{share}, ms": latency[share] for share in ("p50", "p99")}


def step_text(row: Summary) -> str:
    """Returns the result of a load in words; ``row`` comes from `step_row`."""
    return f"{row['result']}; {PROMPT}: {row[PROMPT]:.1f}"


def summarize(
    parameters: Summary,
    samples: Sequence[Sample],
    batches: list[Summary],
    generators: int,
    answered: float = math.nan,
    ended: Sequence[Summary] = (),
) -> Summary:
    """Returns the content of summary.json: all measurements, and the verdict.

    The use of processors is measured until the planned end of the load. ``answered``: the seconds
    for which the shuffler worked on lease requests and uploads; NaN if unknown. ``ended``: the
    batches at the load's end. ``batches``: the batches after the coordinator had time to count.
    """
    late = (sample for sample in samples[1:] if sample.at >= parameters["seconds"])
    end = next(late, samples[-1])  # the last sample, if the load was interrupted
    read = [sample.use for sample in samples if sample.at <= end.at]
    used = {  # a process that has ended is missing from the last reading
        name: max((use[name] for use in read if name in use), key=attrgetter("pool", "at")).since(
            first
        )
        for name, first in read[0].items()
    }
    seconds = max(end.at, 1e-9)
    evidence = _evidence(parameters, samples, batches, used, generators, answered)
    return {
        "verdict": asdict(judge(evidence)),
        "parameters": parameters,
        "seconds": seconds,
        "accepted_a_second": end.tally.accepted / seconds,
        "messages_a_second": end.tally.messages / seconds,
        "reports": samples[-1].tally.summary(),
        "processes": {
            name: {
                "used": use.own / use.at,
                "used_or_waited_for": use.demand,
                "workers_used": use.pool / use.at,
                "workers_used_or_waited_for": use.pool_demand,
            }
            for name, use in used.items()
        },
        "memory": {name: _memory(samples, name) for name in used},
        "evidence": asdict(evidence),
        "batches": batches,
        "opening": _opening(ended),
        "series": [rates(now, before, cores_of(parameters)) for before, now in pairwise(samples)],
    }


def _opening(batches: Sequence[Summary]) -> Summary:
    """Returns how many messages of full batches are opened, and how many are yet to be opened."""
    full = [batch for batch in batches if batch["state"] in FULL]
    waiting = sum(batch["messages"] for batch in full if batch["state"] == "sealed")
    return {"opened": sum(batch["messages"] for batch in full) - waiting, "to_open": waiting}


def cores_of(parameters: Summary) -> set[int]:
    """Returns the processors that the generator or the services may use."""
    return {*parameters["generator_cores"], *parameters["service_cores"]}


def _evidence(
    parameters: Summary,
    samples: Sequence[Sample],
    batches: list[Summary],
    used: dict[str, Usage],
    generators: int,
    answered: float,
) -> Evidence:
    tally = samples[-1].tally
    stages = {stage: times.total for stage, times in tally.stages.items()}
    waited = stages["lease"] + stages["upload"]
    own = [use for name, use in used.items() if name.startswith(GENERATOR)]
    coordinator, shuffler = used.get("coordinator"), used.get("shuffler")
    same = len(own) < len(used) and parameters["generator_cores"] == parameters["service_cores"]
    cores = cores_of(parameters)
    first, last = samples[0].cores, samples[-1].cores
    working = sum(last[core][0] - first[core][0] for core in cores if core in last)
    whole = sum(last[core][1] - first[core][1] for core in cores if core in last)
    busy = working / whole if whole > 0 else 0.0
    known = sum(use.total / use.at for use in used.values() if use.at > 0)
    return Evidence(
        started=tally.started,
        prompt=tally.due.within(PROMPT_SECONDS),
        filled=sum(batch["state"] in FULL for batch in batches),
        stages=stages,
        loops=max((use.demand for use in own), default=0.0),
        sealing=sum(use.pool_demand for use in own) / max(generators, 1),
        shuffler=None if shuffler is None else shuffler.demand,
        coordinator=None if coordinator is None else coordinator.demand,
        opening=None if coordinator is None else coordinator.pool_demand / parameters["openers"],
        refused=sum(n for answer, n in tally.answers.items() if answer.endswith(" 429")),
        same_cores=same,
        busy=busy,
        others=max(0.0, busy * len(cores) - known) if coordinator and shuffler else 0.0,
        answering=None if math.isnan(answered) or waited <= 0 else answered / waited,
    )


def _memory(samples: Sequence[Sample], name: str) -> dict[str, float | None]:
    """Returns memory in MiB: last, largest, and growth a minute (None in short loads)."""
    points = [(sample.at, sample.use[name].rss / 2**20) for sample in samples if name in sample.use]
    settled = [point for point in points if point[0] >= SETTLED * points[-1][0]]
    growth = None
    if len(settled) >= 3 and points[-1][0] >= MINUTE:
        growth = MINUTE * linear_regression(*zip(*settled, strict=True)).slope
    return {
        "at_the_end": points[-1][1],
        "largest": max(size for _, size in points),
        "growth_a_minute": growth,
    }


def rates(now: Sample, before: Sample, cores: Collection[int] = ()) -> dict[str, float]:
    """Returns latencies, rates of reports, and use of resources between two samples.

    Other programs' processor time is measured on ``cores`` (if ``cores`` is empty, on all cores).
    """
    seconds = max(now.at - before.at, 1e-9)
    fresh = {
        "started": now.tally.started - before.tally.started,
        "accepted": now.tally.accepted - before.tally.accepted,
        "rejected": now.tally.rejected.total() - before.tally.rejected.total(),
        "messages": now.tally.messages - before.tally.messages,
    }
    row = {"at": now.at, "open": float(now.tally.open)}
    row |= {f"{name}_a_second": count / seconds for name, count in fresh.items()}
    if (latency := now.tally.due.since(before.tally.due)).count:
        row |= {f"p{share} ms": 1e3 * latency.quantile(share / 100) for share in (50, 95, 99)}
    for name, use in now.use.items():
        if name in before.use:
            row[f"{name} processors"] = use.since(before.use[name]).total / seconds
        row[f"{name} mib"] = use.rss / 2**20
    if {"coordinator", "shuffler"} <= now.use.keys() and now.cores.keys() == before.cores.keys():
        busy = sum(now.cores[core][0] - before.cores[core][0] for core in cores or now.cores)
        known = sum(row.get(f"{name} processors", 0.0) for name in now.use)
        row[f"{OTHERS} processors"] = max(0.0, busy / seconds - known)
    return row
