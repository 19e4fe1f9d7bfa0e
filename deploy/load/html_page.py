"""summary.json and load.html of a load test.

The HTML is one file without scripts or external resources. It begins with the result and what to do
next. Charts are SVG in the reader's colour scheme, and each has a table.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from riffle.deploy.load.summary import Summary

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 220, 60, 34
STROKES = ("", "6 3", "2 3", "8 3 2 3")  # dash patterns tell lines apart, besides colour
MOST_ROWS = 20  # rows of a chart's table

NEXT: dict[str, str] = {
    "none": "raise --rate, or let --find-capacity search for the limit",
    "generator": "give the generator more --processes or a machine of its own, and repeat: these "
    "numbers say nothing of the servers",
    "coordinator": "give it more opening processes (--workers) or processors",
    "shuffler": "give it a faster processor, or higher limits if it answered 429",
    "database": "give the shuffler's database a faster disk or server",
    "network": "look at the connections between the nodes and the shuffler",
    "machine": "use a larger machine, or give the generator one of its own",
}
EVIDENCE = {
    "loops": "busiest event loop of the generator, processors wanted (of 1)",
    "sealing": "each sealing process of the generator, processors wanted (of 1)",
    "shuffler": "shuffler, processors wanted (of 1)",
    "opening": "each opening process of the coordinator, processors wanted (of 1)",
    "answering": "share of the requests' time in which the shuffler worked on them",
    "refused": "requests answered 429",
    "busy": "busy share of all processors",
}
_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid color-mix(in srgb,
currentColor 25%, transparent); } .n { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
svg.key { width: 2rem; height: .6rem; margin: 0 .4rem 0 1rem; }
.axis { fill: none; stroke: currentColor; opacity: .25; }
.line { fill: none; stroke-width: 1.8; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.l0 { stroke: light-dark(#0b6bcb, #7db8ff); } .l1 { stroke: light-dark(#c2410c, #ffa36b); }
.l2 { stroke: light-dark(#15803d, #6fdc94); } .l3 { stroke: light-dark(#7e22ce, #cfa4ff); }
@media (max-width: 500px) { svg text { font-size: 20px; } th, td { padding: .2rem .35rem; } }
.verdict { padding: .2rem 1rem; border-left: .3rem solid #0b6bcb; }
.verdict b { font-size: 1.3rem; }
"""
_HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Load test</title>"
    f'<meta name=viewport content="width=device-width"><style>{_STYLE}</style>'
)


