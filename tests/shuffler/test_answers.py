"""Answers written by hand are those of their documents."""

from hypothesis import given
from hypothesis import strategies as st

from common.wire import Lease, LeaseReply, Refusal, UploadReply, UploadResult
from shuffler.answers import leased, uploaded

ids = st.integers(0, (1 << 128) - 1).map(lambda number: f"{number:032x}")
slugs = st.sampled_from(("accepted", "already-reported", "late", "wrong-key"))
numbers = st.integers(0, 1 << 40)


@given(
    st.lists(st.builds(Lease, ids, numbers, ids, numbers), max_size=3),
    st.lists(st.builds(Refusal, ids, slugs), max_size=3),
)
def test_the_answer_to_a_lease_request(leases: list[Lease], refused: list[Refusal]) -> None:
    reply = LeaseReply(leases=tuple(leases), refused=tuple(refused))
    assert leased(reply).decode() == reply.model_dump_json()


@given(st.lists(st.builds(UploadResult, ids, slugs), max_size=3))
def test_the_answer_to_an_upload(results: list[UploadResult]) -> None:
    reply = UploadReply(results=tuple(results))
    assert uploaded(reply).decode() == reply.model_dump_json()
