"""The pure rules: deposits by vectors, leases and frames by table and property."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.mechanism.parameters import Guarantee
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.signatures import sign_deposit
from riffle.shuffler.rules import (
    Demands,
    Room,
    Standing,
    accept_deposit,
    closed_problem,
    coarse_slots,
    decide_lease,
    judge_frame,
    lowest_free,
)
from tests.shuffler.world import (
    BETA,
    COORDINATOR_KEY,
    EPSILON,
    NOW,
    descriptor_bytes,
    public,
    signature,
)

VECTORS = json.loads((Path(__file__).parent / "vectors" / "deposits.json").read_text())["vectors"]
DEMANDS = Demands(
    shuffler_id="shuffler-1",
    coordinator_key=public(COORDINATOR_KEY),
    guarantee=Guarantee(EPSILON, BETA, 0.0),
    trust_models=("shuffle",),
    smallest_n=2,
    test_entry=False,
    max_batch_bytes=1 << 30,
    max_batch_seconds=1 << 53,
)


def demands(owner: dict[str, Any]) -> Demands:
    wanted = replace(
        DEMANDS.guarantee, **{k: v for k, v in owner.items() if k in ("epsilon", "beta")}
    )
    if "dishonest_fraction" in owner:
        wanted = replace(wanted, dishonest_fraction=owner["dishonest_fraction"])
    names = {"smallest_n", "test_entry", "max_batch_bytes", "max_batch_seconds", "trust_models"}
    names |= {"max_owner_share", "max_report_bytes", "aggregations", "epoch_seconds"}
    names |= {"max_episode_seconds"}
    rest = {k: tuples(v) for k, v in owner.items() if k in names}
    return replace(DEMANDS, guarantee=wanted, **rest)


def signed(data: bytes, how: str) -> str | None:
    good = signature(data)
    return {
        "right": good,
        "none": None,
        "empty": "",
        "text": "signature",
        "flipped": f"{int(good[0], 16) ^ 1:x}" + good[1:],
        "stranger": sign_deposit(bytes(32), data),
        "other bytes": signature(data + b" "),
        "short": good[:-2],
    }[how]


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_deposits_follow_the_vectors(vector: dict[str, Any]) -> None:
    changes = {name: tuples(value) for name, value in vector.get("descriptor", {}).items()}
    data = descriptor_bytes(vector.get("n", 4), **changes)
    if "raw" in vector:
        data = json.dumps(json.loads(data) | vector["raw"]).encode()
    path = vector.get("path", json.loads(data)["batch_id"])
    name = signed(data, vector.get("signature", "right"))
    owner = demands(vector.get("owner", {}))
    if vector["expect"] is None:
        context = accept_deposit(data, name, path, owner, NOW)
        assert context.descriptor.batch_id == path
        return
    with pytest.raises(RemoteError) as caught:
        accept_deposit(data, name, path, owner, NOW)
    assert caught.value.slug == vector["expect"]


@pytest.mark.parametrize(
    "padding",
    [
        lambda data: data + b" " * 10_000,
        lambda data: data.replace(b",", b"," + b"\n" * 1_000),
        lambda data: b'{"version":1,' * 1 + b'"version":1,' * 1_000 + data[1:],
        lambda data: data.replace(b'"n":4', b'"n":4.' + b"0" * 10_000),
    ],
    ids=["after", "between", "names", "digits"],
)
def test_a_descriptor_is_not_much_longer_than_what_it_says(
    padding: Callable[[bytes], bytes],
) -> None:
    data = descriptor_bytes()
    longer = padding(data)
    assert len(longer) > 2 * len(data)
    with pytest.raises(RemoteError) as caught:
        accept_deposit(longer, signature(longer), json.loads(data)["batch_id"], DEMANDS, NOW)
    assert caught.value.slug == "malformed"


def test_a_third_of_the_vectors_must_fail() -> None:
    negative = [vector for vector in VECTORS if vector["expect"] is not None]
    assert 3 * len(negative) >= len(VECTORS)


@pytest.mark.parametrize(
    ("new", "barred", "room", "decision"),
    [
        (True, False, Room(quota=1, free_slots=1, share=1), "grant"),
        (False, False, Room(quota=0, free_slots=1, share=1), "grant"),
        (True, False, Room(quota=0, free_slots=1, share=1), "quota-exceeded"),
        (False, True, Room(quota=0, free_slots=1, share=1), "user-unavailable"),
    ],
)
def test_lease_decisions(new: bool, barred: bool, room: Room, decision: str) -> None:
    assert decide_lease(room, new=new, barred=barred) == decision


@pytest.mark.parametrize(("new", "barred"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(
    ("free", "share", "decision"),
    [(0, 0, "batch-full"), (0, 1, "batch-full"), (1, 0, "share-exceeded")],
)
def test_without_room_all_users_are_alike(
    new: bool, barred: bool, free: int, share: int, decision: str
) -> None:
    room = Room(quota=0, free_slots=free, share=share)
    assert decide_lease(room, new=new, barred=barred) == decision


@given(st.integers(1, 10_000), st.data())
def test_free_slots_in_steps(n: int, data: st.DataObject) -> None:
    free = data.draw(st.integers(0, n))
    told = coarse_slots(free, n)
    assert free <= told <= n
    assert (told == 0) == (free == 0)
    assert told in (n, *range(0, n, -(-n // 10))) if n >= 100 else told in (0, n)


@pytest.mark.parametrize(
    ("standing", "same", "opens", "reported", "accepting", "outcome"),
    [
        ("live", False, True, False, True, "accepted"),
        (None, False, True, False, True, "unknown-lease"),
        (None, False, True, False, False, "late"),
        ("reported", True, True, False, True, "replayed"),
        ("reported", True, True, False, False, "replayed"),
        ("reported", True, False, False, False, "replayed"),
        ("reported", False, True, False, True, "already-reported"),
        ("live", False, True, True, True, "already-reported"),
        ("over", False, True, True, True, "already-reported"),
        ("live", False, True, False, False, "late"),
        ("over", False, True, False, True, "late"),
        ("live", False, False, False, True, "wrong-key"),
        ("live", False, False, False, False, "late"),
        (None, False, False, False, True, "unknown-lease"),
    ],
)
def test_frame_outcomes(
    standing: Standing | None,
    same: bool,
    opens: bool,
    reported: bool,
    accepting: bool,
    outcome: str,
) -> None:
    assert judge_frame(standing, same, opens, reported, accepting) == outcome


@pytest.mark.parametrize(
    ("state", "expires_at", "problem"),
    [
        ("open", NOW + 1, None),
        ("open", NOW, "late"),
        ("abandoned", NOW + 1, "late"),
        ("sealed", NOW + 1, "batch-full"),
        ("sealed", NOW - 1, "batch-full"),
        ("erased", NOW + 1, "batch-full"),
    ],
)
def test_reasons_why_a_batch_is_closed(state: Any, expires_at: int, problem: str | None) -> None:
    assert closed_problem(state, expires_at, NOW) == problem


@given(st.sets(st.integers(0, 30)), st.integers(0, 40), st.integers(0, 50), st.data())
def test_lowest_free_slots(
    taken_or_returned: set[int], n: int, count: int, data: st.DataObject
) -> None:
    """Against the definition: the lowest slots that are neither held nor beyond n."""
    used = sorted(slot for slot in taken_or_returned if slot < n)
    next_slot = max(used, default=-1) + 1
    returned = [s for s in range(next_slot) if s not in used or data.draw(st.booleans())]
    free = sorted(set(returned) | set(range(next_slot, n)))
    assert lowest_free(returned, next_slot, n, count) == free[:count]


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a key that is not pinned": ({}, {"analyzer_keys": frozenset({"ab" * 32})}, "outdated-key"),
    "another shuffler": ({"shuffler_id": "shuffler-2"}, {}, "wrong-recipient"),
    "expired": ({"expires_at": NOW}, {}, "late"),
    "open too long": ({}, {"max_batch_seconds": 0}, "wrong-size"),
    "long episodes": ({"episode_seconds": 9}, {"max_episode_seconds": 8}, "wrong-size"),
    "trust model": ({}, {"trust_models": ()}, "trust-refused"),
    "aggregation": ({}, {"aggregations": ()}, "trust-refused"),
    "epochs": ({}, {"epoch_seconds": 3_601}, "epoch-refused"),
    "few reports": ({}, {"smallest_n": 1 << 20}, "batch-too-small"),
    "large hand-over": ({}, {"max_batch_bytes": 1}, "too-large"),
    "large reports": ({}, {"max_report_bytes": 1}, "too-large"),
    "seeded noise": ({"test_seed": 7}, {"test_entry": False}, "test-entry-refused"),
    "owner's share": ({}, {"max_owner_share": 0.01}, "weak-guarantee"),
    "epsilon": ({}, {"guarantee": Guarantee(1e-3, BETA, 0.0)}, "weak-guarantee"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rule_holds_for_every_kind_of_batch(fault: str) -> None:
    """Sums, epochs and other trust models too: each valid vector is refused with this one fault."""
    spoiled, wanted, slug = FAULTS[fault]
    valid = [vector for vector in VECTORS if vector["expect"] is None]
    assert {vector.get("descriptor", {}).get("aggregation") for vector in valid} == {None, "sums"}
    for vector in valid:
        changes = {name: tuples(value) for name, value in vector.get("descriptor", {}).items()}
        data = descriptor_bytes(vector.get("n", 4), **changes | spoiled)
        owner = replace(demands(vector.get("owner", {})), **wanted)
        with pytest.raises(RemoteError) as caught:
            accept_deposit(data, signature(data), json.loads(data)["batch_id"], owner, NOW)
        assert caught.value.slug == slug, vector["name"]


@pytest.mark.parametrize("place", range(0, 64, 7))
def test_a_key_that_differs_from_its_pin_in_one_digit_is_refused(place: int) -> None:
    data = descriptor_bytes()
    own, batch_id = (json.loads(data)[name] for name in ("analyzer_key", "batch_id"))
    pin = own[:place] + f"{int(own[place], 16) ^ 1:x}" + own[place + 1 :]
    pinned, other = (replace(demands({}), analyzer_keys=frozenset({key})) for key in (own, pin))
    accept_deposit(data, signature(data), batch_id, pinned, NOW)
    with pytest.raises(RemoteError) as caught:
        accept_deposit(data, signature(data), batch_id, other, NOW)
    assert caught.value.slug == "outdated-key"