def write_summary(folder: Path, summary: Summary) -> None:
    """Writes ``summary.json``, which is complete, and ``load.html``."""
    (folder / "load.html").write_text(to_html(summary), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def headline(summary: Summary) -> str:
    """Returns the result in a sentence: what was carried, and what was the limit."""
    limit, found = summary["verdict"]["limit"], summary.get("capacity")
    rate = found["carried_a_second"] if found else summary["parameters"]["rate"]
    least = "at least " if found and limit in ("none", "generator") else ""
    if limit == "none":
        return f"Carried: {least}{rate:.3g} reports a second. Nothing was the limit"
    word, beyond = ("Capacity", "Beyond, the") if found else ("Not carried", "The")
    return f"{word}: {least}{rate:.3g} reports a second. {beyond} limit is the {limit}"


def to_html(summary: Summary) -> str:
    """Returns the summary as one HTML file."""
    reports, verdict, series = summary["reports"], summary["verdict"], summary["series"]
    names, found = list(summary["processes"]), summary.get("capacity")
    measured = summary["evidence"]
    evidence = {
        text: measured[name] for name, text in EVIDENCE.items() if measured[name] is not None
    }
    totals = {name: reports[name] for name in ("due", "accepted", "undecided")}
    totals |= {n: summary[n] for n in ("accepted_a_second", "messages_a_second", "seconds")}
    parts = [
        f"<h1>Load test</h1><div class=verdict><p><b>{_text(headline(summary))}.</b><p>Why: "
        f"{_text(verdict['why'])}.<p>Next: {_text(NEXT[verdict['limit']])}.</div>",
        f"<p>{'It was interrupted. ' if summary.get('interrupted') else ''}"
        f"{'The rest is about the least rate that was not carried. ' if found else ''}"
        "Latency counts from the time a report was due, whether or not the generator was free.</p>",
        _grid("Rates that were tried, reports a second", found["steps"], "due") if found else "",
        _chart("Reports a second", series, ["due", "accepted", "rejected"], "_a_second"),
        _chart("Latency of a second's reports, ms", series, ["p50", "p95", "p99"], " ms"),
        _chart("Reports under way", series, ["open"], ""),
        _chart("Processors in use", series, names, " processors"),
        _chart("Memory, MiB", series, names, " mib"),
        _table("Reports", totals),
        _table("Rejected reports, by reason", reports["rejected"]),
        _table("Answers that were no success, also those tried again", reports["answers"]),
        _grid("Latency, ms", _latencies(reports), "stage"),
        _grid("Processors: used, and wanted while others had them", summary["processes"], "part"),
        _grid("Memory, MiB", summary["memory"], "part"),
        _table("Evidence of the verdict", evidence),
        _table("Parameters", summary["parameters"]),
    ]
    return f"{_HEAD}<body>{''.join(parts)}</body></html>\n"


def _latencies(reports: Summary) -> Summary:
    whole = {"from due": reports["latency_from_due_ms"], "upload": reports["latency_from_send_ms"]}
    return whole | {f"of it {name}": row for name, row in reports["stages_ms"].items()}


def _ticks(top: float) -> list[float]:
    """Returns at most six round values from 0 to ``top``."""
    size = 10.0 ** math.floor(math.log10(top / 4))
    step = next(size * digit for digit in (1, 2, 5, 10) if top / (size * digit) <= 5)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def _chart(title: str, rows: Sequence[Mapping[str, float]], names: list[str], unit: str) -> str:
    """Returns lines over time with a table of evenly spaced samples (summary.json has all)."""
    top = max([row.get(name + unit, 0.0) for row in rows for name in names], default=0.0) or 1.0
    end = max([row["at"] for row in rows], default=1.0) or 1.0
    lines = "".join(_line(rows, name + unit, i, end, top) for i, name in enumerate(names))
    legend = "".join(
        f'<svg class=key viewBox="0 0 32 8"><path class="line l{i % 4}"{_dash(i)} d="M0 4H32"/>'
        f"</svg>{_text(name)}"
        for i, name in enumerate(names)
    )
    step = -(-len(rows) // MOST_ROWS)
    shown = [row for i, row in enumerate(reversed(rows)) if i % step == 0][::-1]
    cells = {
        f"{row['at']:.1f}": {name: row.get(name + unit, "") for name in names} for row in shown
    }
    return (
        f'<h2>{_text(title)}</h2><svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
        f'aria-label="{_text(title)} over time">{_axes(end, top)}{lines}</svg><p>{legend}</p>'
        f"<details><summary>as a table</summary>{_grid('', cells, 'second')}</details>"
    )


def _axes(end: float, top: float) -> str:
    across = "".join(
        f'<path class=axis d="M{LEFT} {_down(tick, top):.1f}H{WIDTH}"/>'
        f"<text class=end x={LEFT - 6} y={_down(tick, top) + 4:.1f}>{tick:,.4g}</text>"
        for tick in _ticks(top)
    )
    along = "".join(
        f"<text class=mid x={_right(tick, end):.1f} y={HEIGHT - BOTTOM + 14}>{tick:,.4g}</text>"
        for tick in _ticks(end)
    )
    name = f"<text class=end x={WIDTH} y={HEIGHT - 2}>seconds from the start</text>"
    return across + along + name


def _right(at: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - 12) * max(at, 0.0) / end


def _down(value: float, top: float) -> float:
    return 8 + (HEIGHT - BOTTOM - 8) * (1 - value / top)


def _dash(number: int) -> str:
    return f' stroke-dasharray="{STROKES[number % 4]}"' if STROKES[number % 4] else ""


def _line(
    rows: Sequence[Mapping[str, float]], name: str, number: int, end: float, top: float
) -> str:
    kept = [row for row in rows if name in row]
    points = " ".join(f"{_right(row['at'], end):.1f},{_down(row[name], top):.1f}" for row in kept)
    return f'<polyline class="line l{number % 4}"{_dash(number)} points="{points}"/>'


def _table(title: str, rows: Mapping[str, object]) -> str:
    """Returns names and values under a heading; nothing without rows."""
    body = "".join(f"<tr><td>{_text(name)}{_cell(value)}" for name, value in rows.items())
    return f"<h2>{_text(title)}</h2><table>{body}</table>" if rows else ""


def _grid(title: str, rows: Mapping[str, Mapping[str, object]], first: str = "") -> str:
    columns = list(next(iter(rows.values()), {}))
    head = "".join(f"<th scope=col class=n>{_text(name)}" for name in columns)
    body = "".join(
        f"<tr><td>{_text(name)}" + "".join(_cell(row[column]) for column in columns)
        for name, row in rows.items()
    )
    heading = f"<h2>{_text(title)}</h2>" if title else ""
    return f"{heading}<table><tr><th scope=col>{_text(first)}{head}{body}</table>"


def _cell(value: object) -> str:
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"<td class=n>{_text(text)}"


def _text(value: object) -> str:
    return html.escape(str(value).replace("_", " "))
