"""From names of figures to files: check, sweep, gather, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from riffle.common.plugins import no_such
from riffle.experiments.figures.catalogue import Figure, figures
from riffle.experiments.figures.rows import Row, Rows
from riffle.experiments.figures.series import gather
from riffle.experiments.figures.sweep import Backend, Job, sweep
from riffle.experiments.figures.write import refuse_finished, write

ALL = "all"


@dataclass(frozen=True, slots=True)
class Order:
    """What to make: figures, seeds 0..seeds-1, where to, on what; force: compute it all again."""

    figures: tuple[Figure, ...]
    seeds: int
    folder: Path
    backend: Backend
    force: bool = False

    @property
    def jobs(self) -> list[Job]:
        """Every (run, seed) once: figures share runs."""
        runs = dict.fromkeys(run for figure in self.figures for run in figure.runs)
        return [(run, seed) for run in runs for seed in range(self.seeds)]


def chosen(name: str, *, quick: bool) -> tuple[Figure, ...]:
    """The figure of a name, or those that `all` stands for.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    known = figures(quick=quick)
    if name == ALL:
        return tuple(figure for figure in known.values() if figure.in_all)
    if name not in known:
        raise ValueError(no_such("figure", name, (*known, ALL)))
    return (known[name],)


def make(
    order: Order, on_row: Callable[[Row], None], on_start: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Compute and write an order's figures; `on_start` is told how many jobs are left.

    Raises:
        LocalError: ``wrong-state``, finished figures or other code's results are in the folder.
    """
    if not order.force:
        refuse_finished((figure.name for figure in order.figures), order.folder)
    order.folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(order.folder / "rows.jsonl")
    wanted = {(run.key, seed) for run, seed in order.jobs}
    if order.force:
        rows.forget(wanted)
    on_start(sum(rows.get(identity) is None for identity in wanted))
    started = time.perf_counter()
    sweep(order.jobs, rows, order.backend, on_row)
    about = {"backend": asdict(order.backend), "sweep_seconds": time.perf_counter() - started}
    return _written(order.figures, rows, order, about)


def _written(
    asked: Sequence[Figure], rows: Rows, order: Order, about: dict[str, Any]
) -> list[dict[str, Any]]:
    return [
        write(figure, gather(figure, rows, order.seeds), order.seeds, order.folder, about)
        for figure in asked
    ]
