"""Timing of episodes: which leases can still be met, and how many users fit in a lease."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.protocol.wire import Lease
from riffle.node_client.pipeline import EpisodeTiming

NOW = 1_000.0


def leases(*ends: int) -> list[Lease]:
    return [
        Lease(user=f"{i:032x}", slot=i, lease=f"{i:032x}", expires_at=end)
        for i, end in enumerate(ends)
    ]


def timed(seconds: float, lease_seconds: int = 120) -> EpisodeTiming:
    timing = EpisodeTiming()
    timing.record_leases(leases(int(NOW) + lease_seconds), NOW)
    timing.record_episodes(seconds, 1)
    return timing


def test_one_user_until_an_episode_was_measured() -> None:
    assert EpisodeTiming().most_users() == 1


def test_the_users_of_a_request_take_a_quarter_of_a_lease() -> None:
    assert timed(1.0).most_users() == 30
    assert timed(1.0, 60).most_users() == 15
    assert timed(100.0).most_users() == 1
    assert timed(0.0).most_users() > 1_000


def test_a_lease_that_ended_is_dropped_before_any_measurement() -> None:
    ended, now, later = leases(999, 1_000, 1_001)
    assert EpisodeTiming().in_time([ended, now, later], NOW) == [later]


def test_only_leases_that_outlast_their_episodes_are_kept() -> None:
    held = leases(1_002, 1_002, 1_015, 1_020, 1_025)
    # one after another, 5 seconds each: the kept ones end at 1005, 1010 and 1015
    assert timed(5.0).in_time(held, NOW) == held[2:]


def test_a_measurement_that_stops_everything_is_forgotten() -> None:
    timing = timed(5_000.0)
    held = leases(1_120, 1_120)
    assert timing.in_time(held, NOW) == []
    assert timing.most_users() == 1
    assert timing.in_time(held, NOW) == held


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=20))
def test_the_mean_stays_within_the_measurements(seconds: list[float]) -> None:
    timing = EpisodeTiming()
    for value in seconds:
        timing.record_episodes(3 * value, 3)
    assert timing.episode_seconds == pytest.approx(timing.episode_seconds)
    assert min(seconds) * 0.999 <= (timing.episode_seconds or 0) <= max(seconds) * 1.001
