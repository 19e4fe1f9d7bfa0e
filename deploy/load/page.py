"""The report as one HTML file: no script, nothing loaded from elsewhere, every chart with a table.

Charts are SVG drawn here; they follow the reader's colours, light or dark.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 200, 60, 24
STROKES = ("", "6 3", "2 3", "8 3 2 3")
"""Lines are told apart by their dashes, not by colour alone."""
MOST_ROWS = 20
"""Of a chart's table."""

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


def write_report(folder: Path, found: Mapping[str, Any]) -> None:
    """``load.html`` beside ``summary.json``, which has all of it."""
    (folder / "load.html").write_text(page(found), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")


def page(found: Mapping[str, Any]) -> str:
    """The whole report."""
    reports, verdict = found["reports"], found["verdict"]
    limit = "nothing" if verdict["limit"] == "none" else f"the {verdict['limit']}"
    label = "Reports were sealed before and sent again: sealing is not part of this load. "
    parts = [
        f"<h1>Load test</h1><p class=verdict>Limited by <b>{_text(limit)}</b>: "
        f"{_text(verdict['why'])}.</p>",
        f"<p>{label if found['parameters']['presealed'] else ''}"
        f"{'It was interrupted. ' if found.get('interrupted') else ''}"
        "Latency counts from the time a report was due, whether or not the generator was free.</p>",
        _table("Reports", _totals(found)),
        _table("Rejected, by reason", reports["rejected"] or {"none": 0}),
        _table("Answers that were no success, also those tried again", reports["answers"]),
        _grid("Latency, ms", _latencies(reports)),
        _chart("Reports a second", found["series"], ["due", "accepted", "rejected"], "_a_second"),
        _chart("Memory, MiB", found["series"], list(found["processes"]), " mib"),
        _chart("Processors in use", found["series"], list(found["processes"]), " processors"),
        _grid("Processes", found["processes"]),
        _grid("Memory", found["memory"]),
        _table("Parameters", found["parameters"]),
    ]
    head = f"<meta charset=utf-8><title>Load test</title><style>{_STYLE}</style>"
    viewport = '<meta name=viewport content="width=device-width">'
    return f"<!doctype html><html lang=en>{head}{viewport}<body>{''.join(parts)}</body></html>\n"


def _totals(found: Mapping[str, Any]) -> dict[str, object]:
    reports = found["reports"]
    names = ("due", "accepted", "undecided", "messages")
    rates = ("seconds", "accepted_a_second", "messages_a_second")
    return {name: reports[name] for name in names} | {name: found[name] for name in rates}


def _latencies(reports: Mapping[str, Any]) -> dict[str, Any]:
    whole = {"from due": reports["latency_from_due_ms"], "upload": reports["latency_from_send_ms"]}
    return whole | {f"of it {name}": row for name, row in reports["stages_ms"].items()}


def _chart(title: str, rows: Sequence[Mapping[str, float]], names: list[str], unit: str) -> str:
    """Lines over time, and their numbers; those that are left out are in summary.json."""
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
    return (
        f'<h2>{_text(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
        f'aria-label="{_text(title)} over time">{axes}{lines}</svg><p>{legend}</p>'
        f"{_numbers(rows, names, unit)}"
    )


def _numbers(rows: Sequence[Mapping[str, float]], names: list[str], unit: str) -> str:
    """A chart as a table, of evenly spaced samples if there are many, and of the last."""
    step = -(-len(rows) // MOST_ROWS)
    shown = [row for i, row in enumerate(reversed(rows)) if i % step == 0][::-1]
    cells = {
        f"{row['at']:.1f}": {name: row.get(name + unit, "") for name in names} for row in shown
    }
    return f"<details><summary>as a table</summary>{_grid('', cells, 'second')}</details>"


def _line(
    rows: Sequence[Mapping[str, float]], name: str, number: int, end: float, top: float
) -> str:
    def points() -> Iterator[str]:
        for row in rows:
            if name in row:
                x = LEFT + (WIDTH - LEFT) * max(row["at"], 0.0) / end
                y = 8 + (HEIGHT - BOTTOM - 8) * (1 - row[name] / top)
                yield f"{x:.1f},{y:.1f}"

    dash = f' stroke-dasharray="{STROKES[number % 4]}"' if STROKES[number % 4] else ""
    return f'<polyline class=l{number % 4}{dash} points="{" ".join(points())}"/>'


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
    shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"<td class=n>{_text(shown)}"


def _text(value: object) -> str:
    return html.escape(str(value).replace("_", " "))
