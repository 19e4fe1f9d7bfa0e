"""Gathers the results of a figure's runs as curves, and draws them as PNG and SVG."""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.figures.catalogue import Curve, Figure, Line
from riffle.experiments.regret import METHOD, Band, Constant, SeedResult, stack, student_band
from riffle.experiments.sweep import Rows, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve: x, a run, its results for all seeds, and reasons for missing results."""

    x: float
    run: Run
    rows: tuple[SeedResult, ...]
    missing: str = ""

    @property
    def regret(self) -> Band:
        """The band of the whole run's regret; each of its fields is a single number."""
        return student_band([row.regret for row in self.rows])

    @property
    def switches(self) -> Band | None:
        """The band of the number of switches, or None if every episode has a policy of its own."""
        values = [row.policy_switches for row in self.rows]
        return None if None in values else student_band([float(v or 0) for v in values])

    @property
    def within_5_percent(self) -> float | None:
        """The share of seeds whose learned policy has at least 95 % of the value V*."""
        values = [row.value_share for row in self.rows if row.value_share is not None]
        return float(np.mean([v >= 0.95 for v in values])) if values else None

    @property
    def seconds(self) -> float:
        """The mean time, in seconds, that one seed took."""
        return float(np.mean([row.seconds for row in self.rows]))


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: c values x (c,), the band of regret at each x, `points`, and the points' constants.

    `x` and `band` are empty if nothing could be computed.
    """

    line: Line
    x: FloatArray
    band: Band
    points: tuple[Point, ...]
    constants: dict[str, str]
    missing: tuple[str, ...] = ()
    ceiling: float | None = None

    @property
    def computed(self) -> tuple[Point, ...]:
        """Returns the points that have the result of at least one seed."""
        return tuple(point for point in self.points if point.rows)


def gather(figure: Figure, rows: Rows, seeds: Sequence[int]) -> tuple[Series, ...]:
    """Returns the series of a figure, in the order of its curves."""
    return tuple(_series(figure, curve, rows, seeds) for curve in figure.curves)


def _series(figure: Figure, curve: Curve, rows: Rows, seeds: Sequence[int]) -> Series:
    points = tuple(_point(x, run, rows, seeds) for x, run in zip(curve.x, curve.runs, strict=True))
    computed = [point for point in points if point.rows]
    x = np.array([point.x for point in computed])
    band = stack([point.regret for point in computed])
    if figure.kind == "time" and computed:
        rows_of_run = computed[0].rows
        x = np.array(rows_of_run[0].episodes)
        band = student_band([row.cumulative for row in rows_of_run])
    missing = [point.missing for point in points if point.missing]
    missing += [f"{x:,.10g}: {reason}" for x, reason in curve.absent]
    ceilings = [point.rows[0].optimal_value * point.run.K for point in computed]
    constants = merge_constants([p.rows[0].constants for p in computed])
    ceiling = ceilings[0] if ceilings and not math.isnan(ceilings[0]) else None
    return Series(curve.line, x, band, points, constants, tuple(missing), ceiling)


def _point(x: float, run: Run, rows: Rows, seeds: Sequence[int]) -> Point:
    key = run.key
    known = [row for seed in seeds if (row := rows.get((key, seed))) is not None]
    results = tuple(row.result for row in known if row.result is not None)
    reasons = Counter(row.reason for row in known if row.reason is not None)
    texts = [f"{x:,.10g}: {n} of {len(seeds)} seeds: {reason}" for reason, n in reasons.items()]
    return Point(x, run, results, "; ".join(texts))


def merge_constants(constants: Sequence[dict[str, Constant]]) -> dict[str, str]:
    """Returns a curve's constants by name. Values that differ are listed in the points' order."""
    names = dict.fromkeys(name for point in constants for name in point if name != "seed")
    texts = {name: [_text(point.get(name, "-")) for point in constants] for name in names}
    return {
        name: values[0] if len(set(values)) == 1 else " / ".join(values)
        for name, values in texts.items()
    }


def _text(value: Constant) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


X_LABELS = {
    "time": "episodes",
    "epsilon": "epsilon",
    "episodes": "K, episodes",
    "switches": "policy switches",
}
# The constants for which the caption has room. The table and the manifest have all of them.
CAPTION_CONSTANTS = (
    "name", "calibration", "families", "homogeneous", "noise", "noise_parameter", "bonus_scale",
    "noise_scale", "radius", "exploit_share", "eta", "scale", "count_noise", "loss_noise",
    "epsilon_given", "estimator",
)  # fmt: skip

MANY = 1_000  # switches
MOST_TICKS = 8  # each x gets a tick if there are at most so many values of x
NEXT_LINE = 1.3  # names beside points are at regrets that differ by at least this factor

# Curves of one colour differ by their markers.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


def draw(figure: Figure, series: Sequence[Series], seeds: Sequence[int], stem: Path) -> None:
    """Writes stem.png and stem.svg. Equal arguments give identical files."""
    import matplotlib as mpl  # noqa: PLC0415  (half a second, and only here)

    with mpl.rc_context({"svg.hashsalt": figure.name}):
        canvas = canvas_of(figure, series, seeds)
        _save_png(canvas, stem.with_suffix(".png"))
        canvas.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def canvas_of(figure: Figure, series: Sequence[Series], seeds: Sequence[int]) -> Canvas:
    """Returns the drawn figure. Panels of one environment share an axis of regret."""
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure as Blank  # noqa: PLC0415

    with mpl.rc_context({"font.size": 9}):
        canvas = Blank(figsize=(9.6, 6.0), layout="constrained")
        panels: dict[str, list[Series]] = {}
        for curve in series:
            panels.setdefault(curve.line.panel, []).append(curve)
        worlds = {str(point.run.environment) for curve in series for point in curve.points}
        every = canvas.subplots(1, len(panels), sharey=len(worlds) == 1, squeeze=False)[0]
        for axes, (panel, curves) in zip(every, panels.items(), strict=True):
            for number, curve in enumerate(curves):
                _draw_curve(axes, figure, curve, MARKERS[number % len(MARKERS)])
            _draw_ceilings(axes, figure, curves)
            _label(axes, figure, panel, known=any(curve.computed for curve in curves))
        note = f"{len(seeds)} seeds; band: {METHOD}" if len(seeds) > 1 else "1 seed, so no band"
        canvas.suptitle(f"{figure.title}\n{note}", fontsize=9)
        every[0].set_ylabel("cumulative regret")
        if figure.kind == "switches":
            _name_points(every[0])
        else:
            every[-1].legend(
                loc="upper left",
                bbox_to_anchor=(1.01, 1),
                fontsize=8,
                frameon=False,
                borderaxespad=0,
            )
        canvas.supxlabel(caption(figure, series), x=0.01, ha="left", fontsize=6.5, color="0.3")
    return canvas


def legend_label(curve: Series) -> str:
    """Returns a curve's name in its panel, with a note if the curve is missing."""
    label = curve.line.label.removesuffix(f"; {curve.line.panel}")
    return label + ("" if curve.computed else " (not computed, see the table)")


