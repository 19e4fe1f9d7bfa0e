"""Who may come in: tokens, limits, and what guessing costs whom."""

import pytest

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.limits import Allowance, Doors, Key, Strangers

WIDE = Allowance(requests=1_000.0, reports=1.0, at_once=100)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def doors(strangers: Strangers) -> Doors:
    return Doors(strangers, {name: Key(hash_token(name), WIDE) for name in ("one", "two")})


def test_a_caller_is_known_by_its_token_where_it_is_asked_for() -> None:
    made = doors(Strangers())
    with made.enter("two", "one", "two") as who:
        assert who == "two"
    for names in (("one",), ("metrics",), ()):
        with pytest.raises(RemoteError, match="not valid here"), made.enter("two", *names):
            pass


def test_a_wrong_token_is_told_where_the_right_one_is() -> None:
    keys = {name: Key(hash_token(name), WIDE, f"operator/{name}") for name in ("one", "two")}
    says = "the network's folder has the right one in operator/one or operator/two"
    with pytest.raises(RemoteError, match=says), Doors(Strangers(), keys).enter("x", "one", "two"):
        pass


def test_guesses_are_bounded_and_keep_out_nobody_who_is_known() -> None:
    clock = Clock()
    made = doors(Strangers(1.0, clock))
    with made.enter("one", "one"):
        pass
    for _ in range(10):
        with pytest.raises(RemoteError), made.enter("guess", "one"):
            pass
    for unknown in ("guess", "two"):
        with pytest.raises(LocalError, match="not valid") as caught, made.enter(unknown, "two"):
            pass
        assert (caught.value.slug, caught.value.retry_after) == ("too-many-requests", 1)
    with made.enter("one", "one"):
        pass
    clock.now = 1.0
    for _ in range(20):
        with made.enter("two", "two"):
            pass


def test_a_token_that_was_revoked_is_a_strangers() -> None:
    strangers = Strangers(0.1, Clock())
    with strangers.knock("node"):
        pass
    with pytest.raises(RemoteError), strangers.knock("node"):
        raise RemoteError("unauthorized", "revoked")
    with pytest.raises(RemoteError), strangers.knock("node"):
        raise RemoteError("unauthorized", "revoked")
    with pytest.raises(LocalError), strangers.knock("node"):
        raise AssertionError


def test_errors_that_are_not_about_the_token_cost_nothing() -> None:
    strangers = Strangers(0.1, Clock())
    for _ in range(3):
        with pytest.raises(LocalError, match="store"), strangers.knock("node"):
            raise LocalError("unavailable", "the store cannot be read")
