"""Conservation over both services: accepted = held + forwarded + dropped at the shuffler, and
opened + failed = n L = forwarded for every batch that was settled here.
"""

import asyncio
from collections.abc import Sequence

from riffle.common.errors import RiffleError
from riffle.common.wire import Conservation
from riffle.coordinator import views
from riffle.coordinator.records import DeploymentRecord, LedgerRecord
from riffle.coordinator.shuffler_api import Shuffler

AT_ONCE = 4
Found = Conservation | RiffleError


async def records(shuffler: Shuffler, rows: Sequence[DeploymentRecord]) -> list[Found]:
    """The shuffler's record of each deployment, or why there is none."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(batch_id: str) -> Found:
        async with room:
            try:
                return await shuffler.conservation(batch_id)
            except RiffleError as error:
                return error

    return list(await asyncio.gather(*(one(row.batch_id) for row in rows)))


def conservation_view(
    rows: Sequence[DeploymentRecord], spends: Sequence[LedgerRecord], found: Sequence[Found]
) -> views.ConservationView:
    """All batches of a run with their sums."""
    by_index = {spend.index: spend for spend in spends}
    batches = [
        _batch(row, by_index.get(row.index), record)
        for row, record in zip(rows, found, strict=True)
    ]
    flows = [one.shuffler.messages for one in batches if one.shuffler and one.shuffler.messages]
    known = [one.balanced for one in batches]
    return views.ConservationView(
        batches=batches,
        accepted=sum(flow.accepted for flow in flows),
        held=sum(flow.held for flow in flows),
        forwarded=sum(flow.forwarded for flow in flows),
        dropped=sum(flow.dropped for flow in flows),
        opened=sum(one.opened or 0 for one in batches),
        failed=sum(one.failed or 0 for one in batches),
        balanced=False if False in known else None if None in known else True,
    )


def _batch(
    row: DeploymentRecord, spend: LedgerRecord | None, found: Found
) -> views.BatchConservation:
    record = found if isinstance(found, Conservation) else None
    expected = row.n * row.descriptor.padding.messages
    return views.BatchConservation(
        deployment=row.index,
        batch_id=row.batch_id,
        state=row.state,
        n=row.n,
        expected=expected,
        opened=None if spend is None else spend.opened,
        failed=None if spend is None else spend.failed,
        shuffler=record,
        trouble=None if isinstance(found, Conservation) else found.detail,
        balanced=_balanced(expected, spend, record),
    )


def _balanced(
    expected: int, spend: LedgerRecord | None, record: Conservation | None
) -> bool | None:
    """Whether both sides add up and agree; None when the shuffler's is not known."""
    if spend is not None and spend.opened + spend.failed != expected:
        return False
    if record is None:
        return None
    handed_over = None if record.messages is None else record.messages.forwarded
    return record.balanced and (spend is None or handed_over == expected)
