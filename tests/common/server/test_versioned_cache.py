import asyncio

from riffle.common.server.monitoring import VersionedCache


def test_the_value_is_read_once_for_each_version() -> None:
    async def scenario() -> list[int]:
        reads, version = 0, 0

        async def read() -> int:
            nonlocal reads
            reads += 1
            await asyncio.sleep(0)
            return reads

        cache = VersionedCache(read, lambda: version)
        first = await asyncio.gather(*(cache.get() for _ in range(10)))
        version = 1
        return [*first, await cache.get()]

    assert asyncio.run(scenario()) == [1] * 10 + [2]
