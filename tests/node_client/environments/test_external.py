"""A mistake in an external environment is reported in one line, with its place."""

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.registry import make
from tests.examples.marks import MISTAKES, line_after

FOLDER = MISTAKES.parent


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", f": KeyError: 3 {line_after('def raises')}"),
        ("returns_a_dict", " returned a dict, which is no environment: it has no sizes, no reward"),
        ("returns_nothing", " returned a NoneType, which is no environment"),
        ("NativeWorld", "no reward_range, no absorbing; see GymnasiumEnvironment"),
        ("RaisingWorld", f": KeyError: 'reward_range' {line_after('class RaisingWorld')}"),
        ("tupled_sizes", ": its sizes must be Sizes(X, A, H)"),
        ("upside_down", ": its reward_range must be (low, high), numbers and low < high"),
        ("worded_range", ": its reward_range must be (low, high)"),
        ("wrong_end", ": its absorbing must be None or the last state, 2, not 3"),
        ("wrong_declaration", ": its declaration must be a Declaration, not True"),
        ("impossible_support", ": ValueError: support: next has 0 steps; it must have 1 or 3"),
        ("listed_support", ": its declaration's support: next: Input should be a valid tuple"),
        ("halved_support", ": its declaration's support: next.0.0.0.0: Input should be a valid in"),
        ("worded_steps", ": its declaration's homogeneous must be True, False or None, not 'no'"),
        ("wrong_model", ": its mdp must be a TabularMDP of Sizes(X=3, A=2, H=3)"),
    ],
)
def test_a_mistake_is_reported_with_its_line(name: str, says: str) -> None:
    with pytest.raises(LocalError) as caught:
        make(f"mistakes.py:{name}", folder=str(FOLDER))
    assert caught.value.slug == "invalid-spec"
    assert caught.value.detail.startswith(f"mistakes.py:{name}")
    assert says in caught.value.detail


def test_a_correct_environment_is_made() -> None:
    assert make("mistakes.py:World", folder=str(FOLDER)).absorbing is None
