"""Frames and documents between the services."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.wire import Enrolment, LeaseRequest, frame, split_frames


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=9, max_size=9))))
def test_frames_come_back_in_order(pairs: list[tuple[bytes, bytes]]) -> None:
    body = b"".join(frame(lease.hex(), report) for lease, report in pairs)
    if not pairs:
        return
    leases, reports = split_frames(body, 9)
    assert leases == [lease.hex() for lease, _ in pairs]
    assert reports == [report for _, report in pairs]


@pytest.mark.parametrize("size", [0, 1, 24, 26, 49])
def test_a_torn_upload_is_refused_whole(size: int) -> None:
    with pytest.raises(RemoteError) as caught:
        split_frames(bytes(size), 9)
    assert caught.value.slug == "wrong-size"
    assert "25 bytes" in caught.value.detail


@pytest.mark.parametrize("users", [[], ["0" * 31], ["G" * 32], ["0" * 32] * 2_049, "0" * 32])
def test_lease_requests_are_bounded(users: object) -> None:
    with pytest.raises(ValidationError):
        LeaseRequest.model_validate_json(json.dumps({"users": users}))


def test_a_token_stays_out_of_the_repr() -> None:
    assert "sesame" not in repr(Enrolment(node_id="0" * 32, owner="me", token="sesame"))
