"""Readiness: trouble with disk or clock is reported before the service fails."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from riffle.common.server import monitoring
from riffle.common.server.monitoring import clock_skew, clock_trouble, disk_trouble

NOW = datetime(2027, 1, 15, 8, 0, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("date", "expected"),
    [
        ("Fri, 15 Jan 2027 08:00:10 GMT", 0.0),
        ("Fri, 15 Jan 2027 08:01:10 GMT", 60.0),
        ("Fri, 15 Jan 2027 07:00:10 GMT", -3_600.0),
        ("yesterday", None),
        ("", None),
        (None, None),
    ],
)
def test_clock_skew_from_a_date_header(date: str | None, expected: float | None) -> None:
    assert clock_skew(date, NOW) == expected


@pytest.mark.parametrize("ahead", [None, 0.0, 30.0, -30.0])
def test_a_small_skew_is_no_trouble(ahead: float | None) -> None:
    assert clock_trouble(ahead) is None


@pytest.mark.parametrize(("ahead", "message"), [(31.0, "31 s ahead"), (-3_600.0, "3600 s behind")])
def test_a_large_skew_is_reported(ahead: float, message: str) -> None:
    assert message in (clock_trouble(ahead) or "")


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_trouble(tmp_path) is None
    assert "cannot look" in (disk_trouble(tmp_path / "nowhere") or "")
    usage = SimpleNamespace(free=monitoring.LEAST_FREE_BYTES - 1)
    monkeypatch.setattr("riffle.common.server.monitoring.shutil.disk_usage", lambda _: usage)
    assert disk_trouble(tmp_path) == "less than 64 MiB are free for the data"
