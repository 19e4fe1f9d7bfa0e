"""The authenticator: which tokens are valid, and what guesses cost other callers."""

from contextlib import suppress

import pytest

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit

WIDE = RateLimit(requests=1_000.0, reports=1.0, at_once=100)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def authenticator(failures: FailedAttempts) -> Authenticator:
    credentials = {name: Credential(hash_token(name), WIDE) for name in ("one", "two")}
    return Authenticator(failures, credentials)


def test_a_caller_is_recognized_by_its_token_where_the_route_admits_it() -> None:
    callers = authenticator(FailedAttempts())
    with callers.authenticate("two", "one", "two") as name:
        assert name == "two"
    for names in (("one",), ("metrics",), ()):
        with (
            pytest.raises(RemoteError, match="not valid here"),
            callers.authenticate("two", *names),
        ):
            pass


def test_the_refusal_of_a_token_names_the_file_of_the_right_one() -> None:
    keys = {name: Credential(hash_token(name), WIDE, f"operator/{name}") for name in ("one", "two")}
    message = "the network's folder has the right one in operator/one or operator/two"
    callers = Authenticator(FailedAttempts(), keys)
    with pytest.raises(RemoteError, match=message), callers.authenticate("x", "one", "two"):
        pass


def test_guesses_are_limited_and_never_keep_out_a_known_caller() -> None:
    clock = Clock()
    callers = authenticator(FailedAttempts(1.0, clock))
    with callers.authenticate("one", "one"):
        pass
    for _ in range(10):
        with pytest.raises(RemoteError), callers.authenticate("guess", "one"):
            pass
    for unknown in ("guess", "two"):
        with (
            pytest.raises(LocalError, match="not valid") as caught,
            callers.authenticate(unknown, "two"),
        ):
            pass
        assert (caught.value.slug, caught.value.retry_after) == ("too-many-requests", 1)
    with callers.authenticate("one", "one"):
        pass
    clock.now = 1.0
    for _ in range(20):
        with callers.authenticate("two", "two"):
            pass


def test_a_revoked_token_counts_as_unknown() -> None:
    failures = FailedAttempts(0.1, Clock())
    with failures.attempt("node"):
        pass
    with pytest.raises(RemoteError), failures.attempt("node"):
        raise RemoteError("unauthorized", "revoked")
    with pytest.raises(RemoteError), failures.attempt("node"):
        raise RemoteError("unauthorized", "revoked")
    with pytest.raises(LocalError), failures.attempt("node"):
        raise AssertionError


def test_errors_that_are_not_about_the_token_cost_nothing() -> None:
    failures = FailedAttempts(0.1, Clock())
    for _ in range(3):
        with pytest.raises(LocalError, match="store"), failures.attempt("node"):
            raise LocalError("unavailable", "the store cannot be read")


def admitted(callers: Authenticator) -> int:
    """Returns how many guesses pass before one is told to come back."""
    for count in range(1_000):
        try:
            with callers.authenticate("guess", "one"):
                pass
        except RemoteError:
            continue
        except LocalError:
            return count
    raise AssertionError("guesses are not limited")


@pytest.mark.parametrize("before", [0, 4, 10])
def test_no_valid_token_makes_room_for_more_guesses(before: int) -> None:
    """Neither a known caller's nor a new one's, nor a check that fails for another reason."""
    callers = authenticator(FailedAttempts(1.0, Clock()))
    with callers.authenticate("one", "one"):
        pass
    for _ in range(before):
        with pytest.raises(RemoteError), callers.authenticate("guess", "one"):
            pass
    for _ in range(5):
        with callers.authenticate("one", "one"):
            pass
        with suppress(LocalError), callers.authenticate("two", "two"):
            pass
        with pytest.raises(LocalError), callers.failures.attempt("new"):
            raise LocalError("unavailable", "the store cannot be read")
    assert admitted(callers) == 10 - before
