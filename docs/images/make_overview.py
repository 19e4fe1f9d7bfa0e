"""Draws overview.png, the picture of README and of the documentation's first page.

Run it as `python docs/images/make_overview.py`; it needs matplotlib (`make extras`).
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

INK, SOFT, FILL = "#1f2a37", "#5b6775", "#f4f6f8"
COLOURS = ("#2f6fb0", "#c8752b", "#3d8a5f", "#8a5fa8")
ROLES = (
    (0.2, "Nodes", "run episodes,\nadd noise, seal", COLOURS[0]),
    (4.2, "Shuffler", "waits for n reports,\npermutes, erases", COLOURS[1]),
    (8.2, "Coordinator", "counts, learns,\nkeeps the ledger", COLOURS[2]),
)


def role(axes: Axes, left: float, name: str, work: str, colour: str) -> None:
    """Draws a service as a box with its name and what it does."""
    axes.add_patch(
        FancyBboxPatch(
            (left, 1.5), 2.4, 1.5, boxstyle="round,pad=0.02,rounding_size=0.12",
            facecolor=FILL, edgecolor=colour, linewidth=1.8,
        )
    )  # fmt: skip
    axes.text(left + 1.2, 2.66, name, ha="center", va="center", size=13, weight="bold", color=INK)
    axes.text(left + 1.2, 2.05, work, ha="center", va="center", size=10, color=SOFT)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draws an arrow between two boxes."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def messages(axes: Axes, left: float, *, linkable: bool) -> None:
    """Draws twelve sealed messages: in their users' colours if ``linkable``, else in grey."""
    for i in range(12):
        colour = COLOURS[i // 3] if linkable else "#9aa5b1"
        place = (left + 0.235 * (i % 6), 0.62 - 0.27 * (i // 6))
        axes.add_patch(Rectangle(place, 0.19, 0.19, facecolor=colour, edgecolor="none"))


def draw() -> Figure:
    """Returns the whole picture."""
    figure = Figure(figsize=(10.8, 3.2), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 10.8), ylim=(0.2, 3.15))
    axes.set_axis_off()
    for left, name, work, colour in ROLES:
        role(axes, left, name, work, colour)
    arrow(axes, (2.68, 2.05), (4.12, 2.05), INK)
    arrow(axes, (6.68, 2.05), (8.12, 2.05), INK)
    arrow(axes, (8.12, 2.6), (6.68, 2.6), SOFT)
    arrow(axes, (4.12, 2.6), (2.68, 2.6), SOFT)
    text: dict[str, Any] = {"ha": "center", "size": 9.5}
    axes.text(3.4, 1.78, "sealed reports", color=INK, va="center", **text)
    axes.text(7.4, 1.78, "permuted messages", color=INK, va="center", **text)
    axes.text(3.4, 2.84, "signed descriptor", color=SOFT, va="center", **text)
    axes.text(7.4, 2.84, "signed descriptor", color=SOFT, va="center", **text)
    messages(axes, 0.72, linkable=True)
    messages(axes, 4.72, linkable=False)
    axes.text(1.4, 1.02, "one report per user", color=SOFT, va="center", **text)
    axes.text(5.4, 1.02, "unlinkable messages", color=SOFT, va="center", **text)
    axes.text(9.4, 1.02, "noisy counts only", color=SOFT, va="center", **text)
    for i, height in enumerate((0.34, 0.2, 0.52, 0.28, 0.44, 0.15)):
        axes.add_patch(
            Rectangle((8.72 + 0.235 * i, 0.33), 0.19, height, facecolor=COLOURS[2], alpha=0.75)
        )
    return figure


if __name__ == "__main__":
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        draw().savefig(Path(__file__).with_name("overview.png"), dpi=120, facecolor="white")
