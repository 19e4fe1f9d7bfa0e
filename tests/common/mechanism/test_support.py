"""Which transitions a declared support allows, and which declarations are refused."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from riffle.common.mechanism.counters import MAX_COUNTERS, Successors, Support, possible_cells
from riffle.node_client.environments.tabular import riverswim

RIVER: Successors = (((0,), (0, 1)), ((0,), (0, 1, 2)), ((1,), (1, 2)))
"""RiverSwim with three states, drawn from its picture."""


def cells(support: Support, X: int = 3, A: int = 2, H: int = 3) -> set[tuple[int, ...]]:
    found = np.unravel_index(possible_cells(support, X, A, H), (H, X, A, X))
    return {tuple(map(int, cell)) for cell in zip(*found, strict=True)}


def test_only_states_that_can_be_reached_have_transitions() -> None:
    first = {(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 1, 1)}
    second = {(1, x, a, y) for x in (0, 1) for a in (0, 1) for y in RIVER[x][a]}
    third = {(2, x, a, y) for x in (0, 1, 2) for a in (0, 1) for y in RIVER[x][a]}
    assert cells(Support((0,), (RIVER,))) == first | second | third
    assert cells(Support((0,), (RIVER,) * 3)) == first | second | third


def test_each_step_may_have_its_own_successors() -> None:
    swapped: Successors = (((1,),), ((0,),))
    mixed: Successors = (((0, 1),), ((1,),))
    expected = {(0, 0, 0, 1), (1, 1, 0, 1)}
    assert cells(Support((0,), (swapped, mixed)), X=2, A=1, H=2) == expected


def test_an_mdp_declares_what_its_table_allows() -> None:
    declared = riverswim(3, 3).declaration
    assert declared.support == Support((0,), (RIVER,))
    assert declared.homogeneous is True


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (Support((0,), (RIVER, RIVER)), "2 steps"),
        (Support((0,), (RIVER[:2],)), "3 states with 2 actions"),
        (Support((0,), ((RIVER[0][:1], *RIVER[1:]),)), "3 states with 2 actions"),
        (Support((0,), (((((0,), (1, 0)), *RIVER[1:])),)), "ascending"),
        (Support((0,), (((((0,), (1, 1)), *RIVER[1:])),)), "ascending"),
        (Support((0,), (((((0,), (3,)), *RIVER[1:])),)), "outside 0..2"),
        (Support((0,), (((((0,), (-1,)), *RIVER[1:])),)), "outside 0..2"),
        (Support((0,), (((((0,), (2**70,)), *RIVER[1:])),)), "outside 0..2"),
        (Support((), (RIVER,)), "start"),
        (Support((1, 0), (RIVER,)), "start"),
        (Support((5,), (RIVER,)), "outside 0..2"),
        (Support((0,), ((RIVER[0], ((0,), ()), RIVER[2]),)), "step 1 has a state and action"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(support: Support, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        possible_cells(support, 3, 2, 3)


def test_states_that_are_never_reached_need_no_successors() -> None:
    stay: Successors = (((0,),), ((),))
    assert cells(Support((0,), (stay,)), X=2, A=1, H=2) == {(0, 0, 0, 0), (1, 0, 0, 0)}


def test_a_small_document_cannot_ask_for_a_large_array() -> None:
    everywhere: Successors = ((tuple(range(200)),),) * 200
    with pytest.raises(ValueError, match=str(MAX_COUNTERS)):
        possible_cells(Support((0,), (everywhere,)), 200, 1, 1_000)


@pytest.mark.parametrize(
    "document",
    ['{"start": [0]}', '{"start": [0], "next": [], "more": 1}', '{"start": ["0"], "next": []}'],
)
def test_its_document_is_read_strictly(document: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Support).validate_json(document)
