"""The way of a batch through the REST interface."""

from tests.shuffler.conftest import Api
from tests.shuffler.world import multiset


def test_a_batch_goes_from_deposit_to_erasure(api: Api) -> None:
    batch = api.deposit(n=4)
    sent = api.fill(batch)
    assert api.status(batch)["state"] == "sealed"
    released = api.finish(batch)
    assert released != sent
    assert multiset(released) == multiset(sent)
