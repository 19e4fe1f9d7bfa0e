"""Counters: their order, and the number of cells that one user can move."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.mechanism.counters import CounterLayout, Episode, Families, Sizes, Support
from riffle.node_client.environments.tabular import riverswim

FAMILIES: tuple[Families, ...] = ("paper", "lean", "joint")


@st.composite
def layouts(draw: st.DrawFn) -> CounterLayout:
    sizes = Sizes(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    layer = draw(st.one_of(st.none(), st.integers(0, sizes.H - 1)))
    support = draw(st.one_of(st.none(), supports(sizes)))
    return CounterLayout(sizes, draw(st.sampled_from(FAMILIES)), layer, support)


@st.composite
def supports(draw: st.DrawFn, sizes: Sizes) -> Support:
    states = st.sets(st.integers(0, sizes.X - 1), min_size=1).map(
        lambda chosen: tuple(sorted(chosen))
    )
    step = st.tuples(*[st.tuples(*[states] * sizes.A)] * sizes.X)
    steps = draw(st.sampled_from([1, sizes.H]))
    return Support(draw(states), draw(st.tuples(*[step] * steps)))


def draw_episode(draw: st.DrawFn, layout: CounterLayout) -> Episode:
    """An episode of any states or, with a support, of states that it allows."""
    sizes = layout.sizes

    def ints(bound: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        values = draw(st.lists(st.integers(0, bound - 1), min_size=length, max_size=length))
        return np.array(values, dtype=np.int64)

    H = sizes.H
    states, actions = ints(sizes.X, H + 1), ints(sizes.A, H)
    if (support := layout.support) is not None:
        states[0] = draw(st.sampled_from(support.start))
        for h in range(H):
            successors = support.next[h % len(support.next)][states[h]][actions[h]]
            states[h + 1] = draw(st.sampled_from(successors))
    return Episode(states, actions, ints(2, H))


@st.composite
def layouts_with_two_episodes(draw: st.DrawFn) -> tuple[CounterLayout, Episode, Episode]:
    layout = draw(layouts())
    return layout, draw_episode(draw, layout), draw_episode(draw, layout)


@pytest.mark.parametrize(
    ("families", "layer", "counters", "cells", "width"),
    [
        ("paper", None, 288, 18, 2),
        ("lean", None, 240, 12, 1),
        ("joint", None, 384, 6, 2),
        ("paper", 2, 40, 2, 1),
        ("lean", 2, 32, 1, 1),
        ("joint", 2, 32, 1, 1),
    ],
)
def test_sizes_of_the_papers_riverswim(
    families: Families, layer: int | None, counters: int, cells: int, width: int
) -> None:
    layout = CounterLayout(Sizes(4, 2, 6), families, layer)
    assert (layout.counters, layout.cells, layout.width) == (counters, cells, width)
    assert layout.dummy == counters


def test_two_bytes_end_at_65535() -> None:
    assert CounterLayout(Sizes(1, 65_535, 1), "lean", 0).width == 2
    assert CounterLayout(Sizes(1, 65_536, 1), "lean", 0).width == 3


def test_order_is_family_step_state_action_next_state() -> None:
    sizes = Sizes(2, 2, 2)
    episode = Episode(np.array([0, 1, 0]), np.array([1, 0]), np.array([0, 1]))
    transitions = [0 * 8 + 0 * 4 + 1 * 2 + 1, 1 * 8 + 1 * 4 + 0 * 2 + 0]
    visits = [16 + 0 * 4 + 0 * 2 + 1, 16 + 1 * 4 + 1 * 2 + 0]
    rewards = [24 + 1 * 4 + 1 * 2 + 0]
    paper = CounterLayout(sizes, "paper").encode(episode)
    assert paper.tolist() == transitions + visits + rewards
    joint = CounterLayout(sizes, "joint").encode(episode)
    assert joint.tolist() == [2 * transitions[0] + 0, 2 * transitions[1] + 1]


@given(layouts_with_two_episodes())
def test_replacing_one_user_moves_at_most_cells_up_and_cells_down(
    case: tuple[CounterLayout, Episode, Episode],
) -> None:
    """The sensitivity that the accountant composes (docs/privacy.md)."""
    layout, before, after = case
    change = np.bincount(layout.encode(after), minlength=layout.counters) - np.bincount(
        layout.encode(before), minlength=layout.counters
    )
    assert np.abs(change).max(initial=0) <= 1
    assert (change == 1).sum() <= layout.cells
    assert (change == -1).sum() <= layout.cells


@given(layouts_with_two_episodes())
def test_an_episode_fits_its_data_slots_and_counts_each_step_once(
    case: tuple[CounterLayout, Episode, Episode],
) -> None:
    layout, episode, _ = case
    messages = layout.encode(episode)
    assert messages.size <= layout.data_slots == layout.cells
    assert messages.min() >= 0
    assert messages.max() < layout.dummy
    blocks = layout.split(np.bincount(messages, minlength=layout.counters).astype(float))
    first = blocks["joint"] if "joint" in blocks else blocks["transitions"]
    assert first.reshape(layout.layers, -1).sum(1).tolist() == [1.0] * layout.layers
    if "rewards" in blocks:
        assert blocks["rewards"].sum() == episode.rewards.sum()


@given(layouts_with_two_episodes())
def test_a_support_leaves_out_only_what_cannot_be_counted(
    case: tuple[CounterLayout, Episode, Episode],
) -> None:
    """The counts are those of the layout without a support, and no counter stays at 0 always."""
    layout, episode, _ = case
    whole = replace(layout, support=None)
    every = whole.split(np.bincount(whole.encode(episode), minlength=whole.counters).astype(float))
    ours = layout.split(
        np.bincount(layout.encode(episode), minlength=layout.counters).astype(float)
    )
    for family, block in every.items():
        np.testing.assert_array_equal(ours[family], block)
    counted = layout.split(np.ones(layout.counters))
    first = counted["joint"][..., 0] if "joint" in counted else counted["transitions"]
    np.testing.assert_array_equal(first, layout.possible)
    numbers = layout.split(np.arange(layout.counters, dtype=np.float64))
    again = layout.join({family: block.astype(np.int64) for family, block in numbers.items()})
    np.testing.assert_array_equal(again, np.arange(layout.counters))


def test_riverswim_needs_a_third_of_its_counters() -> None:
    """3 possible transitions at step 0, 7, 11 and then 14, of 32: two counters each."""
    support = riverswim(4, 6).declaration.support
    layout = CounterLayout(Sizes(4, 2, 6), "joint", None, support)
    assert layout.counters == 2 * (3 + 7 + 11 + 3 * 14)
    assert CounterLayout(Sizes(4, 2, 6), "paper", 1, support).counters == 7 + 4


def test_an_episode_outside_the_support_has_no_encoding() -> None:
    support = riverswim(4, 6).declaration.support
    zeros = np.zeros(6, dtype=np.int64)
    for layer in (None, 0, 5):
        layout = CounterLayout(Sizes(4, 2, 6), "joint", layer, support)
        layout.encode(Episode(np.zeros(7, np.int64), zeros, zeros))
        for states in ([1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 2], [0, 0, 1, 0, 0, 0, 0]):
            with pytest.raises(ValueError, match="outside the declared support"):
                layout.encode(Episode(np.array(states), zeros, zeros))
    with pytest.raises(ValueError, match="outside the declared support"):
        layout.join({"transitions": np.ones((1, 4, 2, 4), np.int64)})


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("states", 2, 4, "state"),
        ("states", 0, -1, "state"),
        ("actions", 0, 2, "action"),
        ("rewards", 1, 2, "reward bit"),
    ],
)
def test_an_impossible_episode_is_refused(field: str, index: int, value: int, message: str) -> None:
    parts = {
        "states": np.zeros(7, dtype=np.int64),
        "actions": np.zeros(6, dtype=np.int64),
        "rewards": np.zeros(6, dtype=np.int64),
    }
    parts[field][index] = value
    with pytest.raises(ValueError, match=message):
        CounterLayout(Sizes(4, 2, 6), "joint").encode(Episode(**parts))


def test_an_episode_of_another_horizon_is_refused() -> None:
    zeros = np.zeros(5, dtype=np.int64)
    with pytest.raises(ValueError, match="horizon 6"):
        CounterLayout(Sizes(4, 2, 6), "joint").encode(Episode(np.zeros(6, np.int64), zeros, zeros))


def test_layer_and_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="layer 6"):
        CounterLayout(Sizes(4, 2, 6), "joint", 6)
    with pytest.raises(ValueError, match="actions is 0"):
        Sizes(4, 0, 6)


def test_an_episode_does_not_print_itself() -> None:
    zeros = np.zeros(6, dtype=np.int64)
    assert repr(Episode(np.zeros(7, np.int64), zeros, zeros)) == "Episode(private)"
