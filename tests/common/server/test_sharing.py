import asyncio

from riffle.common.server.monitoring import Shared


def test_one_answer_for_many_until_its_key_changes() -> None:
    async def scenario() -> list[int]:
        reads, key = 0, 0

        async def read() -> int:
            nonlocal reads
            reads += 1
            await asyncio.sleep(0)
            return reads

        shared = Shared(read, lambda: key)
        first = await asyncio.gather(*(shared.get() for _ in range(10)))
        key = 1
        return [*first, await shared.get()]

    assert asyncio.run(scenario()) == [1] * 10 + [2]
