"""A figure as PNG and SVG: mean over seeds, shaded band, every curve's constants beside it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from riffle.experiments.bands import told
from riffle.experiments.figures.catalogue import Figure
from riffle.experiments.figures.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

X_LABELS = {
    "time": "episodes",
    "epsilon": "epsilon",
    "episodes": "K, episodes",
    "switches": "policy switches",
}
# What a legend has room for. The table and the manifest have all constants.
BESIDE = (
    "name", "calibration", "families", "homogeneous", "noise", "noise_parameter", "bonus_scale",
    "noise_scale", "radius", "exploit_share", "eta", "scale", "count_noise", "loss_noise",
    "epsilon_given",
)  # fmt: skip


def draw(figure: Figure, series: Sequence[Series], seeds: int, stem: Path) -> None:
    """Write stem.png and stem.svg; the same numbers give the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415  (half a second, and only here)
    from matplotlib.figure import Figure as Blank  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": figure.name, "font.size": 9}):
        canvas = Blank(figsize=(10.5, 5.6), layout="constrained")
        axes = canvas.add_subplot()
        for curve in series:
            _draw_curve(axes, figure, curve)
        _draw_ceiling(axes, figure, series)
        _label(axes, figure, seeds)
        _legend(axes, series)
        _save_png(canvas, stem.with_suffix(".png"))
        canvas.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def beside(curve: Series) -> str:
    """A curve's legend: its label and the constants that tell it from others."""
    if not curve.computed:
        return f"{curve.line.label}\n  not computed, see the table"
    known = [f"{name}={curve.constants[name]}" for name in BESIDE if name in curve.constants]
    return "\n  ".join([curve.line.label, *textwrap.wrap(", ".join(known), 66)])


def _draw_curve(axes: Axes, figure: Figure, curve: Series) -> None:
    style: dict[str, Any] = {
        "color": f"C{curve.line.colour}", "linestyle": curve.line.dashes, "label": beside(curve)
    }  # fmt: skip
    if not curve.computed:
        axes.plot([], [], **style | {"linestyle": "none"})
    elif figure.kind == "switches":
        _draw_trade_off(axes, curve, style)
    else:
        marker = "" if figure.kind == "time" else "o"
        axes.plot(curve.x, curve.band.mean, marker=marker, markersize=4, **style)
        low, high = curve.band.low, curve.band.high
        axes.fill_between(curve.x, low, high, alpha=0.2, color=style["color"], lw=0)


def _draw_trade_off(axes: Axes, curve: Series, style: dict[str, Any]) -> None:
    for point in curve.computed:
        if (switches := point.switches) is None:
            continue
        regret = point.regret
        axes.errorbar(
            # A run that never switches has no place on a log axis; it is shown at one half.
            max(float(switches.mean), 0.5),
            regret.mean,
            yerr=regret.high - regret.mean,
            marker="s" if curve.line.dashes == "--" else "o",
            capsize=3,
            **style | {"linestyle": "none"},
        )


def _draw_ceiling(axes: Axes, figure: Figure, series: Sequence[Series]) -> None:
    known = [curve.ceiling for curve in series if curve.ceiling is not None]
    if not known:
        return
    last = next(curve for curve in series if curve.ceiling is not None)
    style: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 0.8}
    if figure.kind == "time":
        axes.plot([0, last.x[-1]], [0, known[0]], label="ceiling, V* K", **style)
        axes.set_ylim(0, 1.1 * known[0])
    elif figure.kind == "episodes":
        K = np.array(sorted({point.x for curve in series for point in curve.points}))
        axes.plot(K, known[0] / last.x[0] * K, label="ceiling, V* K", **style)
    else:
        axes.axhline(known[0], label="ceiling, V* K", **style)


def _label(axes: Axes, figure: Figure, seeds: int) -> None:
    if figure.kind != "time":
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(X_LABELS[figure.kind])
    axes.set_ylabel("cumulative regret")
    axes.set_title(f"{figure.title}\n{told(seeds)}", fontsize=9)


def _legend(axes: Axes, series: Sequence[Series]) -> None:
    """Beside the axes, in the order of the curves; matplotlib's own would sort by kind of mark."""
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [label for curve in series if (label := beside(curve)) in shown]
    labels = [*order, *(label for label in shown if label not in order)]
    axes.legend(
        [shown[label] for label in labels],
        labels,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        fontsize=6.5,
        frameon=False,
        borderaxespad=0,
    )


def _save_png(canvas: Canvas, file: Path) -> None:
    """With a palette of 128 colours: a third of the size, and no eye sees it."""
    from PIL import Image  # noqa: PLC0415  (matplotlib brings it)

    buffer = io.BytesIO()
    canvas.savefig(buffer, dpi=100)
    Image.open(buffer).convert("RGB").quantize(128).save(file, optimize=True)
