"""Learners by name: built in, and offered by other packages."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.learners.own import ExternalLearner
from riffle.coordinator.learners.registry import BUILT_IN, GROUP, Registry, problem
from riffle.coordinator.specs import RunSpec
from tests.coordinator.learner import Tiny
from tests.coordinator.world import spec


def test_another_packages_learner_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = EntryPoint("outside", "tests.coordinator.learner:Tiny", GROUP)
    monkeypatch.setattr("riffle.common.process.plugins.entry_points", lambda group: [offered])
    registry = Registry()
    assert set(registry.names) == {*BUILT_IN, "outside"}
    built = registry.build(spec(learner="outside"))
    assert isinstance(built, ExternalLearner)
    assert isinstance(built.learner, Tiny)
    with pytest.raises(RemoteError, match="no option 'size'; known are none"):
        registry.build(spec(learner="outside", options={"size": 1}))


def test_a_learner_in_a_file_has_a_name_and_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.coordinator.learner import Tiny\n"
        "def make(problem, *, share=0.5):\n"
        "    made = Tiny(problem)\n"
        "    made.told = (problem.K, share)\n"
        "    return made\n"
    )
    registry = Registry(files={"mine": f"{file}:make"})
    assert "mine" in registry.names
    built: Any = registry.build(spec(learner="mine", options={"share": 0.1}))
    assert built.learner.told == (40, 0.1)
    with pytest.raises(RemoteError, match="no option 'shar'; did you mean 'share'"):
        registry.build(spec(learner="mine", options={"shar": 0.1}))
    with pytest.raises(LocalError, match="'sdp-pe' is the name of another"):
        Registry(files={"sdp-pe": f"{file}:make"})


@pytest.mark.parametrize("name", ["mine.py:make", "/a/mine.py:make", "../mine", "mine:make"])
def test_a_request_cannot_name_a_file(name: str) -> None:
    with pytest.raises(ValidationError, match="learner"):
        spec(learner=name)


def test_an_unknown_learner_is_told_which_are_known() -> None:
    with pytest.raises(RemoteError, match="known are manual, pe, sdp-pe, sdp-pe-conference"):
        Registry().build(spec(learner="nobody"))
    with pytest.raises(RemoteError, match="did you mean 'sdp-pe'"):
        Registry().build(spec(learner="sdp-p"))


LAKE = {"states": 17, "actions": 4, "horizon": 20, "epsilon": 1.0}
RIVER = {"states": 4, "actions": 2, "horizon": 6}
PAPER = {**RIVER, "constants": "paper", "epsilon": 1.0}


def too_small(**asked: Any) -> tuple[RunSpec, str]:
    """A refused run and the words of its refusal."""
    refused = spec(**{"learner": "sdp-pe", "beta": 1e-5, "max_messages": 4096} | asked)
    with pytest.raises(RemoteError) as caught:
        Registry().build(refused)
    assert caught.value.slug == "batch-too-small"
    return refused, caught.value.detail


@pytest.mark.parametrize(
    ("asked", "K"),
    [
        (LAKE, 10_000),  # Gymnasium's frozen lake with the defaults
        (RIVER | {"epsilon": 0.1}, 300),
        (RIVER | {"epsilon": 0.01}, 300),
        (RIVER | {"epsilon": 0.05}, 1000),
        (RIVER | {"epsilon": 0.1, "learner": "sdp-pe-conference"}, 300),
        (LAKE | {"learner": "ucbvi-shuffle"}, 4_000),
    ],
)
def test_a_refusal_of_small_batches_names_a_sufficient_number_of_episodes(
    asked: dict[str, Any], K: int
) -> None:
    """Operators do not choose a batch's n; the number in the advice is accepted."""
    refused, detail = too_small(**asked, episodes=K)
    advice = re.search(
        r"; batches grow with the run's episodes: (\d+) episodes would be accepted$", detail
    )
    assert advice is not None, detail
    enough = int(advice[1])
    assert enough > K
    Registry().build(refused.model_copy(update={"episodes": enough}))


@pytest.mark.parametrize("K", [300, 1 << 40])
def test_a_refusal_names_no_number_of_episodes_if_none_is_found(K: int) -> None:
    """The papers' first stage is equally short for every K."""
    refused, detail = too_small(**PAPER, episodes=K)
    assert detail.endswith("; more episodes alone may not do: the option smallest_n makes "
                           "batches larger")  # fmt: skip
    larger = {"options": {"smallest_n": 40}, "episodes": 1000}
    Registry().build(refused.model_copy(update=larger))


def test_stages_that_do_not_grow_are_not_tried() -> None:
    _, detail = too_small(**PAPER, episodes=300, options={"growth": 1.0})
    assert "more episodes alone may not do" in detail


def test_a_learner_gets_the_problem() -> None:
    given = problem(spec(start=(0.25, 0.75), seed=3))
    assert np.array_equal(given.d1, [0.25, 0.75])
    assert np.array_equal(problem(spec()).d1, [1.0, 0.0])
    assert (given.K, given.epsilon, given.beta, given.seed) == (40, 4.0, 0.01, 3)
