"""Episodes are accounted for to the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.coordinator.learning.learner import LearnerError
from riffle.coordinator.learning.sdp_pe.constants import PAPER, PRACTICAL, Constants
from riffle.coordinator.learning.sdp_pe.schedule import schedule

sizes = st.tuples(st.integers(1, 200_000), st.integers(1, 20), st.integers(1, 40))


@given(
    case=sizes,
    first=st.integers(1, 5000),
    growth=st.floats(1.1, 4.0),
    exploit=st.floats(0, 0.9),
    base=st.sampled_from([PAPER, PRACTICAL]),
)
def test_stages_use_exactly_K_episodes_in_allowed_batches(
    case: tuple[int, int, int], first: int, growth: float, exploit: float, base: object
) -> None:
    K, H, smallest = case
    constants = replace(
        PAPER if base is PAPER else PRACTICAL,
        growth=growth,
        exploit_share=exploit,
        smallest_n=smallest,
    )
    if K - int(K * exploit) < (H + 1) * smallest:
        with pytest.raises(LearnerError, match="Raise K"):
            schedule(K, H, constants, first)
        return
    plan = schedule(K, H, constants, first)
    assert sum(stage.episodes for stage in plan.stages) + plan.exploit == K
    assert [stage.b for stage in plan.stages] == list(range(1, len(plan.stages) + 1))
    for stage in plan.stages:
        crude = H if stage.b == 1 or constants.crude_every_stage else 0
        assert len(stage.crude) == crude
        assert min([*stage.crude, stage.fine]) >= smallest


@pytest.mark.parametrize("base", [PAPER, PRACTICAL])
@pytest.mark.parametrize(("first", "growth"), [(0, 2.0), (2, 0.9), (2, float("nan"))])
def test_stages_that_never_fill_K_are_refused(base: Constants, first: int, growth: float) -> None:
    with pytest.raises(LearnerError, match="never fill K"):
        schedule(20_000, 6, replace(base, growth=growth), first)


def test_the_papers_stages_are_powers_of_two() -> None:
    plan = schedule(20_000, 1, PAPER, 2)
    lengths = [stage.L_b for stage in plan.stages]
    assert lengths[:-1] == [2**b for b in range(1, 12)]
    assert all(sum(stage.crude) == stage.L_b for stage in plan.stages)
    assert all(stage.fine == 2 * stage.L_b for stage in plan.stages[:-1])
    assert lengths[-1] == (20_000 - 3 * sum(lengths[:-1])) // 3


def test_small_crude_batches_are_rounded_up() -> None:
    first = schedule(20_000, 6, PAPER, 2).stages[0]
    assert (first.L_b, first.crude, first.fine) == (2, (1,) * 6, 4)


def test_too_few_remaining_episodes_join_the_stage_before() -> None:
    constants = replace(PAPER, smallest_n=10)
    plan = schedule(3 * 100 + 15, 4, constants, 100)
    assert len(plan.stages) == 1
    assert plan.stages[0].fine == 215


def test_filling_keeps_the_first_stage_and_raises_growth() -> None:
    plan = schedule(20_000, 6, replace(PRACTICAL, exploit_share=0.4, growth=2.0), 500)
    assert [stage.L_b for stage in plan.stages] == [500, 1096, 2404]
    assert plan.exploit == 8000


def test_only_the_first_stage_explores_crudely_when_configured() -> None:
    constants = replace(PRACTICAL, exploit_share=0.4, growth=2.0)
    first, *later = schedule(20_000, 6, constants, 500).stages
    assert sum(first.crude) == int(first.episodes * constants.crude_share)
    assert [stage.crude for stage in later] == [(), ()]
    assert [stage.fine for stage in later] == [3 * 1096, 20_000 - 8000 - 3 * 500 - 3 * 1096]
