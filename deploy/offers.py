"""The batches that ``riffle conformance`` offers to a client: good ones, and ones with one fault.

All are for one small environment whose transitions are certain, so that the law of every counter is
known. A bad offer differs from a good one in one of the rules that a node must check
(`node_client.trust`, and the strict parser).
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from riffle.common.mechanism.counters import Families, Ints, Support
from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.mechanism.policy import TOTAL_WEIGHT, Mixture
from riffle.common.protocol.descriptor import (
    LABEL_DIGEST,
    SignedDescriptor,
    batch_id,
    countersign,
    sign_deposit,
)
from riffle.common.protocol.hpke import KeyPair
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec

ENVIRONMENT = "File-v0"
X, A, H = 5, 2, 3
REPORTS = 40
BATCH_SECONDS, LONGEST_SECONDS = 3_600, 86_400
EPSILON, BETA, GAMMA, OWNER_GAMMA = 4.0, 1e-2, 0.1, 0.08
"""What batches promise is exactly what the owner demands, but at a larger dishonest fraction."""
REWARD_RANGE = (-1.0, 1.0)
"""Declared range of rewards; the environment's is [0, 1]."""
SHUFFLER_ID = "conformance"
INDEX = 7
"""Index of every batch in its run."""
LOW_ORDER = bytes(32)
COORDINATOR, SHUFFLER = "coordinator_signature", "shuffler_signature"
BLANKS = (" ,", ": ")
"""Separators in descriptors. No JSON library writes these, so a client that parses a descriptor and
writes it again gets another digest."""
SEVERAL_BITS: dict[str, Any] = {
    "noise": {"bits": 3, "p_numerator": 1, "p_log2": 4},
    "noise_slots": 120,
}

Document = dict[str, Any]


def next_state(h: int, x: int, a: int) -> int:
    """Returns the state that follows with certainty."""
    return (2 * x + a + 1 + h) % X


def reward(h: int, x: int, a: int) -> float:
    """Returns the reward of a step, in quarters of [0, 1]."""
    return (h + 2 * x + 3 * a + 2) % 5 / 4


def _table(value: Any) -> list[Any]:  # noqa: ANN401
    return [[[value(h, x, a) for a in range(A)] for x in range(X)] for h in range(H)]


def environment() -> Document:
    """Returns the environment as the document of an MDP."""
    P = _table(lambda h, x, a: [float(y == next_state(h, x, a)) for y in range(X)])
    return {"P": P, "r": _table(reward), "d1": [1.0] + [0.0] * (X - 1)}


