"""Makes a failing list of operations shorter: what can be left out is left out."""

from collections.abc import Callable, Sequence

from tests.system.simulation.operations import Operation


def shrunk(
    operations: Sequence[Operation], fails: Callable[[list[Operation]], bool]
) -> list[Operation]:
    """A list that still fails, without any half, quarter, ... or single operation to spare."""
    kept = list(operations)
    size = max(1, len(kept) // 2)
    while size:
        start = 0
        while start < len(kept):
            shorter = kept[:start] + kept[start + size :]
            if fails(shorter):
                kept = shorter
            else:
                start += size
        size //= 2
    return kept
