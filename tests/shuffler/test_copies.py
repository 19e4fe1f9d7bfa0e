"""Ciphertexts that occur twice in a batch: copies are worth nothing, whoever's they are."""

from tests.shuffler.conftest import Api
from tests.shuffler.world import user


def test_a_copied_ciphertext_is_handed_over_once(api: Api) -> None:
    """Copies of another user's messages would multiply what that user adds to the counts."""
    batch = api.deposit()
    victim, copier, same, other = api.leases(batch, [user(i) for i in range(4)])
    messages, own = batch.messages(), batch.messages()
    size = batch.context.descriptor.message_bytes
    mixed = messages[:size] + own[size:]  # one message copied, in a report of its own
    sealed = batch.report(own)
    api.outcomes(
        batch, [(victim.lease, batch.report(messages)), (copier.lease, batch.report(mixed))]
    )
    api.restart()
    assert api.outcomes(batch, [(same.lease, sealed), (other.lease, sealed)]) == ["accepted"] * 2
    first = api.messages(batch).content
    api.restart()
    assert api.messages(batch).content == first
    rows = batch.rows(first)
    L = batch.context.descriptor.padding.messages
    assert len(rows) == 4 * L
    assert sorted(row for row in rows if any(row)) == sorted({*batch.rows(messages + own)})
