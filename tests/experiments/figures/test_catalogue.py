"""The figures have the papers' settings, and a run's key names its fields."""

from dataclasses import replace
from typing import get_args

import pytest

from riffle.experiments.adversaries import Adversary
from riffle.experiments.figures.catalogue import (
    ADVERSARIES,
    EPSILONS,
    Figure,
    figures,
)
from riffle.experiments.figures.write import select_figures
from riffle.experiments.study import NOT_PRIVATE
from riffle.experiments.sweep import Parameters, Run

FIGURES = figures()
NAMES = {"fig6a", "fig6b", "fig6c", "fig7", "fig8"}


def runs() -> list[Run]:
    return [run for figure in FIGURES.values() for run in figure.runs]


def test_the_papers_figures_are_there_at_their_k_and_beyond() -> None:
    assert NAMES | {f"{name}-large" for name in NAMES} <= FIGURES.keys()
    assert {run.K for name in NAMES for run in FIGURES[name].runs} == {20_000}
    assert {run.K for name in NAMES for run in FIGURES[f"{name}-large"].runs} == {200_000}
    assert {run.K for run in FIGURES["adversarial-full"].runs} == {2_000}
    assert {run.epsilon for run in FIGURES["fig6b"].runs} == {0.1, None}
    assert {run.epsilon for run in FIGURES["fig6a"].runs} == {*EPSILONS, None}
    assert dict(FIGURES["fig7"].runs[0].parameters) == {"actions": 20, "sigma": 0.1}


def test_only_private_runs_have_an_epsilon() -> None:
    for run in runs():
        private = run.learner not in NOT_PRIVATE and ("privacy", "none") not in run.options
        assert (run.epsilon is not None) == private


def test_runs_have_different_keys_unless_figures_share_them() -> None:
    different = set(runs())
    assert len({run.key for run in different}) == len(different)
    assert set(FIGURES["fig8"].runs) == set(FIGURES["fig6c"].runs) <= set(FIGURES["scale"].runs)
    run = FIGURES["fig6c"].runs[0]
    assert run.key != replace(run, K=run.K + 1).key
    assert run.key == replace(run).key


@pytest.mark.parametrize("figure", FIGURES.values(), ids=list(FIGURES))
def test_every_absent_point_has_a_reason(figure: Figure) -> None:
    points = {x for curve in figure.curves for x in curve.x}
    for curve in figure.curves:
        assert len(curve.runs) == len(curve.x)
        assert points == {*curve.x, *(x for x, reason in curve.absent if reason)}
    labels = [curve.line.label for curve in figure.curves]
    assert len(set(labels)) == len(labels)


def test_a_learner_has_the_same_constants_in_every_environment() -> None:
    """SDP-PE with more prior knowledge than others (homogeneous) is a curve of its own."""
    seen: dict[str, set[tuple[str, Parameters]]] = {}
    for figure in FIGURES.values():
        for curve in figure.curves:
            constants = {(run.constants, run.options) for run in curve.runs}
            label = f"{curve.runs[0].learner} {curve.line.label}"
            assert seen.setdefault(label, constants) == constants


def test_all_omits_only_figures_whose_note_says_so() -> None:
    left_out = set(FIGURES) - {figure.name for figure in select_figures("all", quick=False)}
    assert left_out == {"scale-large"}
    assert all("Not part of `all`" in FIGURES[name].note for name in left_out)
    assert max(run.K for name in set(FIGURES) - left_out for run in FIGURES[name].runs) == 200_000


def test_adversaries_are_compared_on_equal_terms() -> None:
    """Each adversary, exact noise and uniform play; runs shared with the other figure."""
    for name, lines in (("full", 4), ("bandit", 5)):
        runs = FIGURES[f"adversaries-{name}"].runs
        assert {dict(run.parameters)["adversary"] for run in runs} == {*ADVERSARIES}
        assert {*ADVERSARIES} < {*get_args(Adversary)}
        assert len(runs) == 3 * lines
        assert {run.calibration for run in runs} == {"exact"}
        assert len({*runs} & {*FIGURES[f"adversarial-{name}"].runs}) == lines


def test_quick_figures_are_the_same_figures_but_small() -> None:
    quick = figures(quick=True)
    assert list(quick) == list(FIGURES)
    assert max(run.K for figure in quick.values() for run in figure.runs) <= 40_000
    with pytest.raises(ValueError, match="known are fig6a"):
        select_figures("fig9", quick=True)
