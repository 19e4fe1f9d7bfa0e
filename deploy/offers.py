"""The batches that ``riffle conformance`` offers to a client: good ones, and ones with one fault.

All are for one small environment whose transitions are certain, so that the law of every counter is
known. A bad offer breaks one of the checks that section 11 of docs/protocol.md numbers.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
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

Json = dict[str, Any]
ENVIRONMENT, SHUFFLER_ID, NODE_ID, INDEX = "File-v0", "conformance", "c0" * 16, 7
X, A, H, REPORTS = 5, 2, 3, 40
EPSILON, BETA, GAMMA, OWNER_GAMMA = 4.0, 1e-2, 0.1, 0.08
"""Batches promise what the owner demands, at a larger dishonest fraction than the owner's."""
LOW, HIGH = -1.0, 1.0
"""The declared range of rewards; the environment's is [0, 1]."""
BLANKS = (" ,", ": ")
"""Separators in descriptors. No JSON library writes these, so a client that parses a descriptor and
writes it again gets another digest."""
SEVERAL_BITS: Json = {"noise": {"bits": 3, "p_numerator": 1, "p_log2": 3}, "noise_slots": 64}
FAULTS = ("answer lost", "shuffler busy", "batch has a new key", "first leases are over")


def next_state(h: int, x: int, a: int) -> int:
    """Returns the state that follows with certainty."""
    return (2 * x + a + 1 + h) % X


def reward(h: int, x: int, a: int) -> float:
    """Returns the reward of a step, in quarters of [0, 1]."""
    return (h + 2 * x + 3 * a + 2) % 5 / 4


