"""The summary of a load test, with the rule that names its bottleneck. No I/O but writing files.

A report's time by stage shows where the queue is; saturated processes show why. A process is
saturated if its threads ran or waited for a processor for `SATURATED` of the time or more. Waiting
counts, because a process that shares its processor gets less of it but needs as much. The first
case that holds is the verdict:

1. At least `CARRIED` of the due reports were accepted within `PROMPT_SECONDS` of their time: no
   bottleneck. If no batch filled, the verdict adds that the coordinator had nothing to open.
2. The generator's event loops are saturated, or most time is lost in late starts or episodes: the
   generator. Its measurements of the server then mean nothing.
3. Most time is lost in sealing: also the generator; real nodes bring processors of their own.
4. Most time is lost waiting for a batch, and the shuffler is not saturated: the coordinator, which
   opens messages too slowly. The reason says whether its opening processes are saturated.
5. Most time is lost in requests: the shuffler. The reason is its processor if it is saturated, its
   own limits if it answered 429, else its disk.

If generator and services share the same processors and these are busy, the verdict of cases 2 to 5
is the machine: more load needs a larger one. The stage still shows where the queue was.

`summarize` turns samples into summary.json. `to_html` shows it as one file without scripts or
external resources; charts are SVG in the reader's colour scheme, and each has a table.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression
from typing import Any, Literal

from riffle.deploy.load.generator import Sample
from riffle.deploy.network.processes import Usage

CARRIED, SATURATED, BUSY = 0.98, 0.85, 0.95
PROMPT_SECONDS = 2.0
GENERATOR = "generator "
FULL = {"sealed", "counted", "rejected"}  # states of a batch with all its reports
SETTLED = 0.3  # memory is judged after this share of the load, once caches and pools are full
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 200, 60, 24
STROKES = ("", "6 3", "2 3", "8 3 2 3")  # dash patterns tell lines apart, besides colour
MOST_ROWS = 20  # rows of a chart's table

Limit = Literal["none", "generator", "coordinator", "shuffler", "machine"]
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurements on which the verdict rests.

    ``due`` and ``prompt``: reports due, and those accepted promptly. ``filled``: batches that
    filled. ``stages``: seconds of the reports' time by stage (`tally.STAGES`). ``loops``,
    ``sealing``, ``opening``, ``shuffler`` and ``coordinator`` are demands in processors: of the
    busiest generator process, of an average process, and of the services (None if they run
    elsewhere). ``refused``: answers 429. ``busy``: the busy share of all processors' time.
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
    """The limit of a load, the stage in which most time is lost, and the reason."""

    limit: Limit
    stage: str
    why: str


def judge(evidence: Evidence) -> Verdict:
    """Returns the verdict by the module's rule."""
    share = evidence.prompt / evidence.due if evidence.due else 1.0
    if share >= CARRIED:
        why = f"{share:.1%} of the due reports were accepted within {PROMPT_SECONDS:g} s"
        idle = "" if evidence.filled else "; no batch filled, so nothing is said of the coordinator"
        return Verdict("none", "", why + idle)
    verdict = _bottleneck(evidence)
    if evidence.same_cores and evidence.busy >= BUSY:
        why = f"all processors were busy and shared ({evidence.busy:.0%}); {verdict.why}"
        return Verdict("machine", verdict.stage, why)
    return verdict


def _bottleneck(evidence: Evidence) -> Verdict:
    stages = evidence.stages
    stage = max(stages, key=lambda name: stages[name])
    lost = f"{stages[stage] / (sum(stages.values()) or 1.0):.0%} of the time is {stage}"
    if evidence.loops >= SATURATED:
        why = f"its event loops are saturated ({evidence.loops:.2f})"
        return Verdict("generator", stage, why)
    if stage in ("lag", "episode"):
        return Verdict("generator", stage, f"reports start late; {lost}")
    if stage == "sealing":
        return Verdict("generator", stage, f"{lost}; sealers want {evidence.sealing:.2f} each")
    if stage == "batch" and (evidence.shuffler is None or evidence.shuffler < SATURATED):
        why = f"no batch was open; {lost}; {_why_coordinator(evidence)}"
        return Verdict("coordinator", stage, why)
    return Verdict("shuffler", stage, f"{lost}; {_why_shuffler(evidence)}")


def _why_coordinator(evidence: Evidence) -> str:
    opening, coordinator = evidence.opening, evidence.coordinator
    if opening is None or coordinator is None:
        return "it runs elsewhere"
    if opening >= SATURATED:
        return f"opening processes are saturated ({opening:.2f} each)"
    return f"it wants {coordinator:.2f} processors, each opening process {opening:.2f}"


def _why_shuffler(evidence: Evidence) -> str:
    if evidence.shuffler is None:
        return "it runs elsewhere"
    if evidence.shuffler >= SATURATED:
        return f"its processor: it wants {evidence.shuffler:.2f}"
    if evidence.refused:
        return f"its own bounds: {evidence.refused} answers were 429"
    return f"its disk: it wants only {evidence.shuffler:.2f} processors"


