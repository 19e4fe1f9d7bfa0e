"""Who may come in: callers known by the hash of their token, each within limits; strangers too.

A token that opens nothing costs a look at the store, or at nothing, and could be tried without end.
So all strangers together have one bucket. While it is empty, tokens that were valid before are
looked up as ever, and all others are told to come back: who guesses does not keep out who is known.
"""

import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from riffle.common.endpoint import hash_token
from riffle.common.errors import RemoteError
from riffle.common.limits import BURST_SECONDS, Allowance, Bucket, Callers, slower

STRANGERS = 100.0
"""Failed authentications a second, of all callers together; ten seconds' worth at once."""


@dataclass(frozen=True, slots=True)
class Key:
    """The hash of a caller's token, what it may ask for, and the file of the token in clear.

    ``file`` is that of ``riffle network init``, below the network's folder, to tell who is refused.
    """

    token_hash: str
    allowance: Allowance
    file: str = ""


class Strangers:
    """The bucket of failed authentications. ``clock`` returns seconds."""

    def __init__(
        self, rate: float = STRANGERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = Bucket(rate, BURST_SECONDS * rate)
        self._known: set[str] = set()  # hashes, of valid tokens only: as many as there are
        self._clock = clock

    @contextmanager
    def knock(self, token: str) -> Iterator[None]:
        """Around the check of a token, which raises ``unauthorized`` when it opens nothing.

        Raises:
            LocalError: ``too-many-requests``: the token was not looked at.
        """
        name = hash_token(token)
        stranger = name not in self._known
        if stranger and (after := self._bucket.take(1, self._clock())):
            raise slower("too many tokens that are not valid", after)
        try:
            yield
        except Exception as error:
            if isinstance(error, RemoteError) and error.slug == "unauthorized":
                self._known.discard(name)  # revoked: from now on a stranger's
            elif stranger:
                self._bucket.give(1)
            raise
        if stranger:
            self._bucket.give(1)
            self._known.add(name)


class Doors:
    """Callers whose tokens are in the settings, by name."""

    def __init__(self, strangers: Strangers, keys: Mapping[str, Key]) -> None:
        self._strangers = strangers
        self._keys = dict(keys)
        self._callers = {name: Callers(key.allowance) for name, key in keys.items()}

    @contextmanager
    def enter(self, token: str, *names: str) -> Iterator[str]:
        """Which of these callers it is, the first that fits, while its request lasts.

        Raises:
            RemoteError: ``unauthorized``, none of them.
            LocalError: ``too-many-requests``.
        """
        with self._strangers.knock(token):
            name = self._whose(hash_token(token), names)
        with self._callers[name].request(name, time.monotonic()):
            yield name

    def _whose(self, given: str, names: tuple[str, ...]) -> str:
        """Compared in constant time, with all of them."""
        known = [(name, self._keys[name].token_hash) for name in names if name in self._keys]
        found = [name for name, each in known if hmac.compare_digest(given, each)]
        if not found:
            files = " or ".join(self._keys[name].file for name, _ in known)
            hint = f"; the network's folder has the right one in {files}" if files else ""
            raise RemoteError("unauthorized", f"this token is not valid here{hint}")
        return found[0]
