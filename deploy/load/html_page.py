"""summary.json and load.html of a load test.

The HTML is one file without scripts or external resources. Each chart (SVG) has a table.
"""

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from riffle.deploy.load.run import LoadConfig
from riffle.deploy.load.summary import (
    CARRIED,
    OTHERS,
    PROMPT,
    PROMPT_SECONDS,
    Summary,
    cores_of,
    started_a_second,
)

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 220, 60, 44, 12
DASHES = ("", *(f' stroke-dasharray="{dash}"' for dash in ("6 3", "2 3", "8 3 2 3")))
MOST_ROWS = 20  # rows of a chart's table
MANY = 100  # least rate, in reports a second, at which each second's 99th percentile is drawn
UNSURE = 10.0  # trials disagree if a higher rate has this many points more prompt reports
NOISY = 0.1  # other programs may use this share of the processors without a warning

RATES, LATENCY = "Rates tried, a second", "Latency, ms"
OPTIONS = {"aggregation": "aggregation", "processes": "processes", "workers": "openers"}
DEFAULTS = {field.name: field.default for field in fields(LoadConfig)}

NEXT: dict[str, str] = {
    "none": "find the limit with riffle load --find-capacity {options} --out FOLDER",
    "generator": "give the generator a machine of its own or, if processors are idle, more "
    "--processes, and repeat: these numbers are only a lower bound for the services",
    "coordinator": "give it more opening processes (--workers) or processors",
    "shuffler": "give it a faster processor, or higher limits if it answered 429",
    "database": "give the shuffler's database a faster disk or server",
    "network": "look at the connections between the nodes and the shuffler",
    "machine": "use a larger machine, or give the generator one of its own",
}
_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid color-mix(in srgb,
currentColor 25%, transparent); } .n { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; max-width: 40rem; height: auto; } svg text { font-size: 10px;
fill: currentColor; } svg * { vector-effect: non-scaling-stroke; } .key { white-space: nowrap; }
svg.key { width: 2rem; height: .6rem; margin: 0 .4rem 0 1rem; }
.axis { fill: none; stroke: currentColor; opacity: .25; }
.line { fill: none; stroke-width: 2; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.l0 { stroke: light-dark(#0b6bcb, #7db8ff); } .l1 { stroke: light-dark(#c2410c, #ffa36b); }
.l2 { stroke: light-dark(#15803d, #6fdc94); } .l3 { stroke: light-dark(#7e22ce, #cfa4ff); }
@media (max-width: 500px) { svg text { font-size: 15px; } table { font-size: .75rem; }
th, td { padding: .2rem .35rem; } }
td, code { white-space: nowrap; } code { font: inherit; } dt { opacity: .75; }
dd { margin: 0 0 .6rem; } dl { border: 1px solid; border-radius: .6rem; padding: .8rem 1rem .3rem; }
dd:first-of-type { font-size: 1.3rem; } dd:nth-of-type(3n + 1) { font-weight: 600; }
@media (min-width: 501px) { dl { display: grid; grid-template-columns: 6rem 1fr; } }
"""
_HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Load test</title>"
    f'<meta name=viewport content="width=device-width"><style>{_STYLE}</style>'
)


def write_summary(folder: Path, summary: Summary) -> None:
    """Writes ``load.html``, and ``summary.json``, which has all numbers."""
    (folder / "load.html").write_text(to_html(summary), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def headline(summary: Summary) -> str:
    """Returns the result in a sentence: the load that was carried, and what limited it."""
    limit, found = summary["verdict"]["limit"], summary.get("capacity")
    rate = f"{_rate(summary):.3g} reports a second"
    if limit == "none":
        return f"The network carries at least {rate}. No limit was reached"
    also = " (which other programs used, too)" if limit == "machine" and _others(summary) else ""
    if limit == "generator" or summary["verdict"]["stage"] == "sealing":
        known = (
            "The network carries at least" if found else "It is not known if the network carries"
        )
        part = "load generator" if limit == "generator" else limit + also
        return f"{known} {rate}. The {part} was the limit: the services may carry more"
    if not found:
        return f"The network does not carry {rate}. The limit is the {limit}{also}"
    beyond = found["not_carried"]
    return f"The network carries {rate}, but not {beyond:.3g}. Then the limit is the {limit}{also}"


def _rate(summary: Summary) -> float:
    """Returns the carried rate of a search, or the rate of a single load, in reports a second."""
    found = summary.get("capacity")
    return float(found["carried_a_second"]) if found else started_a_second(summary)


def certainty(summary: Summary) -> str:
    """Returns how sure the result is: how often a rate was tried, and what disturbed the trials."""
    steps = summary.get("capacity", {"steps": {}})["steps"]
    rows = steps.values()
    disagree = any(
        low["p50, ms"] > 2 * high["p50, ms"] or high[PROMPT] > low[PROMPT] + UNSURE
        for low, high in pairwise(rows)
    )
    wrong = "; the trials disagree, for a lower rate did worse" if disagree else ""
    wrong += f"; other programs {_others(summary)}" if _others(summary) else ""
    wrong += "; it was interrupted" if summary.get("interrupted") else ""
    twice = [rate for rate, row in steps.items() if row["tries"] > 1]
    late = [rate for rate in twice if steps[rate]["result"] == "carried"]
    wrong += f"; {' and '.join(late)} a second was carried only at the second try" * bool(late)
    what = "each rate" if rows else f"this rate ({summary['evidence']['started']} reports)"
    again = f" ({' and '.join(twice)} a second twice)" * bool(twice)
    if _unfilled(summary):
        wrong += "; no batch filled at the carried rate, so the coordinator was not tried"
    grade = "not very sure" if wrong else "fairly sure"
    seconds = summary["parameters"]["seconds"]
    return f"{grade}: {what} was tried once{again}, for {seconds:g} s{wrong}"


def _opened(summary: Summary) -> str:
    """Returns which share of the full batches' messages was opened when the load ended."""
    opened, left = summary["opening"]["opened"], summary["opening"]["to_open"]
    if not opened + left:
        return f"no batch filled{_at(summary)}"
    share = f"{opened / (opened + left):.0%} of the messages of full batches during the load"
    return f"{share}; {left:,} were still to be opened at its end{_at(summary)}"


def _at(summary: Summary) -> str:
    """Returns the rate at which a search measured its numbers; "" for a single load."""
    if not summary.get("capacity"):
        return ""
    carried = "carried" if summary["verdict"]["limit"] == "none" else "not carried"
    return f", at {summary['parameters']['rate']:.3g} a second ({carried})"


def card(summary: Summary) -> dict[str, str]:
    """Returns the first lines of a load test's summary, each under its label."""
    return {
        "Answer": headline(summary),
        "How sure": certainty(summary),
        "Opened": _opened(summary),
        "Next": next_step(summary),
        "Load": f"{_options(summary['parameters'])}, {_messages(summary)}",
        "Why": summary["verdict"]["why"],
    }


def numbers(summary: Summary) -> dict[str, Mapping[str, Any]]:
    """Returns the report's tables by title. A table maps names to values, or to rows of values."""
    reports = summary["reports"]
    totals = {name: reports[name] for name in ("started", "accepted", "undecided", "messages")}
    latencies = {f"from {name}": reports[f"latency_from_{name}_ms"] for name in ("due", "send")}
    rates = ("accepted_a_second", "messages_a_second", "seconds")
    return {
        "Reports": totals | {name: summary[name] for name in rates},
        "Rejected reports": reports["rejected"],
        "Unsuccessful answers": reports["answers"],
        LATENCY: latencies | reports["stages_ms"],
        "Processors": summary["processes"],
        "Memory, MiB": summary["memory"],
        "Parameters": summary["parameters"],
    }


def next_step(summary: Summary) -> str:
    """Returns what to do next: first get rid of what disturbed the measurement."""
    limit = summary["verdict"]["limit"]
    again = ["on an idle machine"] if limit != "none" and _others(summary) else []
    unfilled, parameters = _unfilled(summary), summary["parameters"]
    if unfilled and limit == "none" and not summary.get("capacity"):
        parameters = parameters | {"seconds": _filling_seconds(summary)}
    elif unfilled:
        n, seconds = summary["parameters"]["reports_a_batch"], _filling_seconds(summary)
        again.append(f"with --duration {seconds} --batch {n}, so that batches fill")
    repeat = f"repeat {' and '.join(again)}" if again else ""
    # If other programs used the machine, it may be large enough without them.
    then = "" if repeat and limit == "machine" else NEXT[limit].format(options=_options(parameters))
    return ". Then ".join(filter(None, (repeat, then)))


def _options(parameters: Summary) -> str:
    """Returns the command-line options of a load. Some are left out if they have their defaults."""
    words = "--nodes {nodes} --rate {rate:g} --duration {seconds:g} --batch {reports_a_batch}"
    for option, name in OPTIONS.items():
        words += f" --{option} {{{name}}}" * (parameters[name] != DEFAULTS[option])
    if parameters["generator_cores"] != parameters["service_cores"]:
        for name in ("generator_cores", "service_cores"):
            words += f" --{name.replace('_', '-')} {','.join(map(str, parameters[name]))}"
    return words.format_map(parameters)


def _unfilled(summary: Summary) -> bool:
    if found := summary.get("capacity"):
        return bool(found["carried_a_second"] and not found["filled"])
    return summary["verdict"]["limit"] == "none" and not summary["evidence"]["filled"]


def _filling_seconds(summary: Summary) -> int:
    """Returns seconds enough to fill at least two batches at the rate that the load carried."""
    parameters = summary["parameters"]
    rate = _rate(summary) or parameters["rate"]
    longest: float = max(parameters["reports_a_batch"] / rate, parameters["seconds"])
    return math.ceil(2 * longest)


def _messages(summary: Summary) -> str:
    each = summary["reports"]["messages"] / max(summary["reports"]["accepted"], 1)
    return f"aggregation {summary['parameters']['aggregation']}, {each:.0f} messages a report"


def _others(summary: Summary) -> str:
    parameters, used = summary["parameters"], summary["evidence"]["others"]
    cores = len(cores_of(parameters))
    return f"used {used:.2g} of {cores} processors" if used > NOISY * cores else ""


def to_html(summary: Summary) -> str:
    """Returns the summary as one HTML file."""
    series, names, found = summary["series"], list(summary["processes"]), summary.get("capacity")
    rate, at, lines = summary["parameters"]["rate"], _at(summary), card(summary)
    load, why = lines.pop("Load"), lines.pop("Why")
    shares = ["p50", "p95", *(["p99"] if rate >= MANY else [])]
    few = "" if rate >= MANY else f"p99: too few reports, {rate:.3g} a second (at least {MANY})"
    parts = [
        "<h1>Load test</h1><dl>",
        *(f"<dt>{name}<dd>{_sentence(text)}" for name, text in lines.items()),
        f"</dl><p>Load: {_text(load)}.</p>"
        f"<p>Why: {_text(why)}. A rate is carried if {CARRIED:.0%} of its reports "
        f"are accepted within {PROMPT_SECONDS:g} s of the time at which they are due, whether or "
        "not the generator is free then.</p>",
        _table(RATES, found["steps"], "asked for") if found else "",
        _chart(f"Reports a second{at}", series, ["started", "accepted", "rejected"], "_a_second"),
        _chart(f"Latency of a second's reports, ms{at}", series, shares, " ms", few),
        _chart(f"Reports under way{at}", series, ["open"], ""),
        _chart(f"Processors in use{at}", series, [*names, OTHERS], " processors"),
        _chart(f"Memory, MiB{at}", series, names, " mib"),
        f"<details><summary>All numbers{at}</summary>",
        *(_table(title, rows) for title, rows in numbers(summary).items()),
        "</details>",
    ]
    return f"{_HEAD}<body>{''.join(parts)}</body></html>\n"


def _ticks(top: float) -> list[float]:
    """Returns at most six round values from 0 to ``top``."""
    size = 10.0 ** math.floor(math.log10(top / 4))
    step = next(size * digit for digit in (1, 2, 5, 10) if top / (size * digit) <= 5)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def _chart(
    title: str, rows: Sequence[Mapping[str, float]], names: list[str], unit: str, note: str = ""
) -> str:
    """Returns a chart of lines over time, with a table of some samples (summary.json has all).

    Leaves out the last interval if it is shorter than half of the previous one, because its rates
    are noise. Leaves out a line without values.
    """
    names = [name for name in names if any(name + unit in row for row in rows)]
    ends = [row["at"] for row in rows[-3:]]
    if len(ends) == 3 and 2 * (ends[2] - ends[1]) < ends[1] - ends[0]:
        rows = rows[:-1]
    top = max([row.get(name + unit, 0.0) for row in rows for name in names], default=0.0) or 1.0
    end = max([row["at"] for row in rows], default=1.0) or 1.0
    lines = "".join(_line(rows, name + unit, i, end, top) for i, name in enumerate(names))
    legend = "".join(
        f'<span class=key><svg class=key viewBox="0 0 32 8"><path class="line l{i % 4}"'
        f'{_dashes(i)} d="M0 4H32"/></svg>{_text(name)}</span> '
        for i, name in enumerate(names)
    )
    step = -(-len(rows) // MOST_ROWS)
    shown = [row for i, row in enumerate(reversed(rows)) if i % step == 0][::-1]
    cells = {
        f"{row['at']:.1f}": {name: row.get(name + unit, "") for name in names} for row in shown
    }
    return (
        f'<h2>{_text(title)}</h2><svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
        f'aria-label="{_text(title)} over time">{_axes(end, top)}{lines}</svg><p>{legend}{note}</p>'
        f"<details><summary>as a table</summary>{_table('', cells, 'second')}</details>"
    )


def _dashes(number: int) -> str:
    """Returns the dashes of a line, so that a colour that occurs again has other dashes."""
    return DASHES[(number + number // 4) % 4]


def _axes(end: float, top: float) -> str:
    across = "".join(
        f'<path class=axis d="M{LEFT} {_down(tick, top):.1f}H{WIDTH}"/>'
        f"<text class=end x={LEFT - 6} y={_down(tick, top) + 4:.1f}>{tick:,g}</text>"
        for tick in _ticks(top)
    )
    along = "".join(
        f"<text class=mid x={_right(tick, end):.1f} y={HEIGHT - BOTTOM + 16}>{tick:,g}</text>"
        for tick in _ticks(end)[1:]
    )
    name = f"<text class=end x={WIDTH} y={HEIGHT - 2}>seconds from the start</text>"
    return across + along + name


def _right(at: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - 12) * max(at, 0.0) / end


def _down(value: float, top: float) -> float:
    return TOP + (HEIGHT - BOTTOM - TOP) * (1 - value / top)


def _line(
    rows: Sequence[Mapping[str, float]], name: str, number: int, end: float, top: float
) -> str:
    kept = [row for row in rows if name in row]
    points = " ".join(f"{_right(row['at'], end):.1f},{_down(row[name], top):.1f}" for row in kept)
    return f'<polyline class="line l{number % 4}"{_dashes(number)} points="{points}"/>'


def _table(title: str, rows: Mapping[str, Any], first: str = "") -> str:
    """Returns rows under a heading, or "" if there are no rows. A row has one value, or one value
    for each column. With columns, ``first`` is the heading over the names of the rows."""
    columns = next(iter(rows.values()), None)
    head = f"<h2>{_text(title)}</h2><table>" if title else "<table>"
    if isinstance(columns, Mapping):
        names = "".join(f"<th scope=col class=n>{_text(name)}" for name in columns)
        head += f"<tr><th scope=col>{_text(first)}{names}"
    body = "".join(
        f"<tr><td>{_text(name)}"
        + "".join(map(_cell, row.values() if isinstance(row, Mapping) else [row]))
        for name, row in rows.items()
    )
    return f"{head}{body}</table>" if rows else ""


def _cell(value: object) -> str:
    if isinstance(value, float):  # four digits, and no exponent
        value = f"{value:,.0f}" if value >= 1e4 else f"{value:,.4g}"
    text = "-" if value is None else str(value)
    return f"<td class=n>{_text(text)}"


def _sentence(text: str) -> str:
    """Returns a text as an HTML sentence. An option such as --out stays on one line."""
    return re.sub(r"--[\w-]+", r"<code>\g<0></code>", _text(text[0].upper() + text[1:])) + "."


def _text(value: object) -> str:
    return html.escape(str(value).replace("_", " "))