def caption(figure: Figure, series: Sequence[Series]) -> str:
    """Returns the figure's note, the constants that all curves share, and each curve's own ones."""
    values = {
        name: {curve.constants[name] for curve in series if name in curve.constants}
        for name in CAPTION_CONSTANTS
    }
    shared = {name: next(iter(seen)) for name, seen in values.items() if len(seen) == 1}
    parts = [("Every curve that has them", shared)]
    for curve in series:
        own = [name for name in values if name in curve.constants and name not in shared]
        parts.append((legend_label(curve), {name: curve.constants[name] for name in own}))
    sentences = [
        f"{label}: " + ", ".join(f"{name}={value}" for name, value in constants.items()) + "."
        for label, constants in parts
        if constants
    ]
    sentences += [f"{legend_label(curve)}." for curve in series if not curve.computed]
    # Panels have the same lines, and so the same sentences.
    paragraphs = filter(None, (figure.note, " ".join(dict.fromkeys(sentences))))
    return "\n".join(textwrap.fill(text, 175, break_on_hyphens=False) for text in paragraphs)


def _draw_curve(axes: Axes, figure: Figure, curve: Series, marker: str) -> None:
    style: dict[str, Any] = {
        "color": f"C{curve.line.colour}",
        "linestyle": curve.line.dashes,
        "label": legend_label(curve),
    }
    if not curve.computed:
        axes.plot([], [], **style | {"linestyle": "none"})
    elif figure.kind == "switches":
        _draw_trade_off(axes, curve, style | {"marker": marker})
    else:
        shown = "" if figure.kind == "time" else marker
        axes.plot(curve.x, curve.band.mean, marker=shown, markersize=4, **style)
        low, high = curve.band.low, curve.band.high
        axes.fill_between(curve.x, low, high, alpha=0.2, color=style["color"], lw=0)


