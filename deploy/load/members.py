"""Enrolment of a generator's nodes, many at a time, and their revocation when it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import httpx

from riffle.common.errors import LocalError
from riffle.common.wire import EnrolRequest
from riffle.deploy.network import (
    SHUFFLER_TOKEN_FILE,
    async_operator_client,
    enrolled,
    operator_token,
    refusal,
)
from riffle.node_client.settings import Credential

AT_ONCE = 16
USERS = 1 << 40

A = TypeVar("A")
T = TypeVar("T")


def enrol_members(
    secrets: Path, url: str, count: int, on_node: Callable[[], None]
) -> list[Credential]:
    """Credentials of ``count`` new nodes; they are kept nowhere. ``on_node`` is called after each.

    Raises:
        RemoteError: the shuffler refused.
        LocalError: ``unavailable``, it does not answer.
    """

    async def one(client: httpx.AsyncClient, number: int) -> Credential:
        request = EnrolRequest(name=f"load-{number + 1}", users=USERS)
        made = enrolled(await client.post("/v1/nodes", content=request.model_dump_json()))
        on_node()
        return Credential(node_id=made.node_id, token=made.token)

    return _each(secrets, url, range(count), one)


def revoke_members(secrets: Path, url: str, members: list[Credential]) -> None:
    """Refuse these nodes from now on. Raises as `enrol_members` does."""

    async def one(client: httpx.AsyncClient, member: Credential) -> None:
        answer = await client.delete(f"/v1/nodes/{member.node_id}")
        if answer.is_error:
            raise refusal(answer, "the shuffler")

    _each(secrets, url, members, one)


def _each(
    secrets: Path,
    url: str,
    arguments: Iterable[A],
    one: Callable[[httpx.AsyncClient, A], Awaitable[T]],
) -> list[T]:
    """Ask for each, `AT_ONCE` at a time, as the shuffler's operator."""
    token = operator_token(secrets, SHUFFLER_TOKEN_FILE)

    async def all_of_them() -> list[T]:
        room = asyncio.Semaphore(AT_ONCE)
        async with async_operator_client(secrets, url, token) as client:

            async def in_turn(argument: A) -> T:
                async with room:
                    return await one(client, argument)

            return list(await asyncio.gather(*map(in_turn, arguments)))

    try:
        return asyncio.run(all_of_them())
    except httpx.HTTPError as error:
        raise LocalError("unavailable", f"the shuffler does not answer: {error}") from error
