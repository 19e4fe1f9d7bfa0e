"""Makes figures by name: runs a figure's seeds, gathers the results, and writes the figure's files.

The manifest NAME.json is written last, so a figure with a manifest is finished. Without `force`,
finished figures are not overwritten.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from riffle.common.process.plugins import unknown_name
from riffle.common.process.tables import csv_text
from riffle.common.protocol.errors import LocalError
from riffle.experiments.figures.catalogue import Figure, figures
from riffle.experiments.figures.draw import X_LABELS, Point, Series, draw, gather
from riffle.experiments.presets import label_of
from riffle.experiments.regret import METHOD, Band
from riffle.experiments.sweep import Backend, Job, Row, Rows, Run, code_digest, sweep

PACKAGES = ("riffle-rl", "numpy", "scipy", "numba", "joblib", "matplotlib")


def write(
    figure: Figure,
    series: Sequence[Series],
    seeds: Sequence[int],
    folder: Path,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Writes all files of a figure. Returns its manifest, to which `about` is added."""
    stem = folder / figure.name
    bands = [
        {"curve": curve.line.label, "x": float(x)}
        | {field.name: float(getattr(curve.band, field.name)[i]) for field in fields(Band)}
        for curve in series
        for i, x in enumerate(curve.x)
    ]
    stem.with_suffix(".csv").write_text(csv_text(bands, ["curve"]))
    (folder / f"{figure.name}-seeds.csv").write_text(csv_text([*seed_rows(series)], ["curve"]))
    stem.with_suffix(".md").write_text(table(figure, series, seeds))
    draw(figure, series, seeds, stem)
    document = manifest(figure, series, seeds) | about
    stem.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def manifest(figure: Figure, series: Sequence[Series], seeds: Sequence[int]) -> dict[str, Any]:
    """Returns what reproduces the numbers: versions, runs, constants, and the missing points."""
    return {
        "figure": figure.name,
        "title": figure.title,
        "note": figure.note,
        "seeds": list(seeds),
        "bands": METHOD,
        "regret": "exact pseudo-regret; no reward was read",
        "code": code_digest(),
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "regret_table": regret_table(figure, series),
        "curves": [
            {
                "label": curve.line.label,
                "constants": curve.constants,
                "missing": list(curve.missing),
                "runs": [_run(point) for point in curve.points],
            }
            for curve in series
        ],
    }


def table(figure: Figure, series: Sequence[Series], seeds: Sequence[int]) -> str:
    """Returns Markdown: final regret at every x, all constants, and reasons for missing results."""
    n = len(seeds)
    over = f"mean over {n} seeds and its band ({METHOD})" if n > 1 else "of one seed"
    constants = [
        [
            c.line.label,
            ", ".join(f"{k}={v}" for k, v in c.constants.items()) or "none: not computed",
        ]
        for c in series
    ]
    parts = [
        f"# {figure.name}: {figure.title}",
        f"![{figure.title}]({figure.name}.png)",
        f"Regret at the end of the run, {over}. The picture draws it against "
        f"{X_LABELS[figure.kind]}. If runs of a curve differ in switches or in the share "
        f"within 5 %, these are listed in the order of the computed runs. {figure.note}".rstrip(),
        _markdown(regret_table(figure, series)),
        "## Constants",
        _markdown([["curve", "constants"], *constants]),
    ]
    if gaps := [[c.line.label, reason] for c in series for reason in c.missing]:
        parts += ["## Not computed", _markdown([["curve", "at: why"], *gaps])]
    return "\n\n".join(parts) + "\n"


def regret_table(figure: Figure, series: Sequence[Series]) -> list[list[str]]:
    """Returns the table of final regrets with their bands; the first row is the head."""
    columns = sorted({point.x for curve in series for point in curve.points})
    unit = "epsilon" if figure.kind == "epsilon" else "K"
    heads = ["", *(f"{unit} = {x:,.10g}" for x in columns), "switches", "within 5 % of V*"]
    return [heads, *(_table_row(curve, columns) for curve in series)]


