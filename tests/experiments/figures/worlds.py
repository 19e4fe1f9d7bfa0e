"""A small figure: every kind of curve, with one that cannot be computed."""

from dataclasses import replace
from pathlib import Path

from riffle.experiments.figures.catalogue import LINES, RIVERSWIM, Curve, Figure, Line
from riffle.experiments.figures.write import Order
from riffle.experiments.sweep import Backend, Run

K = 300
HERE = Backend(workers=1)
LINE = {line.label: line for line in LINES}
SHOWN = ("UCBVI, not private", "UCBVI-JDP", "PE, not private", "SDP-PE, papers' noise")


def run_of(line: Line, epsilon: float = 1.0) -> Run:
    return line.run(RIVERSWIM, K, epsilon)


def small_figure(name: str = "small") -> Figure:
    curves = tuple(Curve(LINE[label], (run_of(LINE[label]),), (float(K),)) for label in SHOWN)
    return Figure(name, "RiverSwim, K = 300", "time", curves)


def order(folder: Path, figure: Figure | None = None, *, seeds: int = 2) -> Order:
    return Order((figure or small_figure(),), range(seeds), folder, HERE)


def forced(order: Order) -> Order:
    return replace(order, force=True)
