"""Timing of reports: how many users may be asked, and which leases can still be met."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.protocol.wire import Lease
from riffle.node_client.pipeline import MOST_DOUBLINGS, Job, Rate, ReportTiming
from riffle.node_client.trust import accept
from tests.node_client import world

NOW, L = 1_000.0, 50


def leases(*ends: int) -> list[Lease]:
    return [
        Lease(user=f"{i:032x}", slot=i, lease=f"{i:032x}", expires_at=end)
        for i, end in enumerate(ends)
    ]


def timed(episode: float, sealing: float, lease_seconds: float = 120.0) -> ReportTiming:
    """Timing of episodes and of the rest of a report of L messages, in seconds."""
    timing = ReportTiming(lease_seconds, in_vain=0)
    timing.episodes.record(episode, 1)
    timing.messages.record(sealing, L)
    return timing


def test_nobody_is_asked_before_the_speed_is_known() -> None:
    timing = ReportTiming(120.0)
    assert timing.most_users(L, NOW) == 0
    timing.messages.record(0.1, L)
    assert timing.most_users(L, NOW) == 1, "until a report was accepted"
    timing.under_way = 1
    assert timing.most_users(L, NOW) == 0


def test_the_users_under_way_take_a_quarter_of_a_lease() -> None:
    assert timed(1.0, 0.0).most_users(L, NOW) == 30
    assert timed(0.5, 0.5).most_users(L, NOW) == 30
    assert timed(0.5, 0.5).most_users(3 * L, NOW) == 15
    assert timed(0.5, 0.5, 60).most_users(L, NOW) == 15
    assert timed(40.0, 40.0).most_users(L, NOW) == 1
    assert timed(0.0, 0.0).most_users(L, NOW) > 1_000
    assert timed(0.5, 0.5).most_users(L, NOW, left=60) == 15, "a lease ends with its batch"
    busy = timed(0.5, 0.5)
    busy.under_way = 20
    assert busy.most_users(L, NOW) == 10
    busy.under_way = 40
    assert busy.most_users(L, NOW) == 0


def test_a_report_that_takes_more_than_half_a_lease_is_too_slow() -> None:
    assert not timed(0.0, 60.0).is_too_slow(L)
    assert timed(0.0, 60.1).is_too_slow(L)
    assert timed(0.0, 30.1).is_too_slow(2 * L)
    assert timed(0.0, 60.1).most_users(L, NOW) == 0
    assert not timed(70.0, 1.0).is_too_slow(L), "a slow user says nothing about the next one"


def test_after_reports_in_vain_one_user_is_asked_after_a_pause_that_doubles() -> None:
    timing, now = timed(0.1, 0.1), NOW
    pauses = []
    for _ in range(MOST_DOUBLINGS + 3):
        timing.record_delivery(now, now, L, 0)
        assert timing.most_users(L, now) == 0
        pauses.append(timing.retry_at - now)
        now = timing.retry_at
        assert timing.most_users(L, now) == 1
    assert pauses[:3] == [2, 4, 8]
    assert pauses[-3:] == [4096] * 3
    timing.record_delivery(now, now, L, 1)
    assert timing.most_users(L, now) > 100


def test_only_leases_that_outlast_their_reports_are_kept() -> None:
    held = leases(999, 1_000, 1_002, 1_002, 1_015, 1_020, 1_025)
    assert ReportTiming().in_time(held, L, NOW) == held[2:], "no measurement, but some are over"
    # one after another, 5 seconds each: the kept ones end at 1005, 1010 and 1015
    assert timed(2.0, 3.0).in_time(held, L, NOW) == held[4:]
    behind = timed(2.0, 3.0)
    behind.under_way = 3
    assert behind.in_time(held, L, NOW) == held[5:6] + held[6:]


def test_a_chunk_is_not_charged_for_the_time_of_the_chunk_before_it() -> None:
    timing = ReportTiming(120.0)
    timing.record_delivery(0.0, 10.0, 100, 1)
    timing.record_delivery(1.0, 20.0, 100, 1)
    timing.record_delivery(50.0, 60.0, 100, 1)
    assert timing.messages.mean == pytest.approx(0.1)


def test_a_long_pause_of_a_single_report_is_soon_outweighed() -> None:
    rate = Rate()
    rate.record(300.0, 24)
    for _ in range(3):
        rate.record(1.0, 10_000)
    assert rate.mean < 0.01


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 99)), min_size=1, max_size=20))
def test_the_mean_stays_within_the_measurements(measured: list[tuple[float, int]]) -> None:
    rate = Rate()
    for seconds, things in measured:
        rate.record(seconds * things, things)
    seconds_each = [seconds for seconds, _ in measured]
    assert min(seconds_each) * 0.999 <= rate.mean <= max(seconds_each) * 1.001


def test_a_persons_time_lengthens_the_lease_but_not_the_time_for_sealing() -> None:
    timing = timed(154.0, 1.0)
    assert timing.most_users(L, NOW, 500, episode_seconds=300) == 1
    assert timing.most_users(L, NOW, 300, episode_seconds=300) == 0, "the batch ends before her"
    assert timed(0.5, 0.5).most_users(L, NOW, 10_000, 360) == 120, "a quarter of 480 seconds"
    assert timed(154.0, 60.1).is_too_slow(L)
    held = leases(1_300, 1_302)
    assert timed(0.5, 0.5).in_time(held, L, NOW, 300) == held[1:]


@pytest.mark.parametrize(
    ("episode_seconds", "left", "seconds"),
    [(None, 120, 60), (154, 274, 214), (154, 100, 154), (86_400, 86_520, 86_460)],
)
def test_an_episode_has_the_descriptors_time_and_a_share_of_the_rest(
    episode_seconds: int | None, left: float, seconds: float
) -> None:
    made = accept(
        world.signed(episode_seconds=episode_seconds),
        world.descriptor().batch_id,
        world.demands(),
        world.NOW,
    )
    assert Job.of(made).episode_time(left, 0.5) == seconds