def summarize(
    parameters: Summary, samples: Sequence[Sample], batches: list[Summary], generators: int
) -> Summary:
    """Returns the content of summary.json: all measurements, and the verdict.

    The use of processors is measured from the start to the last arrival.
    """
    late = (sample for sample in samples[1:] if sample.at >= parameters["seconds"])
    end = next(late, samples[-1])  # the last sample, if the load was interrupted
    used = {name: now.since(samples[0].use[name]) for name, now in end.use.items()}
    seconds = max(end.at, 1e-9)
    evidence = _evidence(parameters, samples, batches, used, generators)
    return {
        "verdict": asdict(judge(evidence)),
        "parameters": parameters,
        "seconds": seconds,
        "accepted_a_second": end.tally.accepted / seconds,
        "messages_a_second": end.tally.messages / seconds,
        "reports": samples[-1].tally.summary(),
        "processes": {name: _processors(use) for name, use in used.items()},
        "memory": {name: _memory(samples, name) for name in used},
        "evidence": asdict(evidence),
        "batches": batches,
        "series": [rates(now, before) for before, now in pairwise(samples)],
    }


def _evidence(
    parameters: Summary,
    samples: Sequence[Sample],
    batches: list[Summary],
    used: dict[str, Usage],
    generators: int,
) -> Evidence:
    tally = samples[-1].tally
    own = [use for name, use in used.items() if name.startswith(GENERATOR)]
    coordinator, shuffler = used.get("coordinator"), used.get("shuffler")
    same = len(own) < len(used) and parameters["generator_cores"] == parameters["service_cores"]
    return Evidence(
        due=tally.started,
        prompt=tally.due.within(PROMPT_SECONDS),
        filled=sum(batch["state"] in FULL for batch in batches),
        stages={stage: times.total for stage, times in tally.stages.items()},
        loops=max((use.demand for use in own), default=0.0),
        sealing=sum(use.pool_demand for use in own) / max(generators, 1),
        shuffler=None if shuffler is None else shuffler.demand,
        coordinator=None if coordinator is None else coordinator.demand,
        opening=None if coordinator is None else coordinator.pool_demand / parameters["openers"],
        refused=sum(n for answer, n in tally.answers.items() if answer.endswith(" 429")),
        same_cores=same,
        busy=_busy(samples, parameters),
    )


def _busy(samples: Sequence[Sample], parameters: Summary) -> float:
    """Returns the share of time in which the processors in use were busy, by any process."""
    cores = {*parameters["generator_cores"], *parameters["service_cores"]}
    first, last = samples[0].cores, samples[-1].cores
    busy = sum(last[core][0] - first[core][0] for core in cores if core in last)
    whole = sum(last[core][1] - first[core][1] for core in cores if core in last)
    return busy / whole if whole > 0 else 0.0


def _processors(use: Usage) -> dict[str, float]:
    return {
        "processors": use.own / use.at,
        "demand": use.demand,
        "pool_processors": use.pool / use.at,
        "pool_demand": use.pool_demand,
    }


def _memory(samples: Sequence[Sample], name: str) -> dict[str, float]:
    """Returns MiB at the end, the maximum, and growth per minute once the load has settled.

    The growth is the slope of the least-squares line, and 0 with fewer than three points.
    """
    points = [(sample.at, sample.use[name].rss / 2**20) for sample in samples if name in sample.use]
    settled = [point for point in points if point[0] >= SETTLED * points[-1][0]]
    slope = linear_regression(*zip(*settled, strict=True)).slope if len(settled) >= 3 else 0.0
    return {
        "last_mib": points[-1][1],
        "most_mib": max(size for _, size in points),
        "growth_mib_a_minute": 60 * slope,
    }


def rates(now: Sample, before: Sample) -> dict[str, float]:
    """Returns rates and use between two samples."""
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