POLICIES = np.array(
    [[[(h + b + (x >= 3)) % A for x in range(X)] for h in range(H)] for b in (1, 0)], dtype=np.int64
)
MIXTURE = Mixture(POLICIES, np.array([3 * TOTAL_WEIGHT // 4, TOTAL_WEIGHT // 4], dtype=np.int64))
"""The policies take other transitions at every step. A client that reads weights as 31 bits never
draws the second one."""

SUPPORT = Support(
    start=(0,),
    next=tuple(
        tuple(tuple(tuple(sorted({y, (y + 1) % X})) for y in row) for row in step)
        for step in _table(next_state)
    ),
)
"""Two possible successors of every state and action; the second one never occurs."""


@dataclass(frozen=True, slots=True)
class Case:
    """A good batch: what is counted, under which trust model, and how it is sent.

    ``fault`` is a fault of the network that the client must survive; "" for none.
    """

    families: Families = "joint"
    layer: int | None = None
    support: bool = False
    trust: Trust = "shuffle"
    aggregation: Aggregation = "messages"
    fault: str = ""
    several_bits: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        how = self.aggregation if self.trust == "shuffle" else f"trust {self.trust}"
        parts = [how, self.families, "all steps" if self.layer is None else f"step {self.layer}"]
        parts += ["declared support"] * self.support + ["3 noise bits"] * self.several_bits
        return ", ".join(parts + [self.fault] * bool(self.fault))


FAULTS = ("answer lost", "shuffler busy", "batch has a new key", "first leases are over")


def cases(
    families: Sequence[Families], trust: Sequence[Trust], aggregations: Sequence[Aggregation]
) -> list[Case]:
    """Returns the good batches for a client that knows these families, models, aggregations."""
    kinds: list[tuple[Trust, Aggregation]] = [
        (t, g) for t in trust for g in (aggregations if t == "shuffle" else ("messages",))
    ]
    ways = product(kinds, families, (None, 1), (False, True))
    found = [Case(family, layer, support, *kind) for kind, family, layer, support in ways]
    whole = found[0]
    small = replace(whole, layer=1, support=True)
    found += [replace(whole if f == FAULTS[2] else small, fault=f) for f in FAULTS]
    if kinds[0] == ("shuffle", "messages"):
        found.append(replace(whole, several_bits=True))
    return found


@dataclass(frozen=True, slots=True)
class Keys:
    """The throwaway private keys of a conformance network."""

    coordinator: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    shuffler: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    analyzer: KeyPair = field(default_factory=KeyPair.generate)


@dataclass(frozen=True, slots=True)
class Offer:
    """A batch as it is served under ``batch_id``: a good ``case``, or a ``fault`` in words."""

    batch_id: str
    signed: SignedDescriptor
    batch_key: KeyPair
    case: Case | None = None
    fault: str = ""


def public(private: bytes) -> bytes:
    """Returns the public half of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def good_offer(case: Case, keys: Keys, batch_key: KeyPair | None = None) -> Offer:
    """Returns the offer of a good batch."""
    document, pair = good_document(case, keys), batch_key or KeyPair.generate()
    return Offer(document["batch_id"], sign(to_bytes(document), keys, pair.public), pair, case)


def good_document(
    case: Case,
    keys: Keys,
    mixture: Mixture = MIXTURE,
    **changes: Any,  # noqa: ANN401
) -> Document:
    """Returns a new batch's descriptor, with the least noise; ``changes`` are those of the spec."""
    fields: dict[str, Any] = {
        "name": "conformance",
        "environment": ENVIRONMENT,
        "states": X,
        "actions": A,
        "horizon": H,
        "support": SUPPORT if case.support else None,
        "reward_low": REWARD_RANGE[0],
        "reward_high": REWARD_RANGE[1],
        "episodes": REPORTS,
        "epsilon": EPSILON,
        "beta": BETA,
        "dishonest_fraction": GAMMA,
        "trust": case.trust,
        "aggregation": case.aggregation,
        "families": case.families,
        "batch_seconds": BATCH_SECONDS,
    }
    spec = RunSpec(**(fields | changes))
    issuer = Issuer(SHUFFLER_ID, keys.analyzer.public.hex, time.time, spec.dishonest_fraction)
    deployment = Deployment(0, "manual", mixture, REPORTS, case.layer)
    issue = issuer.issue(os.urandom(16).hex(), spec, deployment, index=INDEX, step=INDEX)
    document: Document = json.loads(issue.data)
    return document | (SEVERAL_BITS if case.several_bits else {})


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """Returns a descriptor's bytes, as no JSON library writes them."""
    return json.dumps(document, separators=BLANKS).encode()


def sign(data: bytes, keys: Keys, batch_key: bytes) -> SignedDescriptor:
    """Returns bytes, which need not be a valid descriptor's, with both signatures."""
    digest = hashlib.sha256(LABEL_DIGEST + data).digest()
    return SignedDescriptor(
        descriptor=data.decode(),
        coordinator_signature=sign_deposit(keys.coordinator, data),
        batch_key=batch_key.hex(),
        shuffler_signature=countersign(keys.shuffler, digest, batch_key),
    )


def bad_offers(
    keys: Keys, base: Case, trust: Sequence[Trust], aggregations: Sequence[Aggregation]
) -> Iterator[Offer]:
    """Yields offers with one fault each, all made from the good batch ``base``.

    ``trust`` and ``aggregations`` are those that the owner allows. A low-order analyzer key is not
    among the faults, because it could not be pinned.
    """
    documents = [
        *_strangers(keys, base),
        *_outside(keys, base),
        *_weak(keys, base),
        *_disallowed(keys, trust, aggregations),
    ]
    documents += [(f"malformed: {fault}", document) for fault, document in _malformed(keys, base)]
    for fault, document in documents:
        yield _offer(fault, keys, document)
    low = KeyPair(os.urandom(32), LOW_ORDER)
    yield _offer("the batch key is a point of low order", keys, good_document(base, keys), low)
    yield from _signed_wrongly(keys, base)


def _offer(fault: str, keys: Keys, document: Document, pair: KeyPair | None = None) -> Offer:
    pair = pair or KeyPair.generate()
    listed = document.pop("listed", document["batch_id"])
    return Offer(listed, sign(to_bytes(document), keys, pair.public), pair, fault=fault)


def _signed_wrongly(keys: Keys, base: Case) -> Iterator[Offer]:
    other = Keys()
    for fault, name in (
        ("the coordinator's signature is made with a key that is not pinned", COORDINATOR),
        ("the shuffler's signature is made with a key that is not pinned", SHUFFLER),
        ("the shuffler signed another batch key", "batch_key"),
        ("the coordinator signed the bytes without their label", "bare"),
    ):
        document, pair = good_document(base, keys), KeyPair.generate()
        data = to_bytes(document)
        good, wrong = (sign(data, each, pair.public) for each in (keys, other))
        bare = Ed25519PrivateKey.from_private_bytes(keys.coordinator).sign(data).hex()
        update = {
            COORDINATOR: {COORDINATOR: wrong.coordinator_signature},
            SHUFFLER: {SHUFFLER: wrong.shuffler_signature},
            "batch_key": {"batch_key": other.analyzer.public.hex()},
            "bare": {COORDINATOR: bare},
        }[name]
        yield Offer(document["batch_id"], good.model_copy(update=update), pair, fault=fault)


def _strangers(keys: Keys, base: Case) -> Iterator[tuple[str, Document]]:
    """Yields descriptors that are for somebody else, or for another time."""
    now, document = int(time.time()), good_document(base, keys)
    asked = batch_id(document["run_id"], INDEX + 1)
    yield "its batch id is not the one asked for", document | {"listed": asked}
    for fault, changes in (
        ("its batch id does not follow from run and deployment", {"deployment": INDEX + 1}),
        ("it is for another shuffler", {"shuffler_id": "another"}),
        ("it is for another environment", {"environment": "RiverSwim-v0"}),
        ("its analyzer key is not pinned", {"analyzer_key": KeyPair.generate().public.hex()}),
        ("it expired an hour ago", {"expires_at": now - 3_600}),
        ("it is open for longer than the owner allows", {"expires_at": now + 2 * LONGEST_SECONDS}),
        ("it has a test seed", {"test_seed": 1}),
    ):
        yield fault, good_document(base, keys) | changes


def _outside(keys: Keys, base: Case) -> Iterator[tuple[str, Document]]:
    """Yields descriptors that do not fit the environment."""
    wide = Mixture(np.concatenate([POLICIES, POLICIES[:, :, :1]], axis=2), MIXTURE.weights)
    fault = "it has one state more than the environment"
    yield fault, good_document(replace(base, support=False), keys, wide, states=X + 1)
    yield "its reward range ends below a reward", good_document(base, keys) | {"reward_high": 0.5}
    yield "it declares steps alike that differ", good_document(base, keys) | {"homogeneous": True}
    never = _table(lambda h, x, a: ((next_state(h, x, a) + 1) % X,))
    narrow = Support((0,), tuple(tuple(map(tuple, step)) for step in never))
    fault = "its support leaves out transitions that occur"
    yield fault, good_document(base, keys, support=narrow)


def _weak(keys: Keys, base: Case) -> Iterator[tuple[str, Document]]:
    """Yields descriptors whose guarantee is weaker than the owner demands, or than promised."""
    yield "its epsilon is larger than the owner allows", good_document(base, keys, epsilon=4.5)
    fault = "its epsilon is small enough only at a larger beta than the owner's"
    yield fault, good_document(base, keys, beta=0.3)
    document = good_document(base, keys)
    document["guarantee"]["epsilon"] = EPSILON / 2
    yield "it promises a smaller epsilon than its noise gives", document
    document = good_document(base, keys, dishonest_fraction=0.3)
    yield "one owner may hold more of its slots than this owner allows", document
    if base.trust != "shuffle":
        return
    fault = "its epsilon is small enough only at a smaller dishonest fraction than the owner's"
    yield fault, good_document(base, keys, dishonest_fraction=0.05)
    if base.aggregation == "messages":
        document = good_document(base, keys)
        document["noise_slots"] = document["noise_slots"] * 2 // 3
        yield "it drops noise so often that beta cannot pay for it", document


def _disallowed(
    keys: Keys, trust: Sequence[Trust], aggregations: Sequence[Aggregation]
) -> Iterator[tuple[str, Document]]:
    for other in get_args(Trust):
        if other not in trust:
            yield f"its trust model is {other}", good_document(Case(trust=other), keys)
    if "sums" not in aggregations:
        yield "its aggregation is sums", good_document(Case(aggregation="sums"), keys)


def _malformed(keys: Keys, base: Case) -> Iterator[tuple[str, Document]]:
    """Yields descriptors that a strict parser refuses, though both parties signed them."""
    good = good_document(base, keys)
    first, last = good["weights"]
    policies = json.loads(json.dumps(good["policies"]))
    policies[1][0][X - 1] = A
    for fault, changes in (
        ("a field is unknown", {"comment": ""}),
        ("the version is 2", {"version": 2}),
        ("n is a string", {"n": str(REPORTS)}),
        ("the weights do not sum to 2^32", {"weights": [first, last - 1]}),
        ("a policy has an action that does not exist", {"policies": policies}),
        ("data_slots is too small", {"data_slots": good["data_slots"] - 1}),
        ("the noise is of a kind for another trust model", {"noise": _other_noise(base)}),
        ("owner_share is above the promised dishonest fraction", {"owner_share": 2 * GAMMA}),
        ("word_bits does not fit the aggregation", {"word_bits": 24}),
    ):
        yield fault, good_document(base, keys) | changes
    document = good_document(base, keys)
    del document["reward_low"]
    yield "the field reward_low is missing", document


def _other_noise(base: Case) -> Document:
    kind = "flips" if base.trust != "local" else "laplace"
    return {"kind": kind, "bits": 1, "p_numerator": 1 << 30, "p_log2": 32}


def paths() -> tuple[Ints, Ints, npt.NDArray[np.float64]]:
    """Returns every policy's states (M, H + 1), actions (M, H) and scaled rewards (M, H)."""
    states, (low, high) = np.zeros((len(POLICIES), H + 1), dtype=np.int64), REWARD_RANGE
    actions, means = np.zeros((len(POLICIES), H), dtype=np.int64), np.zeros((len(POLICIES), H))
    for k, h in product(range(len(POLICIES)), range(H)):
        x = int(states[k, h])
        a = actions[k, h] = int(POLICIES[k, h, x])
        means[k, h] = (reward(h, x, a) - low) / (high - low)
        states[k, h + 1] = next_state(h, x, a)
    return states, actions, means