def _table_row(curve: Series, columns: Sequence[float]) -> list[str]:
    at = {point.x: point for point in curve.points}
    absent = "not computed"
    cells = [_cell(at[x]) if x in at and at[x].rows else absent for x in columns]
    known = [at[x] for x in columns if x in at and at[x].rows]
    switches = [f"{s.mean:,.0f}" if (s := point.switches) else "every episode" for point in known]
    shares = ["" if (w := point.within_5_percent) is None else f"{w:.0%}" for point in known]
    listed = [" / ".join(t if len({*t}) > 1 else t[:1]) for t in (switches, shares)]
    return [curve.line.label, *cells, *listed]


def _cell(point: Point) -> str:
    band = point.regret
    interval = f" [{band.low:,.0f}, {band.high:,.0f}]" if len(point.rows) > 1 else ""
    return f"{band.mean:,.0f}{interval}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines)


def _run(point: Point) -> dict[str, Any]:
    fields = {name: getattr(point.run, name) for name in Run.__dataclass_fields__}
    fields |= {name: label_of(fields[name]) for name in ("learner", "environment")}
    fields |= {"x": point.x, "key": point.run.key, "seeds": len(point.rows)}
    return fields | ({"seconds": point.seconds} if point.rows else {})


def seed_rows(series: Sequence[Series]) -> Iterator[dict[str, Any]]:
    """Yields one row for each run and seed: the run's parameters and results."""
    for curve in series:
        for point in curve.computed:
            for row in point.rows:
                yield {
                    "curve": curve.line.label,
                    "x": point.x,
                    "learner": curve.line.learner,
                    "environment": curve.line.world or label_of(point.run.environment),
                    "episodes": point.run.K,
                    "epsilon": point.run.epsilon,
                    "trust": point.run.trust,
                    "seed": row.seed,
                    "regret": row.regret,
                    "switches": row.policy_switches,
                    "policy_value": row.policy_value,
                    "value_share": row.value_share,
                }


ALL = "all"


@dataclass(frozen=True, slots=True)
class Order:
    """Figures to make, their seeds and folder. `force` makes finished figures again."""

    figures: tuple[Figure, ...]
    seeds: Sequence[int]
    folder: Path
    backend: Backend
    force: bool = False

    @property
    def jobs(self) -> list[Job]:
        """Every (run, seed) once, even if several figures share the run."""
        runs = dict.fromkeys(run for figure in self.figures for run in figure.runs)
        return [(run, seed) for run in runs for seed in self.seeds]


def select_figures(name: str, *, quick: bool) -> tuple[Figure, ...]:
    """Returns the figure with a name, or all figures for `all`; raises ValueError for others."""
    known = figures(quick=quick)
    if name == ALL:
        return tuple(figure for figure in known.values() if figure.in_all)
    if name not in known:
        raise ValueError(unknown_name("figure", name, (*known, ALL)))
    return (known[name],)


def make(
    order: Order, on_row: Callable[[Row], None], on_start: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Computes and writes an order's figures. `on_start` gets the number of jobs to compute.

    Without `force`, a finished figure raises LocalError ``wrong-state``. So do rows of other code.
    """
    names = [figure.name for figure in order.figures]
    existing = [name for name in names if (order.folder / f"{name}.json").exists()]
    if existing and not order.force:
        text = f"{order.folder} already has {', '.join(existing)}; choose another --out, or --force"
        raise LocalError("wrong-state", text)
    order.folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(order.folder / "rows.jsonl")
    wanted = {(run.key, seed) for run, seed in order.jobs}
    if order.force:
        rows.forget(wanted)
    on_start(sum(rows.get(identity) is None for identity in wanted))
    started = time.perf_counter()
    sweep(order.jobs, rows, order.backend, on_row)
    about = {"backend": asdict(order.backend), "sweep_seconds": time.perf_counter() - started}
    return [
        write(figure, gather(figure, rows, order.seeds), order.seeds, order.folder, about)
        for figure in order.figures
    ]