_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid color-mix(in srgb,
currentColor 25%, transparent); } td.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
.axis { stroke: currentColor; opacity: .4; } polyline { fill: none; stroke-width: 1.6; }
.l0 { stroke: #0b6bcb; } .l1 { stroke: #c2410c; } .l2 { stroke: #15803d; } .l3 { stroke: #7e22ce; }
.verdict { font-size: 1.2rem; padding: .6rem 1rem; border-left: .3rem solid #0b6bcb; }
"""


def write_summary(folder: Path, summary: Summary) -> None:
    """Writes ``summary.json``, which is complete, and ``load.html``."""
    (folder / "load.html").write_text(to_html(summary), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def to_html(summary: Summary) -> str:
    """Returns the summary as one HTML file."""
    reports, verdict, series = summary["reports"], summary["verdict"], summary["series"]
    limit = "nothing" if verdict["limit"] == "none" else f"the {verdict['limit']}"
    totals = {name: reports[name] for name in ("due", "accepted", "undecided", "messages")}
    totals |= {n: summary[n] for n in ("seconds", "accepted_a_second", "messages_a_second")}
    parts = [
        f"<h1>Load test</h1><p class=verdict>Limited by <b>{_text(limit)}</b>: "
        f"{_text(verdict['why'])}.</p>",
        f"<p>{'It was interrupted. ' if summary.get('interrupted') else ''}"
        "Latency counts from the time a report was due, whether or not the generator was free.</p>",
        _table("Reports", totals),
        _table("Rejected, by reason", reports["rejected"] or {"none": 0}),
        _table("Answers that were no success, also those tried again", reports["answers"]),
        _grid("Latency, ms", _latencies(reports)),
        _chart("Reports a second", series, ["due", "accepted", "rejected"], "_a_second"),
        _chart("Memory, MiB", series, list(summary["processes"]), " mib"),
        _chart("Processors in use", series, list(summary["processes"]), " processors"),
        _grid("Processes", summary["processes"]),
        _grid("Memory", summary["memory"]),
        _table("Parameters", summary["parameters"]),
    ]
    head = f"<meta charset=utf-8><title>Load test</title><style>{_STYLE}</style>"
    viewport = '<meta name=viewport content="width=device-width">'
    return f"<!doctype html><html lang=en>{head}{viewport}<body>{''.join(parts)}</body></html>\n"


def _latencies(reports: Summary) -> Summary:
    whole = {"from due": reports["latency_from_due_ms"], "upload": reports["latency_from_send_ms"]}
    return whole | {f"of it {name}": row for name, row in reports["stages_ms"].items()}


def _chart(title: str, rows: Sequence[Mapping[str, float]], names: list[str], unit: str) -> str:
    """Returns lines over time with a table of evenly spaced samples (summary.json has all)."""
    top = max([row.get(name + unit, 0.0) for row in rows for name in names], default=0.0) or 1.0
    end = max([row["at"] for row in rows], default=1.0) or 1.0
    lines = "".join(_line(rows, name + unit, i, end, top) for i, name in enumerate(names))
    axes = (
        f'<path class=axis d="M{LEFT} 8V{HEIGHT - BOTTOM}H{WIDTH}"/>'
        f"<text x=4 y=16>{top:.4g}</text><text x=4 y={HEIGHT - BOTTOM}>0</text>"
        f"<text x={WIDTH - 60} y={HEIGHT - 6}>{end:.0f} s</text>"
    )
    legend = ", ".join(
        f"{_text(name)} ({'solid' if not STROKES[i % 4] else f'dashes {STROKES[i % 4]}'})"
        for i, name in enumerate(names)
    )
    step = -(-len(rows) // MOST_ROWS)
    shown = [row for i, row in enumerate(reversed(rows)) if i % step == 0][::-1]
    cells = {
        f"{row['at']:.1f}": {name: row.get(name + unit, "") for name in names} for row in shown
    }
    return (
        f'<h2>{_text(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
        f'aria-label="{_text(title)} over time">{axes}{lines}</svg><p>{legend}</p>'
        f"<details><summary>as a table</summary>{_grid('', cells, 'second')}</details>"
    )


def _line(
    rows: Sequence[Mapping[str, float]], name: str, number: int, end: float, top: float
) -> str:
    kept = [row for row in rows if name in row]
    x = [LEFT + (WIDTH - LEFT) * max(row["at"], 0.0) / end for row in kept]
    y = [8 + (HEIGHT - BOTTOM - 8) * (1 - row[name] / top) for row in kept]
    points = " ".join(f"{left:.1f},{down:.1f}" for left, down in zip(x, y, strict=True))
    dash = f' stroke-dasharray="{STROKES[number % 4]}"' if STROKES[number % 4] else ""
    return f'<polyline class=l{number % 4}{dash} points="{points}"/>'


def _table(title: str, rows: Mapping[str, object]) -> str:
    body = "".join(f"<tr><td>{_text(name)}{_cell(value)}" for name, value in rows.items())
    return f"<h2>{_text(title)}</h2><table>{body}</table>"


def _grid(title: str, rows: Mapping[str, Mapping[str, object]], first: str = "") -> str:
    columns = list(next(iter(rows.values()), {}))
    head = "".join(f"<th scope=col>{_text(name)}" for name in [first, *columns])
    body = "".join(
        f"<tr><td>{_text(name)}" + "".join(_cell(row[column]) for column in columns)
        for name, row in rows.items()
    )
    heading = f"<h2>{_text(title)}</h2>" if title else ""
    return f"{heading}<table><tr>{head}{body}</table>"


def _cell(value: object) -> str:
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"<td class=n>{_text(text)}"


def _text(value: object) -> str:
    return html.escape(str(value).replace("_", " "))
