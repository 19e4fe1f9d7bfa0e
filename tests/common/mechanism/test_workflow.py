"""All three workflows: what is encoded and written is read and counted again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.mechanism.counters import CounterLayout, Episode, Families, Sizes
from riffle.common.mechanism.parameters import BatchNoise, Flips, Laplace, Noise, Padding, Trust
from riffle.common.mechanism.randomness import SystemRandomness
from riffle.common.mechanism.workflow import Symbols, count, debias, encode

RANDOMNESS = SystemRandomness()
NOISE: dict[Trust, tuple[BatchNoise, Padding]] = {
    "shuffle": (Noise(1, 1, 32), Padding(6, 40)),
    "local": (Flips(1), Padding(1, 0)),
    "central": (Laplace(1), Padding(1, 0)),
}
"""Noise so weak that a test that meets it fails once in a million runs."""


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_symbols_are_read_as_they_are_written(width: int, number: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, 256**width - 1), max_size=number * 4))
    rows = rows[: len(rows) // number * number]
    text = b"".join(value.to_bytes(width, "big") for value in rows)
    result = Symbols(number, width).read(text)
    assert result.shape == (len(rows) // number, number)
    assert result.ravel().tolist() == rows


@pytest.mark.parametrize("families", ["paper", "lean", "joint"])
@pytest.mark.parametrize("trust", ["shuffle", "local", "central"])
def test_reports_count_as_their_episodes(trust: Trust, families: Families) -> None:
    layout = CounterLayout(Sizes(2, 2, 2), families)
    noise, padding = NOISE[trust]
    episode = Episode(np.array([0, 1, 0]), np.array([1, 0]), np.array([0, 1]))
    reports = [encode(layout, noise, padding, one, RANDOMNESS) for one in (episode, None, episode)]
    kind = Symbols.of(trust, layout)
    assert {report.size for report in reports} == {padding.messages * kind.count}
    symbols = np.concatenate(reports).reshape(-1, kind.count)
    histogram, failed = count(trust, layout, symbols)
    expected = np.zeros(layout.counters)
    expected[layout.encode(episode)] = 2
    assert failed.tolist() == []
    assert np.allclose(debias(noise, 3, histogram), expected, atol=1e-6)
    assert histogram[-1] == (symbols.size - expected.sum() if trust == "shuffle" else 3)
