"""Histograms: percentiles to 5 % and never too low; merging equals counting together."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.deploy.load.fleet import GROWTH, LEAST_SECONDS, Histogram, Tally, merge

latencies = st.lists(st.floats(1e-6, 100), min_size=1, max_size=60)


def recorded(seconds: list[float]) -> Histogram:
    histogram = Histogram()
    for latency in seconds:
        histogram.record(latency)
    return histogram


@given(latencies, st.floats(0.01, 1))
def test_a_quantile_is_the_exact_one_or_up_to_five_percent_more(
    seconds: list[float], share: float
) -> None:
    exact = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    quantile = recorded(seconds).quantile(share)
    assert exact <= quantile * (1 + 1e-9)
    assert quantile <= max(LEAST_SECONDS, exact) * GROWTH * (1 + 1e-9)


@given(latencies, latencies)
def test_merging_equals_counting_together(one: list[float], other: list[float]) -> None:
    both = recorded(one)
    both.add(recorded(other))
    together = recorded(one + other)
    assert both.buckets == together.buckets
    assert both.summary() == pytest.approx(together.summary())


def test_within_counts_latencies_that_were_short_enough() -> None:
    histogram = recorded([0.1, 0.5, 1.0, 3.0])
    assert [histogram.within(seconds) for seconds in (0.01, 0.6, 1.0, 9)] == [0, 2, 3, 4]


def test_an_empty_histogram_is_zero() -> None:
    assert Histogram().summary() == {"mean": 0, "p50": 0, "p95": 0, "p99": 0, "max": 0}


def test_tallies_of_processes_add_up() -> None:
    one, other = Tally(started=5, accepted=3, messages=30), Tally(started=2, accepted=1)
    one.rejected["late"] += 1
    other.answers["lease 429"] += 2
    other.stages["upload"].record(0.5)
    whole = merge([one, other])
    assert (whole.started, whole.accepted, whole.open, whole.messages) == (7, 4, 2, 30)
    assert whole.summary()["answers"] == {"lease 429": 2}
    assert whole.summary()["stages_ms"]["upload"]["max"] == 500