def _table(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(tuple(tuple(value(h, x, a) for a in range(A)) for x in range(X)) for h in range(H))


def environment() -> Json:
    """Returns the environment as the document of an MDP."""
    P = _table(lambda h, x, a: [float(y == next_state(h, x, a)) for y in range(X)])
    return {"P": P, "r": _table(reward), "d1": [1.0] + [0.0] * (X - 1)}


POLICIES = np.array(
    [[[(h + b + (x >= 3)) % A for x in range(X)] for h in range(H)] for b in (1, 0)], dtype=np.int64
)
MIXTURE = Mixture(POLICIES, np.array([3 * TOTAL_WEIGHT // 4, TOTAL_WEIGHT // 4], dtype=np.int64))
"""The policies take other transitions at every step. A client that reads weights as 31 bits never
draws the second one."""


def _support(*steps: int) -> Support:
    """Returns a support that lists the certain successor plus each of ``steps``."""
    next_states = _table(
        lambda h, x, a: tuple(sorted((next_state(h, x, a) + step) % X for step in steps))
    )
    return Support((0,), next_states)


def paths() -> tuple[Ints, Ints, npt.NDArray[np.float64]]:
    """Returns every policy's states (M, H + 1), actions (M, H) and scaled rewards (M, H)."""
    states = np.zeros((len(POLICIES), H + 1), dtype=np.int64)
    actions, means = np.zeros((len(POLICIES), H), dtype=np.int64), np.zeros((len(POLICIES), H))
    for k, h in product(range(len(POLICIES)), range(H)):
        x = int(states[k, h])
        a = actions[k, h] = int(POLICIES[k, h, x])
        means[k, h] = (reward(h, x, a) - LOW) / (HIGH - LOW)
        states[k, h + 1] = next_state(h, x, a)
    return states, actions, means


@dataclass(frozen=True, slots=True)
class Case:
    """A good batch: what is counted, under which trust model, and how it is sent.

    ``fault`` is one of `FAULTS` of the network, which the client must survive, or "".
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


def good_cases(
    families: Sequence[Families], trust: Sequence[Trust], aggregations: Sequence[Aggregation]
) -> list[Case]:
    """Returns the good batches for a client that knows these families, models, aggregations."""
    kinds: list[tuple[Trust, Aggregation]] = [
        (t, g) for t in trust for g in (aggregations if t == "shuffle" else ("messages",))
    ]
    ways = product(kinds, families, (None, 1), (False, True))
    cases = [Case(family, layer, support, *kind) for kind, family, layer, support in ways]
    whole, small = cases[0], replace(cases[0], layer=1, support=True)
    cases += [replace(whole if f == FAULTS[2] else small, fault=f) for f in FAULTS]
    several = kinds[0] == ("shuffle", "messages")
    return cases + [replace(whole, support=True, several_bits=True)] * several


@dataclass(frozen=True, slots=True)
class Keys:
    """The throwaway private keys of a conformance network."""

    coordinator: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    shuffler: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    analyzer: KeyPair = field(default_factory=KeyPair.generate)


@dataclass(frozen=True, slots=True)
class Offer:
    """A batch served as ``batch_id``: a good ``case``, or a ``fault`` that ``check`` finds."""

    batch_id: str
    signed: SignedDescriptor
    batch_key: KeyPair
    case: Case | None = None
    check: int = 0
    fault: str = ""


def public(private: bytes) -> bytes:
    """Returns the public half of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of the client: pins, the node's token, and the people whom the node may ask.

    The node may hide their ids from the shuffler under ``users_key``.
    """

    keys: Keys
    users: Sequence[str]
    trust: Sequence[Trust] = ("shuffle",)
    aggregations: Sequence[Aggregation] = ("messages",)
    token: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    users_key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def write_settings(self, folder: Path, url: str) -> None:
        """Writes what a client needs to settings.json, and for Riffle's own node to node.env."""
        analyzer = self.keys.analyzer.public.hex()
        files = {
            "environment.json": json.dumps(environment()),
            "users.json": json.dumps({NODE_ID: list(self.users)}),
            "credentials.json": json.dumps([{"node_id": NODE_ID, "token": self.token}]),
            "analyzer_keys": analyzer,
            "users_key": self.users_key.hex(),
        }
        own = self._demands() | {"shuffler_url": url, "state_dir": str(folder / "state")}
        own |= {f"{name.partition('.')[0]}_file": str(folder / name) for name in files}
        own["environment_parameters"] = {"path": own.pop("environment_file")}
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in own.items()}
        lines = [f"RIFFLE_NODE_{name.upper()}={text}\n" for name, text in texts.items()]
        whole = own | {"analyzer_keys": [analyzer], "node_token": self.token}
        files |= {"node.env": "".join(lines), "settings.json": json.dumps(whole, indent=2)}
        for name, text in files.items():
            (folder / name).write_text(text)

    def _demands(self) -> Json:
        keys = {"shuffler": self.keys.shuffler, "coordinator": self.keys.coordinator}
        own: Json = {f"{role}_key": public(key).hex() for role, key in keys.items()}
        own |= {"shuffler_id": SHUFFLER_ID, "environment": ENVIRONMENT, "max_owner_share": GAMMA}
        own |= {"max_epsilon": EPSILON, "max_beta": BETA, "min_dishonest_fraction": OWNER_GAMMA}
        own |= {"max_batch_seconds": 86_400, "max_episode_seconds": 7 * 86_400}
        return own | {"trust_models": [*self.trust], "aggregations": [*self.aggregations]}


def good_offer(case: Case, keys: Keys) -> Offer:
    """Returns the offer of a good batch."""
    document, pair = _document(case, keys), KeyPair.generate()
    return Offer(document["batch_id"], sign(to_bytes(document), keys, pair.public), pair, case)


def _document(case: Case, keys: Keys, mixture: Mixture = MIXTURE, **changes: Any) -> Json:  # noqa: ANN401
    """Returns a new batch's descriptor with the least noise; ``changes`` are those of the spec."""
    fields: Json = {"name": SHUFFLER_ID, "environment": ENVIRONMENT, "episodes": REPORTS}
    fields |= {"states": X, "actions": A, "horizon": H, "reward_low": LOW, "reward_high": HIGH}
    fields |= {"epsilon": EPSILON, "beta": BETA, "dishonest_fraction": GAMMA}
    fields |= {"trust": case.trust, "aggregation": case.aggregation, "families": case.families}
    fields |= {"support": _support(0, 1) if case.support else None}
    spec, analyzer = RunSpec(**(fields | changes)), keys.analyzer.public
    issuer = Issuer(SHUFFLER_ID, analyzer.hex, time.time, spec.dishonest_fraction)
    deployment = Deployment(0, "manual", mixture, REPORTS, case.layer)
    issue = issuer.issue(os.urandom(16).hex(), spec, deployment, index=INDEX, step=INDEX)
    document: Json = json.loads(issue.data)
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


def bad_offers(owner: Owner, base: Case) -> Iterator[Offer]:
    """Yields offers with one fault each, all made from the good batch ``base``.

    A low-order analyzer key is not among the faults: it would not be pinned.
    """
    keys = owner.keys
    rows = [*_strangers(base, keys), *_malformed(base, keys), *_weak(base, keys)]
    rows += [
        (12, f"its trust model is {other}", _document(Case(trust=other), keys))
        for other in get_args(Trust)
        if other not in owner.trust
    ]
    if "sums" not in owner.aggregations:
        rows.append((11, "its aggregation is sums", _document(Case(aggregation="sums"), keys)))
    for check, fault, document in rows:
        listed, pair = document.pop("listed", document["batch_id"]), KeyPair.generate()
        signed = sign(to_bytes(document), keys, pair.public)
        yield Offer(listed, signed, pair, None, check, fault)
    yield from _signed_wrongly(base, keys)


def _signed_wrongly(base: Case, keys: Keys) -> Iterator[Offer]:
    other, low = Keys(), KeyPair(os.urandom(32), bytes(32))
    for check, fault in (
        (2, "it has a member twice"),
        (3, "the coordinator's signature is made with a key that is not pinned"),
        (3, "the coordinator signed the bytes without their label"),
        (4, "the shuffler's signature is made with a key that is not pinned"),
        (4, "the shuffler signed another batch key"),
        (23, "the batch key is a point of low order"),
    ):
        data, pair = to_bytes(_document(base, keys)), low if check == 23 else KeyPair.generate()
        batch = json.loads(data)["batch_id"]
        data = data.replace(b"{", b'{"n": 1 ,', check == 2)
        signed, wrong = (sign(data, each, pair.public) for each in (keys, other))
        bare = Ed25519PrivateKey.from_private_bytes(keys.coordinator).sign(data).hex()
        change = {
            "the coordinator's": {"coordinator_signature": wrong.coordinator_signature},
            "the coordinator s": {"coordinator_signature": bare},
            "the shuffler's si": {"shuffler_signature": wrong.shuffler_signature},
            "the shuffler sign": {"batch_key": other.analyzer.public.hex()},
        }.get(fault[:17], {})
        yield Offer(batch, signed.model_copy(update=change), pair, None, check, fault)


Row = tuple[int, str, Json]


def _strangers(base: Case, keys: Keys) -> Iterator[Row]:
    """Yields descriptors that are for somebody else, for another time or another environment."""
    now, asked = int(time.time()), _document(base, keys)
    asked["listed"] = batch_id(asked["run_id"], INDEX + 1)
    yield 5, "its batch id is not the one asked for", asked
    for check, fault, changes in (
        (6, "its batch id does not follow from run and deployment", {"deployment": INDEX + 1}),
        (7, "it is for another shuffler", {"shuffler_id": "another"}),
        (8, "it expired an hour ago", {"expires_at": now - 3_600}),
        (9, "it is open for longer than the owner allows", {"expires_at": now + 172_800}),
        (10, "its episodes may take longer than the owner allows", {"episode_seconds": 1_000_000}),
        (13, "it has an epoch, and the owner allows none", {"epoch_seconds": 604_800}),
        (15, "its analyzer key is not pinned", {"analyzer_key": KeyPair.generate().public.hex()}),
        (16, "it is for another environment", {"environment": "RiverSwim-v0"}),
        (18, "its reward range ends below a reward", {"reward_high": 0.5}),
        (19, "it declares steps alike that differ", {"homogeneous": True}),
        (21, "it has a test seed", {"test_seed": 1}),
    ):
        yield check, fault, _document(base, keys) | changes
    wide = Mixture(np.concatenate([POLICIES, POLICIES[:, :, :1]], axis=2), MIXTURE.weights)
    fault = "it has one state more than the environment"
    yield 17, fault, _document(base, keys, wide, states=X + 1, support=None)
    fault = "its support leaves out transitions that occur"
    yield 20, fault, _document(base, keys, support=_support(1))


def _weak(base: Case, keys: Keys) -> Iterator[Row]:
    """Yields descriptors whose guarantee is weaker than the owner demands, or than promised."""
    fault = "one owner may hold more of its slots than this owner allows"
    yield 24, fault, _document(base, keys, dishonest_fraction=0.3)
    yield 25, "its epsilon is larger than the owner's", _document(base, keys, epsilon=4.5)
    fault = "its epsilon is small enough only at a larger beta than the owner's"
    yield 25, fault, _document(base, keys, beta=0.3)
    document = _document(base, keys)
    document["guarantee"]["epsilon"] = EPSILON / 2
    yield 26, "it promises a smaller epsilon than its noise gives", document
    if base.trust == "shuffle":
        fault = "its epsilon is small enough only at a smaller dishonest fraction than the owner's"
        yield 25, fault, _document(base, keys, dishonest_fraction=0.05)
    if (base.trust, base.aggregation) == ("shuffle", "messages"):
        document = _document(base, keys)
        document["noise_slots"] = document["noise_slots"] * 2 // 3
        yield 25, "it drops noise so often that beta cannot pay for it", document


def _malformed(base: Case, keys: Keys) -> Iterator[Row]:
    """Yields descriptors that a strict parser refuses, though both parties signed them."""
    good = _document(base, keys)
    first, last = good["weights"]
    policies = json.loads(json.dumps(good["policies"]))
    policies[1][0][X - 1] = A
    kind = "flips" if base.trust != "local" else "laplace"
    other = {"kind": kind, "bits": 1, "p_numerator": 1 << 30, "p_log2": 32}
    for fault, changes in (
        ("it has an unknown member", {"comment": ""}),
        ("its version is 2", {"version": 2}),
        ("its n is a string", {"n": str(REPORTS)}),
        ("its weights do not sum to 2^32", {"weights": [first, last - 1]}),
        ("a policy has an action that does not exist", {"policies": policies}),
        ("its data_slots do not follow from the counters", {"data_slots": good["data_slots"] + 1}),
        ("its noise is of a kind for another trust model", {"noise": other}),
        ("its owner_share is above the promised dishonest fraction", {"owner_share": 2 * GAMMA}),
        ("its word_bits do not follow from the batch", {"word_bits": 24}),
    ):
        yield 2, fault, _document(base, keys) | changes
    del good["reward_low"]
    yield 2, "it lacks the member reward_low", good
