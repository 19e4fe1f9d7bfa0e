"""Headers of a peer's answers."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from riffle.common.protocol.errors import LONGEST_WAIT_SECONDS, parse_retry_after


def test_the_retry_after_header_is_parsed() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert parse_retry_after(None, now) == 0
    assert parse_retry_after("12", now) == 12
    assert parse_retry_after("-3", now) == 0
    assert parse_retry_after("soon", now) == 0
    assert parse_retry_after("999999999", now) == LONGEST_WAIT_SECONDS
    assert parse_retry_after("9" * 400, now) == LONGEST_WAIT_SECONDS  # beyond any float
    assert parse_retry_after(format_datetime(now + timedelta(seconds=30), usegmt=True), now) == 30
    assert parse_retry_after("Thu, 01 Jan 2026 00:00:30", now) == 0  # a date without a zone
