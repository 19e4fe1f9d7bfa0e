"""An app that drives its users' episodes itself: one of three hints a day, for three days.

The settings are a node's, such as RIFFLE_NODE_USERS_KEY_FILE; RIFFLE_NODE_ENVIRONMENT=hints-v1 is
the environment of the run's spec. The spec's `episode_seconds` says how long the three days take.
"""

import asyncio
from collections.abc import Awaitable, Callable

from riffle import Participant, RiffleError, Sizes

HINTS = Sizes(X=2, A=3, H=3)
STUCK, WELL = 0, 1
Show = Callable[[str, int], Awaitable[bool]]
"""Shows a user a hint, in the app's own way, and returns whether the hint helped."""


async def guide(participant: Participant, user: str, show: Show) -> None:
    """Guides one user through the days that are left, also when called after a restart."""
    try:
        lease = await participant.lease(user)
    except RiffleError as error:  # the user took part before, or no batch is open
        print(error)
        return
    state = STUCK if lease.state is None else lease.state
    for day in range(lease.step, HINTS.H):
        hint = lease.act(day, state)
        helped = await show(user, hint)
        lease.record(day, state, hint, float(helped), WELL if helped else STUCK)
        state = WELL if helped else STUCK
    await lease.report()


async def main(users: list[str], show: Show) -> None:
    """Guides all users at once."""
    async with Participant(HINTS) as participant:
        await asyncio.gather(*(guide(participant, user, show) for user in users))
