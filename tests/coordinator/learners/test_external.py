"""Mistakes of external learners: one line that says what and where, however they are loaded."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riffle.common.protocol.errors import RemoteError
from riffle.coordinator.learners.registry import Registry, batches
from riffle.coordinator.learning.learner import Deployment, LearnerError
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.specs import RunSpec
from riffle.experiments.presets import Preset
from riffle.experiments.study import run_seed
from riffle.node_client.environments.registry import make
from tests.coordinator.calls import Api, problem
from tests.coordinator.faults import outcome
from tests.coordinator.learner import Tiny
from tests.coordinator.world import SMALL, FakeShuffler, parts, play, registry, run_to_end, spec
from tests.deploy.cli.calls import riffle
from tests.examples.marks import MISTAKES, line_after

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_learner.py"


def files(name: str) -> dict[str, str]:
    return {"mine": f"{EXAMPLE if name == 'ExploreThenCommit' else MISTAKES}:{name}"}


AT_ONCE = [
    ("NoNext", {}, "abstract method"),
    (
        "NoLearner",
        {},
        "a NoLearner is no learner, it has no next_deployment, no summary: make it a subclass of "
        "riffle.OwnLearner",
    ),
    ("Raises", {}, f"KeyError: 'deployment' {line_after('class Raises(')}"),
    (
        "RaisesInALibrary",
        {},
        f"LinAlgError: Singular matrix {line_after('class RaisesInALibrary(')}",
    ),
    ("ReturnsAPolicy", {}, "next_deployment returned ndarray, which is not a Deployment"),
    ("WrongN", {}, "n must be a positive int, not np.int64(5)"),
    ("WrongLayer", {}, "layer must be None, or an int in 0..1, not 2"),
    ("WrongPurpose", {}, "purpose must be one of crude, fine, exploit, manual, not 'try'"),
    ("WrongMixture", {}, "returned ndarray, which is not a Mixture"),
    ("WrongAction", {}, "an action outside 0..1"),
    (
        "ExploreThenCommit",
        {"share": 2.0},
        "cannot deploy 80 episodes; 40 of K are left (own_learner.py, line ",
    ),
    ("ExploreThenCommit", {"share": 0.0}, "cannot deploy 0 episodes"),
    (
        "ExploreThenCommit",
        {"share": "x"},
        "TypeError: type str doesn't define __round__ method (own_learner.py, line ",
    ),
]

LATER = [
    ("RaisesInObserve", f"IndexError: index 99 is out of bounds for axis 0 with size 2 "
     f"{line_after('class RaisesInObserve(')}"),
    ("ReturnsCounts", "observe returned BatchCounts, which is not a StageResult"),
    ("ForgetsToCount", "asks for 15 episodes where 10 of K are left: does observe count them"),
    ("ListedAnswer", "an array (2, 2) of integers (dtype=int), not a list"),
    ("WrongAnswer", "an array (2, 2) of integers (dtype=int), not float64"),
    ("UnsayableAnswer", "summary: LearnerSummary: "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "says"), AT_ONCE)
def test_a_mistake_is_reported_before_a_run_is_created(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        Registry(files=files(name)).build(spec(learner="mine", options=options))
    assert caught.value.slug == "invalid-spec"
    assert caught.value.detail.startswith("mine: ")
    assert says in caught.value.detail


@pytest.mark.parametrize(("name", "says"), LATER)
def test_a_mistake_later_fails_the_run_with_the_same_words(
    name: str, says: str, tmp_path: Path
) -> None:
    given = replace(parts(tmp_path, FakeShuffler()), registry=Registry(files=files(name)))
    run_to_end(given, spec(learner="mine"))
    result = outcome(tmp_path)
    state, message, _ = result["state"]
    assert state == "failed"
    assert message.startswith("mine: ")
    assert says in message
    assert result["ledger"], "what its users spent is recorded"
    assert all(batch == "counted" for batch, _, _ in result["states"])


@pytest.mark.parametrize(("name", "says"), LATER)
def test_the_simulator_reports_it_too(name: str, says: str) -> None:
    run_spec = riverswim(learner="mine")
    expected = says.replace("(2, 2)", "(3, 4)").replace("size 2", "size 3")
    with pytest.raises(RemoteError) as caught:
        run_seed(Preset(run_spec, {"horizon": 3}, learners=files(name)), 0)
    assert caught.value.detail.startswith("mine: ")
    assert expected in caught.value.detail


def test_a_policy_of_unsigned_integers_is_one(tmp_path: Path) -> None:
    given = replace(parts(tmp_path, FakeShuffler()), registry=Registry(files=files("Unsigned")))
    run_to_end(given, spec(learner="mine"))
    assert outcome(tmp_path)["state"][0] == "finished"


def test_the_command_ends_with_it() -> None:
    result = riffle("simulate", "--seeds", "1", "--learner", f"{MISTAKES}:RaisesInObserve")
    assert result.exit_code == 3
    assert result.stderr.startswith("riffle: mistakes: IndexError: index 99 is out of bounds")
    assert result.stderr.count("\n") == 1


def riverswim(**changes: Any) -> RunSpec:
    sizes = make("RiverSwim-v0", horizon=3).sizes
    fields = {"states": sizes.X, "actions": sizes.A, "horizon": sizes.H, "start": None}
    return spec(environment="RiverSwim-v0", **fields, **changes)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    brought = Registry(files=files("ExploreThenCommit"))
    monkeypatch.setattr("tests.coordinator.calls.registry", lambda: brought)
    with ExitStack() as stack:
        yield Api(tmp_path / "data", stack)


@pytest.mark.parametrize("share", [2.0, 0.0, "x"])
def test_a_request_with_a_wrong_option_is_refused(api: Api, share: object) -> None:
    answer = api.call("POST", "", json=SMALL | {"learner": "mine", "options": {"share": share}})
    status, slug, detail = problem(answer)
    assert (status, slug) == (422, "invalid-spec")
    assert detail.startswith("mine: ")
    assert api.get("")["runs"] == []


# -- learners of our own --------------------------------------------------------------------------


class Refusing(Tiny):
    """A built-in learner: its refusal is an answer, and is logged."""

    error: Exception = LearnerError("no policy is left")

    def next_deployment(self) -> Deployment | None:
        raise self.error


def test_a_built_in_learner_that_cannot_begin_is_logged_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Registry({"own": lambda given, preset, options: Refusing(given)})

    async def act(coordinator: Any) -> None:
        with pytest.raises(RemoteError, match="own: no policy is left") as caught:
            await coordinator.create(spec(learner="own"))
        assert caught.value.slug == "invalid-spec"

    with caplog.at_level(logging.INFO):
        play(replace(parts(tmp_path, FakeShuffler()), registry=own), act)
    assert '"learner-failed"' in caplog.text
    assert "test_external.py" in caplog.text


def test_a_bug_in_a_built_in_learner_is_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not blamed on the caller: 500, with its place in the log."""
    monkeypatch.setattr(Refusing, "error", ZeroDivisionError())
    own = Registry({"own": lambda given, preset, options: Refusing(given)})
    monkeypatch.setattr("tests.coordinator.calls.registry", lambda: own)
    with ExitStack() as stack:
        answer = Api(tmp_path / "data", stack).call("POST", "", json=SMALL | {"learner": "own"})
    assert problem(answer)[:2] == (500, "internal")


def test_a_learner_that_fails_later_is_logged_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choke(self: Tiny, counts: object) -> None:
        raise LearnerError("cannot learn from this")

    monkeypatch.setattr(Tiny, "observe", choke)
    with caplog.at_level(logging.INFO):
        run_to_end(replace(parts(tmp_path, FakeShuffler()), registry=registry()), spec())
    assert outcome(tmp_path)["state"][:2] == ("failed", "tiny: cannot learn from this")
    assert '"step-failed"' in caplog.text
    assert '"run-failed"' in caplog.text


def test_a_learner_that_extends_sdp_pe_is_known_as_such(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from riffle.coordinator.learning.sdp_pe.constants import PRACTICAL\n"
        "from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE\n"
        "class Mine(SDPPE):\n"
        "    def __init__(self, problem):\n"
        "        super().__init__(problem, PRACTICAL)\n"
    )
    run_spec = riverswim(learner="mine", episodes=1000)
    built: Any = Registry(files={"mine": f"{file}:Mine"}).build(run_spec)
    assert isinstance(built.learner, SDPPE)
    assert batches(built) == batches(built.learner) != set()
