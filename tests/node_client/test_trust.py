"""The trust core against vectors with one fault each; most must be refused."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riffle.common.mechanism.counters import Sizes, Support
from riffle.common.mechanism.parameters import Guarantee
from riffle.common.protocol.descriptor import SignedDescriptor, serialize
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.signatures import sign_deposit
from riffle.common.protocol.verification import check_expiry
from riffle.node_client.environments.tabular import Declaration, random_mdp, riverswim
from riffle.node_client.trust import accept
from tests.node_client import world

VECTORS = json.loads((Path(__file__).parent / "vectors" / "trust.json").read_text())
KEYS = {"coordinator": world.COORDINATOR, "shuffler": world.SHUFFLER, "stranger": world.STRANGER}


def demands_of(vector: dict[str, Any]) -> Any:
    changes = dict(vector.get("demands", {}))
    if "required" in changes:
        changes["required"] = Guarantee(*changes["required"])
    if "sizes" in changes:
        changes["sizes"] = Sizes(*changes["sizes"])
    for name in ("coordinator_key", "shuffler_key"):
        if name in changes:
            changes[name] = world.public(KEYS[changes[name]])
    if "pins" in vector:
        known = {"analyzer": world.ANALYZER.public.hex()}
        changes["analyzer_keys"] = frozenset(known.get(pin, pin * 32) for pin in vector["pins"])
    return world.demands(**changes)


def signed_of(vector: dict[str, Any]) -> SignedDescriptor:
    data = serialize(world.descriptor(**vector.get("descriptor", {})))
    if "raw" in vector:  # well signed, not a descriptor: signed over the bytes all the same
        data = json.dumps(json.loads(data) | vector["raw"]).encode()
        return SignedDescriptor(
            descriptor=data.decode(),
            coordinator_signature=sign_deposit(world.COORDINATOR, data),
            batch_key=world.BATCH.public.hex(),
            shuffler_signature="00" * 64,
        )
    choices = dict(vector.get("sign", {}))
    if "batch_key" in choices:
        choices["batch_key"] = bytes.fromhex(choices["batch_key"])
    keys = {name: KEYS[key] if isinstance(key, str) else key for name, key in choices.items()}
    return tampered(world.sign(data, **keys), vector.get("tamper"))


def tampered(signed: SignedDescriptor, fault: str | None) -> SignedDescriptor:
    if fault == "n":
        changed = signed.descriptor.replace('"n":24', '"n":25')
        return signed.model_copy(update={"descriptor": changed})
    if fault == "batch_key":
        return signed.model_copy(update={"batch_key": world.ANALYZER.public.hex()})
    if fault == "countersignature":
        other = world.signed(deployment=5).shuffler_signature
        return signed.model_copy(update={"shuffler_signature": other})
    return signed


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_vector(vector: dict[str, Any]) -> None:
    signed = signed_of(vector)
    asked = vector.get("asked", json.loads(signed.descriptor)["batch_id"])
    now = vector.get("now", world.NOW)
    if vector["expect"] == "accepted":
        accepted = accept(signed, asked, demands_of(vector), now)
        assert accepted.batch_key == world.BATCH.public
        assert accepted.account.epsilon_upper <= demands_of(vector).required.epsilon
        return
    with pytest.raises(RemoteError) as caught:
        accept(signed, asked, demands_of(vector), now)
    assert caught.value.slug == vector["expect"]
    assert vector["says"] in caught.value.detail


def test_most_vectors_are_negative() -> None:
    refused = [vector for vector in VECTORS if vector["expect"] != "accepted"]
    assert 3 * len(refused) >= 2 * len(VECTORS)


def test_expiry_is_checked_again_later() -> None:
    check_expiry(world.descriptor(), world.EXPIRES - 1)
    with pytest.raises(RemoteError, match="expired"):
        check_expiry(world.descriptor(), world.EXPIRES)


RIVER = riverswim(4, 2).declaration.support or Support((), ())
HERE = Declaration(RIVER, homogeneous=True)
FEWER = Support((0,), ((((0,), (0,)), *RIVER.next[0][1:]),))
MORE = Support((0, 1), RIVER.next)


@pytest.mark.parametrize(
    ("support", "declared", "accepted"),
    [
        (RIVER, HERE, True),
        (MORE, HERE, True),
        (None, HERE, True),
        (FEWER, HERE, False),
        (FEWER, Declaration(), True),
        (RIVER, Declaration(MORE), False),
        (RIVER, random_mdp(world.SIZES, 0).declaration, False),
    ],
)
def test_a_support_must_hold_for_the_nodes_own_environment(
    support: Support | None, declared: Declaration, accepted: bool
) -> None:
    """A node that declares nothing checks each episode instead (`test_episode`)."""
    demands, batch_id = world.demands(declaration=declared), world.descriptor().batch_id
    signed = world.signed(support=support)
    if accepted:
        accept(signed, batch_id, demands, world.NOW)
        return
    with pytest.raises(RemoteError, match="leaves out") as refused:
        accept(signed, batch_id, demands, world.NOW)
    assert refused.value.slug == "wrong-recipient"


@pytest.mark.parametrize(("alike", "refused"), [(True, False), (None, False), (False, True)])
def test_steps_are_not_declared_alike_where_they_differ(alike: bool | None, refused: bool) -> None:
    demands = world.demands(declaration=Declaration(None, alike))
    batch_id = world.descriptor().batch_id
    accept(world.signed(), batch_id, demands, world.NOW)
    with pytest.raises(RemoteError, match="differ") if refused else nullcontext():
        accept(world.signed(homogeneous=True), batch_id, demands, world.NOW)


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another shuffler": ({"shuffler_id": "shuffler-2"}, {}, "wrong-recipient"),
    "expired": ({"expires_at": world.NOW}, {}, "late"),
    "open too long": ({}, {"max_seconds": 0}, "wrong-size"),
    "long episodes": ({"episode_seconds": 9}, {"max_episode_seconds": 8}, "wrong-size"),
    "trust model": ({}, {"trust_models": ()}, "trust-refused"),
    "aggregation": ({}, {"aggregations": ()}, "trust-refused"),
    "epochs": ({"epoch_seconds": 3_600}, {"shortest_epoch": 3_601}, "epoch-refused"),
    "a key that is not pinned": ({}, {"analyzer_keys": frozenset({"ab" * 32})}, "outdated-key"),
    "another environment": ({"environment": "other"}, {}, "wrong-recipient"),
    "other sizes": ({}, {"sizes": Sizes(9, 2, 2)}, "wrong-size"),
    "rewards": ({}, {"reward_range": (-9.0, 9.0)}, "wrong-size"),
    "seeded noise": ({"test_seed": 7}, {"test_entry": False}, "test-entry-refused"),
    "seeded noise off loopback": ({"test_seed": 7}, {"loopback": False}, "test-entry-refused"),
    "owner's share": ({}, {"max_owner_share": 0.01}, "weak-guarantee"),
    "epsilon": ({}, {"required": Guarantee(1e-3, 1e-2, 0.0)}, "weak-guarantee"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rule_holds_for_every_kind_of_batch(fault: str) -> None:
    """Sums, epochs and other trust models too: each valid vector is refused with this one fault."""
    spoiled, wanted, slug = FAULTS[fault]
    valid = [vector for vector in VECTORS if vector["expect"] == "accepted"]
    assert {vector.get("descriptor", {}).get("aggregation") for vector in valid} == {None, "sums"}
    for vector in valid:
        changed = vector | {"descriptor": vector.get("descriptor", {}) | spoiled}
        signed, owner = signed_of(changed), replace(demands_of(vector), **wanted)
        with pytest.raises(RemoteError) as caught:
            accept(signed, json.loads(signed.descriptor)["batch_id"], owner, world.NOW)
        assert caught.value.slug == slug, vector["name"]


@pytest.mark.parametrize("place", range(0, 64, 7))
def test_a_key_that_differs_from_its_pin_in_one_digit_is_refused(place: int) -> None:
    signed, batch_id, own = world.signed(), world.descriptor().batch_id, world.ANALYZER.public.hex()
    accept(signed, batch_id, world.demands(analyzer_keys=frozenset({own})), world.NOW)
    pin = own[:place] + f"{int(own[place], 16) ^ 1:x}" + own[place + 1 :]
    with pytest.raises(RemoteError) as caught:
        accept(signed, batch_id, world.demands(analyzer_keys=frozenset({pin})), world.NOW)
    assert caught.value.slug == "outdated-key"