def _draw_trade_off(axes: Axes, curve: Series, style: dict[str, Any]) -> None:
    for point in curve.computed:
        if (switches := point.switches) is None:
            continue
        regret = point.regret
        axes.errorbar(
            # A log axis cannot show zero, so a run that never switches is drawn at one half.
            max(float(switches.mean), 0.5),
            regret.mean,
            yerr=regret.high - regret.mean,
            capsize=3,
            **style | {"linestyle": "none"},
        )


def _name_points(axes: Axes) -> None:
    """Writes names beside the points: on the right below `MANY` switches, otherwise on the left."""
    if not (points := [(*bar[0].get_xydata()[0], bar) for bar in axes.containers]):
        axes.set(xscale="linear", yscale="linear")  # logarithms need a number
        return
    axes.set_ylim(min(y for _, y, _ in points) / 1.5, 2 * max(y for _, y, _ in points))
    for few in (True, False):
        at = 0.0
        for x, y, bar in sorted((p for p in points if (p[0] < MANY) == few), key=lambda p: p[1]):
            at = max(y, at * NEXT_LINE)
            axes.annotate(
                bar.get_label(),
                (x, y),
                (x * 1.15 if few else x / 1.15, at),
                color=bar[0].get_color(),
                ha="left" if few else "right",
                va="center",
                fontsize=8,
            )


def _draw_ceilings(axes: Axes, figure: Figure, series: Sequence[Series]) -> None:
    """Draws V* K, which no regret exceeds. Curves of different K have different ceilings."""
    known = {curve.ceiling: curve for curve in series if curve.ceiling is not None}
    for number, (ceiling, curve) in enumerate(known.items()):
        style: dict[str, Any] = {"color": "black", "linestyle": (0, (1, 2 + 3 * number)), "lw": 0.8}
        style["label"] = "ceiling, V* K"
        if figure.kind == "time":
            axes.plot([0, curve.x[-1]], [0, ceiling], **style)
            axes.set_ylim(0, 1.1 * ceiling)
            return
        if figure.kind == "episodes":
            K = np.array(sorted({point.x for curve in series for point in curve.points}))
            axes.plot(K, ceiling / curve.x[0] * K, **style)
            return
        style["label"] += f" for K = {curve.computed[0].run.K:,}" if len(known) > 1 else ""
        axes.axhline(ceiling, **style)


def _label(axes: Axes, figure: Figure, panel: str, *, known: bool) -> None:
    if figure.kind != "time" and known:  # logarithms need a number
        axes.set_xscale("log")
        axes.set_yscale("log")
    shown = sorted({x for curve in figure.curves for x in curve.x})
    if figure.kind in {"epsilon", "episodes"} and len(shown) <= MOST_TICKS:
        axes.set_xticks(shown, [f"{x:,.10g}" for x in shown])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(X_LABELS[figure.kind])
    axes.set_title(panel, fontsize=9)


def _save_png(canvas: Canvas, file: Path) -> None:
    """Saves a PNG with a palette of 256 colours, which halves its size."""
    from PIL import Image  # noqa: PLC0415  (matplotlib brings it)

    buffer = io.BytesIO()
    canvas.savefig(buffer, dpi=100)
    Image.open(buffer).convert("RGB").quantize(256).save(file, optimize=True)
