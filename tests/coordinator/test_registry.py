"""Learners by name: built in, and offered by other packages."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest

from common.errors import RemoteError
from coordinator.registry import GROUP, Registry, problem
from tests.coordinator.world import Tiny, spec


def test_another_packages_learner_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = EntryPoint("outside", "tests.coordinator.world:tiny", GROUP)
    monkeypatch.setattr("coordinator.registry.entry_points", lambda group: [offered])
    registry = Registry()
    assert registry.names == ["manual", "outside", "pe", "sdp-pe", "sdp-pe-conference"]
    assert isinstance(registry.build(spec(learner="outside")), Tiny)
    with pytest.raises(RemoteError, match="no option 'size'"):
        registry.build(spec(learner="outside", options={"size": 1}))


def test_an_unknown_learner_is_told_which_are_known() -> None:
    with pytest.raises(RemoteError, match="known are manual, pe, sdp-pe, sdp-pe-conference"):
        Registry().build(spec(learner="nobody"))


def test_a_learner_is_told_the_problem() -> None:
    told = problem(spec(start=(0.25, 0.75), seed=3))
    assert np.array_equal(told.d1, [0.25, 0.75])
    assert np.array_equal(problem(spec()).d1, [1.0, 0.0])
    assert (told.K, told.epsilon, told.beta, told.seed) == (40, 4.0, 0.01, 3)
