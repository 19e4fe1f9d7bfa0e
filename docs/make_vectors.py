"""Makes the test vectors of docs/protocol.md, the same each time: ``python -m docs.make_vectors``.

All keys follow from names by SHA-256. All random draws come from tapes, which are SHAKE-256 streams
of names. HPKE with a known ephemeral key exists only here, because such a key makes seals
linkable. `tests.test_vectors` makes the files again, and gives them to the functions of Riffle.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from riffle.common.accounting import account
from riffle.common.mechanism import shuffle_model, sums, workflow
from riffle.common.mechanism.counters import (
    CounterLayout,
    Episode,
    Families,
    Sizes,
    Support,
)
from riffle.common.mechanism.parameters import Noise, Padding, honest_reports
from riffle.common.mechanism.randomness import Randomness, bernoulli, draw_counts
from riffle.common.protocol import descriptor as d
from riffle.common.protocol import signatures
from riffle.common.protocol.errors import PROBLEMS
from riffle.common.protocol.hpke import open_histogram
from riffle.common.protocol.verification import batch_event
from riffle.common.protocol.wire import OpenBatches, frame
from riffle.node_client.episode import reward_mean
from riffle.node_client.users import opaque_id
from riffle.shuffler.permutation import Keystream

FOLDER = Path(__file__).parent / "vectors"
Json = dict[str, Any]
Value = str | int | float | list[Any] | None

LOW_ORDER = ("00" * 32, "01" + "00" * 31, "ecffffffffffffffffffffffffffffff" + "ff" * 15 + "7f")


def secret(name: str) -> bytes:
    """Returns the private key or seed of a name: its SHA-256."""
    return hashlib.sha256(f"riffle vectors: {name}".encode()).digest()


@dataclass
class Tape:
    """A stream of bytes that follows from a name. ``used`` counts the bytes that were read."""

    name: str
    used: int = 0

    def read(self, size: int) -> bytes:
        """Returns the next bytes."""
        self.used += size
        return hashlib.shake_256(self.name.encode()).digest(self.used)[self.used - size :]

    @property
    def random(self) -> Randomness:
        """The tape as a source of draws. Riffle itself never draws from a tape, hence the cast."""
        return cast("Randomness", self)


@dataclass
class Bytes:
    """A stream of given bytes."""

    data: bytes
    used: int = 0

    def read(self, size: int) -> bytes:
        """Returns the next bytes; raises ValueError if there are too few."""
        if self.used + size > len(self.data):
            raise ValueError("more bytes are drawn than the vector has")
        self.used += size
        return self.data[self.used - size : self.used]


# ---- HPKE with a known ephemeral key ------------------------------------------------------------

KEM, SUITE = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x01"


def _extract(suite: bytes, salt: bytes, label: bytes, ikm: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + ikm, "sha256")


def _expand(suite: bytes, prk: bytes, label: bytes, info: bytes, size: int) -> bytes:
    """Returns ``size`` bytes of HKDF-Expand. At most 32 are needed, so one block is enough."""
    text = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(prk, text + b"\x01", "sha256")[:size]


def hpke_steps(ephemeral: bytes, public: bytes, info: bytes) -> dict[str, bytes]:
    """Returns all intermediate values of a seal (RFC 9180, sections 4.1 and 5.1)."""
    private = X25519PrivateKey.from_private_bytes(ephemeral)
    enc = private.public_key().public_bytes_raw()
    dh = private.exchange(X25519PublicKey.from_public_bytes(public))
    prk = _extract(KEM, b"", b"eae_prk", dh)
    shared = _expand(KEM, prk, b"shared_secret", enc + public, 32)
    hashes = (_extract(SUITE, b"", b"psk_id_hash", b""), _extract(SUITE, b"", b"info_hash", info))
    context = b"\x00" + b"".join(hashes)
    key_secret = _extract(SUITE, shared, b"secret", b"")
    return {
        "enc": enc,
        "dh": dh,
        "shared_secret": shared,
        "key_schedule_context": context,
        "secret": key_secret,
        "key": _expand(SUITE, key_secret, b"key", context, 16),
        "base_nonce": _expand(SUITE, key_secret, b"base_nonce", context, 12),
    }


def seal(ephemeral: bytes, public: bytes, info: bytes, plaintext: bytes, aad: bytes = b"") -> bytes:
    """Returns a seal made with a given ephemeral private key."""
    steps = hpke_steps(ephemeral, public, info)
    ciphertext = AESGCM(steps["key"]).encrypt(steps["base_nonce"], plaintext, aad)
    return steps["enc"] + ciphertext


# ---- keys and descriptors -----------------------------------------------------------------------

COORDINATOR, SHUFFLER, STRANGER = (secret(n) for n in ("coordinator", "shuffler", "stranger"))
ANALYZER, BATCH = secret("analyzer"), secret("batch")
RUN_ID = secret("run").hex()[:32]
NOW = 1_800_000_000
N = 200


def ed25519(private: bytes) -> str:
    """Returns the public key, hex."""
    return signatures.public_key(private).hex()


def x25519(private: bytes) -> bytes:
    """Returns the public key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


KEYS = {
    "coordinator": {"private": COORDINATOR.hex(), "public": ed25519(COORDINATOR)},
    "shuffler": {"private": SHUFFLER.hex(), "public": ed25519(SHUFFLER)},
    "analyzer": {"private": ANALYZER.hex(), "public": x25519(ANALYZER).hex()},
    "batch": {"private": BATCH.hex(), "public": x25519(BATCH).hex()},
}
OWNER: Json = {
    "coordinator_key": KEYS["coordinator"]["public"],
    "shuffler_key": KEYS["shuffler"]["public"],
    "shuffler_id": "shuffler-1",
    "epsilon": 30.0,
    "beta": 0.01,
    "dishonest_fraction": 0.05,
    "environment": "Example-v0",
    "states": 2,
    "actions": 2,
    "horizon": 2,
    "reward_low": 0.0,
    "reward_high": 1.0,
    "support": None,
    "homogeneous": None,
    "trust_models": ["shuffle", "local", "central"],
    "aggregations": ["messages", "sums"],
    "max_owner_share": 1.0,
    "analyzer_keys": None,
    "max_seconds": 86_400,
    "shortest_epoch": None,
    "max_episode_seconds": 604_800,
    "test_entry": False,
    "loopback": False,
}
"""Pins and demands of the owner in all vectors, unless a vector says otherwise."""

FAMILIES: tuple[Families, ...] = ("joint", "lean", "paper")
SUPPORT: Json = {"start": [0], "next": [[[[0], [0, 1]], [[1], [0, 1]]]]}
FLIPS = {"kind": "flips", "bits": 1, "p_numerator": 1 << 29, "p_log2": 32}
LAPLACE = {"kind": "laplace", "bits": 1, "p_numerator": 1 << 30, "p_log2": 32}
HALVES = {"bits": 5, "p_numerator": 1, "p_log2": 1}
ONE_STEP: Json = {"layer": 1, "data_slots": 1}
WEAKEST: Json = {"epsilon": 100.0, "beta": 0.99, "dishonest_fraction": 0.0}
FAIR = {"kind": "binomial", "bits": 400, "p_numerator": 1, "p_log2": 1}
ONE: Json = {"data_slots": 1, "noise_slots": 0}
WORKFLOWS: dict[str, Json] = {
    "messages": {"noise": {"bits": 1, "p_numerator": 1, "p_log2": 3}, "noise_slots": 16},
    "sums": {"aggregation": "sums", "word_bits": 16, **ONE},
    "local": {"trust": "local", "noise": FLIPS, **ONE},
    "central": {"trust": "central", "noise": LAPLACE, **ONE},
}


def fields(**changes: Json | Value) -> Json:
    """Returns a valid descriptor's members, with changes."""
    run_id, deployment = changes.get("run_id", RUN_ID), changes.get("deployment", 0)
    base: Json = {
        "version": 1,
        "run_id": run_id,
        "batch_id": signatures.batch_id(str(run_id), cast("int", deployment)),
        "shuffler_id": "shuffler-1",
        "deployment": deployment,
        "trust": "shuffle",
        "aggregation": "messages",
        "word_bits": None,
        "environment": "Example-v0",
        "n": N,
        "expires_at": NOW + 3_600,
        "states": 2,
        "actions": 2,
        "horizon": 2,
        "reward_low": 0.0,
        "reward_high": 1.0,
        "families": "joint",
        "support": None,
        "homogeneous": False,
        "layer": None,
        "policies": [[[0, 1], [1, 0]], [[1, 1], [1, 1]]],
        "weights": [1 << 30, 3 << 30],
        "noise": {"bits": 1, "p_numerator": 1, "p_log2": 3},
        "data_slots": 2,
        "noise_slots": 16,
        "guarantee": {"epsilon": 30.0, "beta": 0.01, "dishonest_fraction": 0.05},
        "owner_share": 1.0,
        "analyzer_key": KEYS["analyzer"]["public"],
        "test_seed": None,
    }
    return base | changes


def written(**changes: Json | Value) -> str:
    """Returns a descriptor's text."""
    return json.dumps(fields(**changes), separators=(",", ":"))


def signed(
    text: str,
    coordinator: bytes = COORDINATOR,
    shuffler: bytes = SHUFFLER,
    batch_key: str = KEYS["batch"]["public"],
) -> Json:
    """Returns the envelope of a descriptor's text."""
    data = text.encode()
    digest = hashlib.sha256(d.LABEL_DIGEST + data).digest()
    return {
        "descriptor": text,
        "coordinator_signature": signatures.sign_deposit(coordinator, data),
        "batch_key": batch_key,
        "shuffler_signature": signatures.countersign(shuffler, digest, bytes.fromhex(batch_key)),
    }


def descriptors() -> dict[str, str]:
    """Returns the texts of valid descriptors by name."""
    texts = {}
    for workflow_name, families, layer, support in product(
        WORKFLOWS, FAMILIES, (None, 1), (None, SUPPORT)
    ):
        scope, declared = ("all" if layer is None else "one"), ("declared" if support else "any")
        sizes = Sizes(2, 2, 2)
        cells = CounterLayout(sizes, families, layer).cells
        changes = {"families": families, "layer": layer, "support": support, "data_slots": cells}
        texts[f"{workflow_name} {families} {scope} {declared}"] = written(
            **changes | WORKFLOWS[workflow_name]
        )
    wide: Json = {"states": 4, "horizon": 6, "data_slots": 6, "noise_slots": 24}
    wide["noise"] = {"bits": 1, "p_numerator": 1, "p_log2": 6}
    loose = {"guarantee": {"epsilon": 100.0, "beta": 0.99, "dishonest_fraction": 0.0}}
    policy = [[0, 1, 0, 1]] * 6
    texts["two bytes an index"] = written(**wide | loose, policies=[policy], weights=[1 << 32])
    texts["tables for each step"] = written(
        support={"start": [0, 1], "next": [SUPPORT["next"][0], [[[1], [0]], [[0], [1]]]]}
    )
    texts["binomial noise"] = written(**WORKFLOWS["central"] | {"noise": FAIR})
    texts["words of 32 bits"] = written(**WORKFLOWS["sums"] | {"n": 70_000, "word_bits": 32})
    texts["a limit of an owner's share"] = written(owner_share=0.05)
    texts["epochs"] = written(epoch_seconds=604_800)
    texts["long episodes"] = written(episode_seconds=1_200)
    texts["rewards beyond 0 and 1"] = written(reward_low=-2, reward_high=1.5)
    least = {k: v for k, v in fields().items() if k not in DEFAULTS}
    texts["only members without a default"] = json.dumps(least)
    texts["other blanks and order"] = "\n " + json.dumps(fields(), indent=1, sort_keys=True) + "\n"
    texts["escapes"] = written().replace("Example", "\\u0045xample")
    texts["overflow"] = written(**ONE_STEP, n=1, noise=HALVES, noise_slots=22, guarantee=WEAKEST)
    return texts


DEFAULTS = {
    *("version", "trust", "aggregation", "word_bits", "support", "homogeneous", "layer"),
    *("owner_share", "test_seed"),
}


OWNERS: dict[str, Json] = {
    "two bytes an index": {"states": 4, "horizon": 6, "beta": 0.99, "epsilon": 100.0},
    "epochs": {"shortest_epoch": 604_800},
    "overflow": {"beta": 0.99, "dishonest_fraction": 0.0},
}
"""For each descriptor that `OWNER` refuses, the settings of an owner who accepts it."""


def context_of(text: str) -> d.Context:
    """Returns a parsed descriptor."""
    return d.parse(text.encode())


def descriptor_vectors() -> Json:
    """Returns valid descriptors, with everything that follows from their bytes."""
    vectors = []
    for name, text in descriptors().items():
        context = context_of(text)
        batch, layout = context.descriptor, context.descriptor.layout
        vectors.append(
            {
                "name": name,
                "owner": OWNERS.get(name, {}),
                **signed(text),
                "digest": context.digest.hex(),
                "counters": layout.counters,
                "width": layout.width,
                "cells": layout.cells,
                "messages": batch.padding.messages,
                "message_bytes": batch.message_bytes,
                "report_bytes": batch.report_bytes,
                "owner_slots": batch.owner_slots,
            }
        )
    ids = [
        {"run_id": run, "deployment": number, "batch_id": signatures.batch_id(run, number)}
        for run, number in ((RUN_ID, 0), (RUN_ID, 1), ("ff" * 16, 2**53 - 1))
    ]
    keys = [{"public": KEYS[n]["public"], "key_id": key_id(n)} for n in ("analyzer", "batch")]
    shares = ((1.0, 4), (0.5, 5), (0.3, 10), (0.29, 100), (0.05, 39), (0.07, 100))
    slots = [
        {"owner_share": s, "n": n, "owner_slots": n if s == 1 else n - honest_reports(n, s)}
        for s, n in shares
    ]
    return {
        "now": NOW,
        "keys": KEYS,
        "owner": OWNER,
        "vectors": vectors,
        "batch_ids": ids,
        "key_ids": keys,
        "owner_slots": slots,
    }


def key_id(name: str) -> str:
    """Returns the id of a named public key."""
    return signatures.key_id(bytes.fromhex(KEYS[name]["public"]))


# ---- refusals -----------------------------------------------------------------------------------


def refusal_vectors() -> Json:
    """Returns envelopes with one fault or none, the check that finds the fault, and the problem."""
    return {"now": NOW, "keys": KEYS, "owner": OWNER, "vectors": list(_refusals())}


def _refusals() -> Iterator[Json]:
    yield from _signature_faults()
    for name, check, problem, changes in CONTENT:
        owner = changes.get("owner", {})
        rest = {member: value for member, value in changes.items() if member != "owner"}
        yield _case(name, check, problem, signed(written(**rest))) | {"owner": owner}
    low = signed(written(), batch_key=LOW_ORDER[1])
    yield _case("batch key of low order", 23, "wrong-key", low)


def _case(name: str, check: int, problem: str | None, envelope: Json) -> Json:
    asked = json.loads(envelope["descriptor"])["batch_id"]
    row = {"name": name, "check": check, "problem": problem, "asked": asked}
    return row | envelope | {"owner": {}}


def _signature_faults() -> Iterator[Json]:
    good, other = signed(written()), signed(written(deployment=1))
    raw = Ed25519PrivateKey.from_private_bytes(COORDINATOR).sign(written().encode()).hex()
    digits = good["descriptor"].replace('"n":200', '"n":201')
    for name, check, envelope in (
        ("signed by a stranger", 3, signed(written(), coordinator=STRANGER)),
        ("signed by the shuffler", 3, signed(written(), coordinator=SHUFFLER)),
        ("one digit of the descriptor changed", 3, good | {"descriptor": digits}),
        ("one blank added after signing", 3, good | {"descriptor": good["descriptor"] + " "}),
        ("signed without a label", 3, good | {"coordinator_signature": raw}),
        ("countersigned by a stranger", 4, signed(written(), shuffler=STRANGER)),
        ("countersigned by the coordinator", 4, signed(written(), shuffler=COORDINATOR)),
        ("another batch key", 4, good | {"batch_key": KEYS["analyzer"]["public"]}),
        (
            "countersignature of another descriptor",
            4,
            good | {"shuffler_signature": other["shuffler_signature"]},
        ),
    ):
        yield _case(name, check, "bad-signature", envelope)
    yield _case("another batch than asked for", 5, "wrong-recipient", good) | {"asked": "ff" * 16}


QUARTERS: Json = {"reward_low": 0.25, "reward_high": 0.75}
QUARTERS["owner"] = dict(QUARTERS)
STAYING: Json = {"start": [0], "next": [[[[0], [0]], [[0, 1], [0, 1]]]]}
"""State 1 is never reached."""
SILENT_ROW: Json = STAYING | {"next": [[[[0], [0]], [[], []]]]}
EVERY: Json = {"start": [0], "next": [[[[0, 1], [0, 1]], [[0, 1], [0, 1]]]]}
SILENT: Json = {
    "owner": {"dishonest_fraction": 0.0, "epsilon": 5.0},
    "owner_share": 0.9,
    "guarantee": {"epsilon": 100.0, "beta": 0.9, "dishonest_fraction": 0.9},
}
FAR: Json = {"owner": {"shortest_epoch": 60}, "epoch_seconds": 600, "expires_at": NOW + 1_200}
WEEKLY: Json = {"owner": {"shortest_epoch": 604_800}}
SHARE: Json = {"owner": {"max_owner_share": 0.04}}

CONTENT: tuple[tuple[str, int, str | None, Json], ...] = (
    ("a valid batch", 0, None, {}),
    ("an unknown member", 2, "malformed", {"colour": "red"}),
    ("a batch id that does not follow", 6, "wrong-recipient", {"batch_id": "ab" * 16}),
    ("another shuffler", 7, "wrong-recipient", {"shuffler_id": "shuffler-2"}),
    ("over", 8, "late", {"expires_at": NOW}),
    ("one second left", 0, None, {"expires_at": NOW + 1}),
    ("as long as allowed", 0, None, {"expires_at": NOW + 86_400}),
    ("open too long", 9, "wrong-size", {"expires_at": NOW + 86_401}),
    ("the longest episode", 0, None, {"episode_seconds": 604_800}),
    ("an episode too long", 10, "wrong-size", {"episode_seconds": 604_801}),
    (
        "sums not allowed",
        11,
        "trust-refused",
        {"owner": {"aggregations": ["messages"]}, **WORKFLOWS["sums"]},
    ),
    ("messages not allowed", 11, "trust-refused", {"owner": {"aggregations": ["sums"]}}),
    *(
        (
            f"{trust} not allowed",
            12,
            "trust-refused",
            {"owner": {"trust_models": ["shuffle"]}, **WORKFLOWS[trust]},
        )
        for trust in ("local", "central")
    ),
    ("epochs not allowed", 13, "epoch-refused", {"epoch_seconds": 604_800}),
    ("epochs as long as allowed", 0, None, WEEKLY | {"epoch_seconds": 604_800}),
    ("epochs too short", 13, "epoch-refused", WEEKLY | {"epoch_seconds": 604_799}),
    ("the next epoch", 0, None, FAR | {"expires_at": NOW + 1_199}),
    ("an epoch after the next", 14, "epoch-refused", FAR),
    (
        "a pinned analyzer key",
        0,
        None,
        {"owner": {"analyzer_keys": ["00" * 32, KEYS["analyzer"]["public"]]}},
    ),
    ("no pinned analyzer key", 15, "outdated-key", {"owner": {"analyzer_keys": ["00" * 32]}}),
    ("another environment", 16, "wrong-recipient", {"environment": "Other-v0"}),
    ("another horizon", 17, "wrong-size", {"owner": {"horizon": 3}}),
    ("narrower rewards", 18, "wrong-size", {"reward_high": 0.5}),
    ("rewards that begin above", 18, "wrong-size", {"reward_low": 0.1}),
    ("rewards as declared here", 0, None, QUARTERS),
    ("a least reward that is too large", 18, "wrong-size", QUARTERS | {"reward_low": 0.3}),
    ("a greatest reward that is too small", 18, "wrong-size", QUARTERS | {"reward_high": 0.7}),
    (
        "steps that differ here",
        19,
        "wrong-recipient",
        {"homogeneous": True, "owner": {"homogeneous": False}},
    ),
    ("steps of which nothing is declared", 0, None, {"homogeneous": True}),
    (
        "a support that leaves out transitions",
        20,
        "wrong-recipient",
        {"support": SUPPORT, "owner": {"support": EVERY}},
    ),
    (
        "a support that leaves out what is never reached",
        0,
        None,
        {"support": SILENT_ROW, "owner": {"support": STAYING}},
    ),
    (
        "a support that leaves out a start",
        20,
        "wrong-recipient",
        {"support": STAYING, "owner": {"support": STAYING | {"start": [0, 1]}}},
    ),
    ("a support with more transitions", 0, None, {"support": EVERY, "owner": {"support": SUPPORT}}),
    ("seeded", 21, "test-entry-refused", {"test_seed": 0}),
    (
        "seeded, allowed, not on loopback",
        21,
        "test-entry-refused",
        {"test_seed": 0, "owner": {"test_entry": True}},
    ),
    *(
        (f"analyzer key of low order ({i})", 22, "wrong-key", {"analyzer_key": key})
        for i, key in enumerate(LOW_ORDER)
    ),
    ("an owner's share too large", 24, "weak-guarantee", SHARE | {"owner_share": 0.05}),
    ("no limit of shares", 24, "weak-guarantee", SHARE),
    ("epsilon too large", 25, "weak-guarantee", {"owner": {"epsilon": 0.5}}),
    ("beta too small", 25, "weak-guarantee", {"owner": {"beta": 1e-9, "epsilon": 3.0}}),
    (
        "too many dishonest reports",
        25,
        "weak-guarantee",
        {"owner": {"dishonest_fraction": 0.95, "epsilon": 5.0}},
    ),
    ("the largest owner's silence", 25, "weak-guarantee", SILENT),
    ("the same, no share named", 0, None, SILENT | {"owner_share": 1.0}),
    ("no slots for noise", 25, "weak-guarantee", {"noise_slots": 0}),
    ("two reports", 25, "weak-guarantee", {"n": 2, "owner": {"epsilon": 5.0}}),
    (
        "too few flips",
        25,
        "weak-guarantee",
        {
            **WORKFLOWS["local"],
            "noise": FLIPS | {"p_numerator": 1 << 20},
            "owner": {"epsilon": 10.0},
        },
    ),
    (
        "too little noise of the coordinator",
        25,
        "weak-guarantee",
        {**WORKFLOWS["central"], "noise": FAIR | {"bits": 3}},
    ),
    (
        "a promise that the noise does not keep",
        26,
        "weak-guarantee",
        {"guarantee": {"epsilon": 0.5, "beta": 0.01, "dishonest_fraction": 0.05}},
    ),
    (
        "a promise kept at the owner's dishonest fraction only",
        26,
        "weak-guarantee",
        {"guarantee": {"epsilon": 1.0, "beta": 0.01, "dishonest_fraction": 0.5}},
    ),
    (
        "a promise kept at the owner's beta only",
        26,
        "weak-guarantee",
        {"guarantee": {"epsilon": 1.0, "beta": 0.0001, "dishonest_fraction": 0.05}},
    ),
)
"""Name, number of the check (0: accepted), problem, and what changes in descriptor and owner."""


# ---- parsing ------------------------------------------------------------------------------------


def parsing_vectors() -> Json:
    """Returns texts with their problem: null if a text must parse.

    ``repeat`` says, for each mark in the text, which part stands in its place, and how many times.
    """
    return {"vectors": [*_limits(), *_faults()]}


def _faults() -> Iterator[Json]:
    text = written()
    yield {"name": "valid", "descriptor": text, "problem": None}
    replaced = {
        "a member twice": ('"n":200', '"n":200,"n":200'),
        "a member of noise twice": ('"bits":1', '"bits":1,"bits":1'),
        "an integer with a fraction": ('"n":200', '"n":200.0'),
        "an integer with an exponent": ('"n":200', '"n":2e2'),
        "an integer as a string": ('"n":200', '"n":"200"'),
        "an integer as a boolean": ('"n":200', '"n":true'),
        "null where it is not allowed": ('"n":200', '"n":null'),
        "a boolean as an integer": ('"homogeneous":false', '"homogeneous":0'),
        "not a number": ('"beta":0.01', '"beta":NaN'),
        "an infinite number": ('"reward_high":1.0', '"reward_high":1e999'),
        "a comment": ('"n":200', '"n":200/**/'),
        "a comma too many": ('"test_seed":null}', '"test_seed":null,}'),
        "text after the object": ('"test_seed":null}', '"test_seed":null}x'),
        "upper-case digits": (RUN_ID, RUN_ID.upper()),
        "upper-case digits of a key": (
            f"{KEYS['analyzer']['public']}",
            f"{KEYS['analyzer']['public']}".upper(),
        ),
        "a line feed in a name": ("shuffler-1", "shuffler-1\\n"),
        "a letter outside ASCII": ("shuffler-1", "shuffler-\\u0661"),
        "half a surrogate pair": ("shuffler-1", "shuffler-\\ud800"),
        "a member twice, once with an escape": ('"n":200', '"n":200,"\\u006e":200'),
        "an integer that begins with 0": ('"n":200', '"n":0200'),
        "lists in a hundred lists": ('"test_seed":null', f'"test_seed":{"[" * 100}{"]" * 100}'),
        "another version": ('"version":1', '"version":2'),
        "an unknown member of noise": ('"bits":1', '"bits":1,"seed":7'),
        "an unknown member of the guarantee": ('"beta"', '"delta":0.1,"beta"'),
    }
    for name, (old, new) in replaced.items():
        if old not in text:
            raise ValueError(f"{name}: nothing is replaced")
        yield {"name": name, "descriptor": text.replace(old, new), "problem": "malformed"}
    yield {
        "name": "numbers written as integers",
        "descriptor": text.replace("1.0,", "1,"),
        "problem": None,
    }
    negative = {"-0 as an integer": '"deployment":0', "-0 as a number": '"reward_low":0.0'}
    for name, old in negative.items():
        yield {
            "name": name,
            "descriptor": text.replace(old, old.replace(":", ":-")),
            "problem": None,
        }
    yield {"name": "an array", "descriptor": "[]", "problem": "malformed"}
    for name in ("n", "run_id", "noise", "guarantee", "families", "analyzer_key"):
        rest = {k: v for k, v in fields().items() if k != name}
        yield {"name": f"no {name}", "descriptor": json.dumps(rest), "problem": "malformed"}
    for name, changes in _bad_fields().items():
        yield {"name": name, "descriptor": written(**changes), "problem": "malformed"}


def _bad_fields() -> dict[str, Json]:
    noise = fields()["noise"]
    sums_batch, local, central = (WORKFLOWS[n] for n in ("sums", "local", "central"))
    table = SUPPORT["next"][0]

    def supported(start: list[int], *tables: list[Any]) -> Json:
        return {"support": {"start": start, "next": list(tables)}}

    return {
        "rewards upside down": {"reward_low": 1.0, "reward_high": 0.0},
        "rewards without a range": {"reward_low": 1.0},
        "layer beyond the horizon": {"layer": 2, "data_slots": 1},
        "a negative layer": {"layer": -1, "data_slots": 1},
        "an action too large": {"policies": [[[0, 2], [1, 0]]], "weights": [1 << 32]},
        "a negative action": {"policies": [[[0, -1], [1, 0]]], "weights": [1 << 32]},
        "a policy too short": {"policies": [[[0, 1]]], "weights": [1 << 32]},
        "a policy with a state too few": {"policies": [[[0], [1]]], "weights": [1 << 32]},
        "weights that do not sum to 2^32": {"weights": [1 << 30, (3 << 30) - 1]},
        "a weight of zero": {"weights": [0, 1 << 32]},
        "a weight too few": {"weights": [1 << 32]},
        "a probability of one": {"noise": noise | {"p_numerator": 8}},
        "no noise bits": {"noise": noise | {"bits": 0}},
        "flips under shuffle": {"noise": FLIPS},
        "bernoulli under local": {**local, "noise": noise},
        "bernoulli under central": {**central, "noise": noise},
        "flips of a half": {**local, "noise": FLIPS | {"p_numerator": 1 << 31}},
        "flips with two bits": {**local, "noise": FLIPS | {"bits": 2}},
        "flips over 2^31": {**local, "noise": FLIPS | {"p_log2": 31, "p_numerator": 1 << 28}},
        "a laplace ratio of one": {**central, "noise": LAPLACE | {"p_numerator": 1 << 32}},
        "binomial of unfair bits": {**central, "noise": FAIR | {"p_log2": 2}},
        "a data slot too few": {"data_slots": 1},
        "a data slot too many": {"data_slots": 3},
        "local with padding": {**local, "noise_slots": 1},
        "central with a slot for each index": {**central, "data_slots": 2},
        "sums with padding": {**sums_batch, "noise_slots": 16},
        "sums under local": {**local, "aggregation": "sums"},
        "sums in larger words": {**sums_batch, "word_bits": 32},
        "sums without words": {**sums_batch, "word_bits": None},
        "messages with words": {"word_bits": 16},
        "sums that do not fit": {**sums_batch, "n": 70_000},
        "sums that fit no word": {**sums_batch, "n": 1 << 32, "word_bits": 32},
        "an owner's share above gamma": {"owner_share": 0.06},
        "an owner's share of no slot": {"owner_share": 0.05, "n": 19},
        "an owner's share of zero": {"owner_share": 0.0},
        "epsilon of zero": {"guarantee": {"epsilon": 0.0, "beta": 0.01, "dishonest_fraction": 0.0}},
        "epsilon above 100": {
            "guarantee": {"epsilon": 100.1, "beta": 0.01, "dishonest_fraction": 0.0}
        },
        "beta of one": {"guarantee": {"epsilon": 1.0, "beta": 1.0, "dishonest_fraction": 0.0}},
        "gamma of one": {"guarantee": {"epsilon": 1.0, "beta": 0.1, "dishonest_fraction": 1.0}},
        "an epoch of zero": {"epoch_seconds": 0},
        "an episode of zero": {"episode_seconds": 0},
        "a negative seed": {"test_seed": -1},
        "support: no start": supported([], table),
        "support: a state too large": supported([0], [[[0], [0, 2]], [[1], [0, 1]]]),
        "support: states not ascending": supported([0], [[[0], [1, 0]], [[1], [0, 1]]]),
        "support: a state twice": supported([0, 0], table),
        "support: no successor": supported([0], [[[0], []], [[1], [0, 1]]]),
        "support: an action too few": supported([0], [[[0]], [[1]]]),
        "support: three tables for two steps": supported([0], table, table, table),
        "support: an unknown member": {"support": SUPPORT | {"colour": "red"}},
        "a key too short": {"analyzer_key": "00" * 31},
    }


def _limits() -> Iterator[Json]:
    """Yields two texts for each limit: one at the limit parses, and one beyond it does not."""
    top = 1 << 32
    one: Json = {"weights": [top], "layer": 0, "data_slots": 1}
    flat = one | {"horizon": 1, "policies": [[["@zeros", 0]]]}
    alone = {"support": {"start": [0], "next": [["@rows", [[0]]]]}, "actions": 1}
    wide = flat | {"states": 512, "actions": 64}
    noise = fields()["noise"]
    narrow = {"states": 1, "policies": [[[0], [0]]], "weights": [top]}
    long = one | {"states": 1, "policies": [["@rows", [0]]]}
    many = {"policies": ["@policies", [[0, 1], [1, 0]]]}
    share, half, flips, raw = 1 << 20, 1 << 19, WORKFLOWS["local"], WORKFLOWS["central"]
    fits = _largest_fit(noise)
    cases: tuple[tuple[Any, ...], ...] = (
        ("deployment", {"deployment": 2**53 - 1}, {"deployment": 2**53}),
        ("expires_at", {"expires_at": 2**53 - 1}, {"expires_at": 2**53}),
        ("n", {"n": top}, {"n": top + 1}),
        ("shuffler_id", {"shuffler_id": "s" * 100}, {"shuffler_id": "s" * 101}),
        ("messages of a report", {"noise_slots": 65_534}, {"noise_slots": 65_535}),
        ("epoch_seconds", {"epoch_seconds": 3_162_240_000}, {"epoch_seconds": 3_162_240_001}),
        ("episode_seconds", {"episode_seconds": 1_296_000}, {"episode_seconds": 1_296_001}),
        ("p_log2", {"noise": noise | {"p_log2": 32}}, {"noise": noise | {"p_log2": 33}}),
        (
            "flips",
            *(flips | {"noise": FLIPS | {"p_numerator": k}} for k in ((1 << 31) - 1, 1 << 31)),
        ),
        ("fewest flips", *(flips | {"noise": FLIPS | {"p_numerator": k}} for k in (1, 0))),
        ("laplace", *(raw | {"noise": LAPLACE | {"p_numerator": k}} for k in (top - 1, top))),
        ("least laplace", *(raw | {"noise": LAPLACE | {"p_numerator": k}} for k in (1, 0))),
        ("binomial", *(raw | {"noise": FAIR | {"bits": k}} for k in (1, 0))),
        ("actions", narrow | {"actions": 1_000}, narrow | {"actions": 1_001}),
        (
            "horizon",
            long | {"horizon": 1_000},
            long | {"horizon": 1_001},
            ("@rows", "[0],", 999, 1_000),
        ),
        (
            "states",
            flat | alone | {"states": 10_000},
            flat | alone | {"states": 10_001},
            ("@zeros", "0,", 9_999, 10_000),
            ("@rows", "[[0]],", 9_999, 10_000),
        ),
        (
            "policies",
            many | {"weights": ["@weights", share]},
            many | {"weights": ["@weights", half, half]},
            ("@policies", "[[0,1],[1,0]],", 4_095, 4_096),
            ("@weights", f"{share},", 4_095, 4_095),
        ),
        ("counters", wide, wide | {"actions": 65}, ("@zeros", "0,", 511, 511)),
        (
            "noise bits of a report",
            wide | {"noise": noise | {"bits": 16}},
            wide | {"noise": noise | {"bits": 17}},
            ("@zeros", "0,", 511, 511),
        ),
        ("words of 16 bits", *(WORKFLOWS["sums"] | {"n": n} for n in (fits, fits + 1))),
    )
    for name, at, beyond, *marks in cases:
        for which, changes in enumerate((at, beyond)):
            text = written(**changes)
            repeat: Json = {}
            for mark, part, *times in marks:
                text = text.replace(f'"{mark}",', mark)
                repeat[mark] = {"text": part, "times": times[which]}
            made: Json = {
                "name": f"{name}: " + ("at the limit", "beyond")[which],
                "descriptor": text,
            }
            made |= {"repeat": repeat} if repeat else {}
            yield made | {"problem": (None, "malformed")[which]}
    text, most = written(), 1 << 24
    for name, size, problem in (("at the limit", most, None), ("beyond", most + 1, "too-large")):
        blanks: Json = {"@blanks": {"text": " ", "times": size - len(text)}}
        whole: Json = {"name": f"bytes: {name}", "descriptor": text + "@blanks", "repeat": blanks}
        yield whole | {"problem": problem}


def _largest_fit(noise: Json) -> int:
    """Returns the largest n for which words of 16 bits have room for all data and noise."""
    made = Noise(noise["bits"], noise["p_numerator"], noise["p_log2"])
    return max(n for n in range(50_000, 65_536) if sums.word_bits(n, made) == 16)


# ---- counters -----------------------------------------------------------------------------------


def counter_vectors() -> Json:
    """Returns layouts of counters, with episodes' indices: null for one outside the support."""
    steps: Json = {"start": [0, 2], "next": [_table(h) for h in range(3)]}
    always: Json = {"start": [1], "next": [_table(0)]}
    vectors = []
    supports: tuple[tuple[str, Json | None], ...] = (
        ("no support", None),
        ("one table", always),
        ("three tables", steps),
    )
    for families, layer, (declared, support) in product(FAMILIES, (None, 0, 2), supports):
        layout, scope = _layout(families, layer, support), "all steps"
        scope = scope if layer is None else f"step {layer}"
        episodes = []
        for number in range(3):
            episode = _episode(f"counters {number}", Sizes(4, 2, 3), support)
            episodes.append(_shown(episode) | {"indices": layout.encode(episode).tolist()})
        if support:
            outside = _episode("outside", Sizes(4, 2, 3), support)
            outside.states[-1] = _impossible(support, outside)
            episodes.append(_shown(outside) | {"indices": None})
        vectors.append(
            {
                "name": f"{families}, {scope}, {declared}",
                **{"states": 4, "actions": 2, "horizon": 3, "families": families},
                **{"layer": layer, "support": support},
                **{"counters": layout.counters, "width": layout.width, "cells": layout.cells},
                "episodes": episodes,
            }
        )
    widths = []
    for states, actions, horizon in (
        (1, 1, 1),
        (2, 4, 7),
        (2, 4, 8),
        (16, 8, 16),
        (32, 8, 4),
        (64, 32, 64),
    ):
        layout = CounterLayout(Sizes(states, actions, horizon), "joint")
        row = {"states": states, "actions": actions, "horizon": horizon}
        widths.append(row | {"counters": layout.counters, "width": layout.width})
    return {"vectors": vectors, "widths": widths}


def _layout(families: Families, layer: int | None, support: Json | None) -> CounterLayout:
    declared = None
    if support is not None:
        nested = tuple(tuple(tuple(map(tuple, row)) for row in table) for table in support["next"])
        declared = Support(tuple(support["start"]), cast("Any", nested))
    return CounterLayout(Sizes(4, 2, 3), families, layer, declared)


def _table(h: int) -> list[list[list[int]]]:
    """Returns the one to three successors of each of 4 states and 2 actions, in table ``h``."""
    tape = Tape(f"table {h}")
    chosen = []
    for _ in range(4):
        row = []
        for _ in range(2):
            a, b = tape.read(2)
            row.append(sorted({a % 4, b % 4, (a + b) % 4}))
        chosen.append(row)
    return chosen


def _episode(name: str, sizes: Sizes, support: Json | None) -> Episode:
    """Returns an episode drawn from a tape, possible under the support."""
    tape = Tape(f"episode {name}")
    starts = support["start"] if support else range(sizes.X)
    states, actions, rewards = [starts[tape.read(1)[0] % len(starts)]], [], []
    for h in range(sizes.H):
        action, choice, reward = (byte for byte in tape.read(3))
        actions.append(action % sizes.A)
        after = range(sizes.X)
        if support:
            tables = support["next"]
            after = tables[h % len(tables)][states[-1]][actions[-1]]
        states.append(after[choice % len(after)])
        rewards.append(reward % 2)
    return Episode(*(np.array(values, dtype=np.int64) for values in (states, actions, rewards)))


def _impossible(support: Json, episode: Episode) -> int:
    """Returns a last state that the support does not allow for this episode."""
    tables = support["next"]
    table = tables[(len(episode.actions) - 1) % len(tables)]
    return min(set(range(4)) - set(table[episode.states[-2]][episode.actions[-1]]))


def _shown(episode: Episode) -> Json:
    parts = (episode.states, episode.actions, episode.rewards)
    return dict(zip(("states", "actions", "rewards"), (p.tolist() for p in parts), strict=True))


# ---- draws --------------------------------------------------------------------------------------


def draw_vectors() -> Json:
    """Returns draws from given bytes. A node may draw in other ways that have the same law."""
    return {
        "policies": _policy_draws(),
        "rewards": [*_reward_draws()],
        "flips": _flip_draws(),
        "overflow": _overflow_draws(),
        "noise": [_noise_draw(*row) for row in NOISE_DRAWS],
    }


def _policy_draws() -> list[Json]:
    mixture = context_of(written()).descriptor.mixture
    words = (0, 1, (1 << 30) - 1, 1 << 30, (1 << 32) - 1)
    first = mixture.policies[0].tolist()
    chosen = [(w, 0 if mixture.pick(w).tolist() == first else 1) for w in words]
    return [{"weights": [1 << 30, 3 << 30], "word": w, "policy": number} for w, number in chosen]


def _reward_draws() -> Iterator[Json]:
    for low, high, reward in ((0.0, 1.0, 0.25), (-2.0, 2.0, 1.0), (0.0, 1.0, 0.0), (0.0, 1.0, 1.0)):
        edge = int((reward - low) / (high - low) * (1 << 53))
        for word in sorted({max(0, edge - 1), min(edge, (1 << 53) - 1)}):
            data = (word << 11 | 0x7FF).to_bytes(8, "little")
            bit = bernoulli(Bytes(data), reward_mean(reward, (low, high)))  # type: ignore[arg-type]
            row = {"reward_low": low, "reward_high": high, "reward": reward}
            yield row | {"word_le": data.hex(), "bit": bit}


def _flip_draws() -> list[Json]:
    rows = []
    for name in ("joint", "paper"):
        batch = context_of(descriptors()[f"local {name} all any"]).descriptor
        episode, tape = _episode(f"flips {name}", Sizes(2, 2, 2), None), Tape(f"flips {name}")
        layout, noise = batch.layout, batch.batch_noise
        report = workflow.encode(layout, noise, batch.padding, episode, tape.random)
        row = {"descriptor": f"local {name} all any", **_shown(episode)}
        row |= {"words_le": Tape(tape.name).read(tape.used).hex()}
        rows.append(row | {"plaintext": bytes(report.tolist()).hex()})
    edge = (1 << 29).to_bytes(4, "little") + ((1 << 29) - 1).to_bytes(4, "little")
    batch = context_of(descriptors()["local joint all any"]).descriptor
    report = workflow.encode(batch.layout, batch.batch_noise, batch.padding, None, Bytes(edge * 16))  # type: ignore[arg-type]
    plaintext = bytes(report.tolist()).hex()
    last = {"descriptor": "local joint all any", "states": None, "words_le": (edge * 16).hex()}
    return [*rows, last | {"plaintext": plaintext}]


def _overflow_draws() -> list[Json]:
    rows = []
    for noise_slots, noise in ((4, [0, 0, 3, 5, 7, 7, 9]), (7, [0, 0, 3, 5, 7, 7, 9]), (0, [1, 2])):
        padding, data = Padding(3, noise_slots), np.array([2, 8])
        tape = Tape(f"overflow {noise_slots}")
        kept = shuffle_model.pad(data, np.array(noise), padding, 10, tape.random)
        row: Json = {"data": data.tolist(), "noise": noise, "data_slots": 3}
        row |= {"noise_slots": noise_slots, "dummy": 10}
        row |= {"keys_le": Tape(tape.name).read(tape.used).hex(), "indices": kept.tolist()}
        rows.append(row)
    return rows


NOISE_DRAWS = (
    (4, 1, 1, 3, "fair to one in eight"),
    (3, 5, 3, 2, "five bits of three quarters"),
    (2, 300, 1, 8, "more bits than a block"),
    (2, 1_024, 1, 8, "four blocks at once"),
    (1, 2, (1 << 32) - 1, 32, "nearly always ones"),
    (6, 200, 4_182_461, 32, "p over 2^32"),
)


def _noise_draw(counters: int, bits: int, numerator: int, log2: int, name: str) -> Json:
    """Draws from a tape: if log2 is 8 or more, one where 16 bits do not settle every draw."""
    noise, number = Noise(bits, numerator, log2), 0
    while True:
        tape = Tape(f"noise {name} {number}")
        ones = draw_counts(counters, noise, tape)
        plain = 2 * counters * -(-bits // 256)
        if tape.used > plain or log2 < 8:
            break
        number += 1
    row: Json = {"counters": counters, "bits": bits, "p_numerator": numerator, "p_log2": log2}
    return row | {"bytes": Tape(tape.name).read(tape.used).hex(), "ones": ones.tolist()}


# ---- whole reports ------------------------------------------------------------------------------


def report_vectors() -> Json:
    """Returns whole reports of each workflow, family, scope and support, with all their draws.

    The ephemeral private key of seal i is ``secret(f"{name} {i}")`` with the vector's name.
    """
    names = [*descriptors()][:48]
    names += ["two bytes an index", "tables for each step", "words of 32 bits", "binomial noise"]
    names += ["overflow"]
    vectors = [_report(name, failed=False) for name in names]
    vectors += [_report(f"{w} joint all any", failed=True) for w in WORKFLOWS]
    return {"ephemeral": "SHA-256 of 'riffle vectors: ' NAME ' ' i, in ASCII", "vectors": vectors}


def _report(name: str, *, failed: bool) -> Json:
    context = context_of(descriptors()[name])
    batch, layout = context.descriptor, context.descriptor.layout
    support = json.loads(descriptors()[name])["support"]
    episode = None if failed else _episode(name, batch.sizes, support)
    title = f"{name}, failed" if failed else name
    noise, tape = batch.batch_noise, Tape(f"report {title}")
    made = workflow.encode(layout, noise, batch.padding, episode, tape.random, batch.word_bits)
    vector: Json = {"name": title, "descriptor": name}
    vector["episode"] = None if episode is None else _shown(episode)
    vector["data"] = [] if episode is None else layout.encode(episode).tolist()
    if isinstance(noise, Noise):
        vector["noise"] = draw_counts(layout.counters, noise, Tape(tape.name)).tolist()
    keys = [secret(f"{title} {i}") for i in range(batch.padding.messages + 1)]
    analyzer, outer = x25519(ANALYZER), x25519(BATCH)
    if batch.word_bits:
        vector["vector"] = made.tolist()
        inner = sums.mask(made, keys[0], analyzer, context.mask_info)
    else:
        symbols = batch.symbols
        rows = made.reshape(-1, symbols.count).tolist()
        texts = [b"".join(v.to_bytes(symbols.width, "big") for v in row) for row in rows]
        vector["plaintexts"] = [text.hex() for text in texts]
        if isinstance(noise, Noise) and sum(vector["noise"]) > batch.noise_slots:
            vector["kept"] = made[-batch.noise_slots :].tolist()
        seals = zip(keys, texts, strict=False)
        inner = b"".join(seal(key, analyzer, context.message_info, text) for key, text in seals)
    report = seal(keys[-1], outer, context.report_info, inner)
    lease = secret(f"lease {title}").hex()[:32]
    return vector | {
        "report": report.hex(),
        "lease": lease,
        "frame": frame(lease, report).hex()[:64],
    }


# ---- seals --------------------------------------------------------------------------------------

RFC_9180: Json = {
    "source": "RFC 9180, Appendix A.1.1 (DHKEM X25519, HKDF-SHA256, AES-128-GCM, Base), first seal",
    "info": "4f6465206f6e2061204772656369616e2055726e",
    "skEm": "52c4a758a802cd8b936eceea314432798d5baf2d7e9235dc084ab1b9cfa2f736",
    "pkEm": "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431",
    "skRm": "4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8",
    "pkRm": "3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d",
    "enc": "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431",
    "shared_secret": "fe0e18c9f024ce43799ae393c7e8fe8fce9d218875e8227b0187c04e7d2ea1fc",
    "key_schedule_context": "00725611c9d98c07c03f60095cd32d400d8347d45ed67097bbad50fc56da742d07"
    "cb6cffde367bb0565ba28bb02c90744a20f5ef37f30523526106f637abb05449",
    "secret": "12fff91991e93b48de37e7daddb52981084bd8aa64289c3788471d9a9712f397",
    "key": "4531685d41d65f03dc48f6b8302c05b0",
    "base_nonce": "56d890e5accaaf011cff4b7d",
    "pt": "4265617574792069732074727574682c20747275746820626561757479",
    "aad": "436f756e742d30",
    "ct": "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a9"
    "6d8770ac83d07bea87e13c512a",
}


def hpke_vectors() -> Json:
    """Returns RFC 9180's own vector, Riffle's seals, and seals that must not open."""
    context = context_of(written())
    seals: list[Json] = []
    for name, info, key, text in (
        ("a message of one byte", context.message_info, ANALYZER, b"\x06"),
        ("a message of four bytes", context.message_info, ANALYZER, b"\x00\x01\x00\x02"),
        ("a report", context.report_info, BATCH, bytes(range(49))),
    ):
        ephemeral, public = secret(name), x25519(key)
        steps = {k: v.hex() for k, v in hpke_steps(ephemeral, public, info).items()}
        row: Json = {"name": name, "private": key.hex(), "public": public.hex(), "info": info.hex()}
        row |= {"ephemeral": ephemeral.hex(), "plaintext": text.hex(), **steps}
        seals.append(row | {"seal": seal(ephemeral, public, info, text).hex(), "opens": True})
    return {"rfc9180": RFC_9180, "vectors": [*seals, *_broken_seals(context)]}


def _broken_seals(context: d.Context) -> Iterator[Json]:
    """Yields seals with one fault each. The receiver has the analyzer's key and messages' info."""
    ephemeral, public, text = secret("broken"), x25519(ANALYZER), b"\x06"
    info, digest = context.message_info, context.digest
    whole = seal(ephemeral, public, info, text)
    other = context_of(written(deployment=1))
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for name, made in (
        ("info of a report", seal(ephemeral, public, context.report_info, text)),
        ("info without its zero byte", seal(ephemeral, public, info.replace(b"\0", b"", 1), text)),
        ("info without the digest", seal(ephemeral, public, info[: -len(digest)], text)),
        (
            "the digest in hexadecimal",
            seal(ephemeral, public, info[:-32] + digest.hex().encode(), text),
        ),
        ("a digest without its label", seal(ephemeral, public, info[:-32] + _plain_digest(), text)),
        ("digest of another batch", seal(ephemeral, public, other.message_info, text)),
        ("no info", seal(ephemeral, public, b"", text)),
        ("info as aad", seal(ephemeral, public, b"", text, info)),
        ("the digest as aad", seal(ephemeral, public, info, text, digest)),
        ("another key", seal(ephemeral, x25519(BATCH), info, text)),
        ("one bit changed", flipped),
        ("the tag first", whole[:32] + whole[-16:] + whole[32:-16]),
        ("cut short", whole[:-1]),
    ):
        row = {"name": name, "private": ANALYZER.hex(), "info": info.hex()}
        yield row | {"seal": made.hex(), "opens": False}


def _plain_digest() -> bytes:
    return hashlib.sha256(written().encode()).digest()


# ---- shuffler and analyzer ----------------------------------------------------------------------


def analyzer_vectors() -> Json:
    """Returns the permutation, the counts of messages, and the sum of masked vectors."""
    return {
        "permutations": [_permutation(size) for size in (1, 2, 5, 40)],
        "opened": _opened(),
        "debias": [*_debias()],
        "sum": _summed(),
    }


def _permutation(size: int) -> Json:
    key = secret(f"permutation {size}")
    order = shuffle_model.permutation(size, Keystream(key)).tolist()
    return {"key": key.hex(), "size": size, "order": order}


def _opened() -> Json:
    """Returns messages of a hand-over. Three fail: one does not open, and two name no counter."""
    context, public = context_of(written()), x25519(ANALYZER)
    texts = (b"\x06", b"\x20", b"\x06", b"\x21", b"\xff", b"\x00", b"\x1f")
    info = context.message_info
    seals = [seal(secret(f"opened {i}"), public, info, text) for i, text in enumerate(texts)]
    seals.append(seal(secret("opened"), public, context.report_info, b"\x06"))
    width, counters = context.descriptor.layout.width, context.descriptor.layout.counters
    made = open_histogram(ANALYZER, info, b"".join(seals), width, counters)
    row = {"private": ANALYZER.hex(), "info": info.hex(), "width": width, "counters": counters}
    row |= {"messages": b"".join(seals).hex()}
    return row | {"histogram": made[0].tolist(), "failed": made[1]}


def _debias() -> Iterator[Json]:
    for name, counts, last in (
        ("messages joint one any", [30, 20, 41, 25, 25, 33, 0, 60], 2_966),
        ("local joint one any", [100, 60, 30, 25, 20, 80, 140, 25], 200),
        ("central joint one any", [100, 60, -3, 25, 20, 80, 140, 25], 200),
        ("binomial noise", [200] * 31 + [263], 200),
    ):
        noise = context_of(descriptors()[name]).descriptor.batch_noise
        unbiased = workflow.debias(noise, N, np.array([*counts, last]))
        row: Json = {"descriptor": name, "n": N, "counts": counts, "last": last}
        yield row | {"unbiased": [float(f"{value:.9g}") for value in unbiased]}


def _summed() -> Json:
    """Returns a batch of sums with three reports. One report's key is a point of low order."""
    context = context_of(descriptors()["sums joint one any"])
    C, bits = context.descriptor.layout.counters, 16
    keys, total, info = b"", sums.empty_sum(C, bits), context.mask_info
    for number in range(2):
        vector = np.array([number * 1_000 + c for c in range(C)], dtype=total.dtype)
        report = sums.mask(vector, secret(f"sum {number}"), x25519(ANALYZER), info)
        keys += sums.add(total, report)
    keys += sums.add(total, bytes.fromhex(LOW_ORDER[0]) + bytes(2 * C))
    masks = sums.add_masks(ANALYZER, info, keys, C, bits)
    return {
        "descriptor": "sums joint one any",
        "private": ANALYZER.hex(),
        "info": info.hex(),
        "keys": keys.hex(),
        "sum": total.tobytes().hex(),
        "counts": (total - masks).tolist(),
    }


# ---- the accountant -----------------------------------------------------------------------------


def accountant_vectors() -> Json:
    """Returns batches with lower and upper bounds of epsilon: 7 digits, rounded down and up."""
    rows = []
    for gamma, beta in ((0.0, 1e-5), (0.05, 1e-5), (0.05, 1e-2), (0.3, 1e-3)):
        for name, changes in ACCOUNTED.items():
            batch = context_of(written(**changes)).descriptor
            result = account(batch_event(batch, gamma), beta)
            row: Json = {"name": name, "gamma": gamma, "beta": beta, "n": batch.n}
            row |= {"noise": json.loads(written(**changes))["noise"], "cells": batch.layout.cells}
            row |= {"noise_slots": batch.noise_slots, "counters": batch.layout.counters}
            row |= {"word_bits": batch.word_bits}
            row |= {"overflow": _round(batch_event(batch, gamma).overflow, 1)}
            bounds = (_round(result.epsilon_lower, -1), _round(result.epsilon_upper, 1))
            rows.append(row | dict(zip(("lower", "upper"), bounds, strict=True)))
    return {"vectors": rows}


def _round(value: float, direction: int) -> float | None:
    """Returns a number to 7 digits, rounded up or down; null for infinity."""
    if not np.isfinite(value):
        return None
    near = float(f"{value:.7g}")
    if (near - value) * direction >= 0:
        return near
    step = 10.0 ** (np.floor(np.log10(abs(value))) - 6)
    return float(f"{near + direction * step:.7g}")


RIVER: Json = {
    **{"states": 4, "horizon": 6, "policies": [[[0, 1, 0, 1]] * 6], "weights": [1 << 32]},
    "n": 4_096,
}
_TENTH: Json = {"bits": 133, "p_numerator": 4_172_743, "p_log2": 32}
ACCOUNTED: dict[str, Json] = {
    "messages, joint": RIVER
    | {
        "data_slots": 6,
        "noise_slots": 45,
        "noise": _TENTH | {"bits": 45, "p_numerator": 4_136_996},
    },
    "messages, lean": RIVER
    | {"families": "lean", "data_slots": 12, "noise_slots": 60, "noise": _TENTH | {"bits": 89}},
    "messages, paper": RIVER
    | {"families": "paper", "data_slots": 18, "noise_slots": 80, "noise": _TENTH},
    "messages, one step": RIVER
    | {"layer": 1, "data_slots": 1, "noise_slots": 14, "noise": _TENTH | {"bits": 9}},
    "messages, fair bits": RIVER
    | {"data_slots": 6, "noise_slots": 420, "noise": {"bits": 1, "p_numerator": 1, "p_log2": 1}},
    "messages, too few slots": RIVER
    | {
        "data_slots": 6,
        "noise_slots": 20,
        "noise": _TENTH | {"bits": 45, "p_numerator": 4_136_996},
    },
    "sums": RIVER | WORKFLOWS["sums"] | {"noise": _TENTH | {"bits": 45, "p_numerator": 4_136_996}},
    "local": RIVER | WORKFLOWS["local"],
    "local, one step": RIVER | WORKFLOWS["local"] | {"layer": 0},
    "central, laplace": RIVER | WORKFLOWS["central"],
    "central, binomial": RIVER | WORKFLOWS["central"] | {"noise": FAIR},
}


# ---- requests and answers -----------------------------------------------------------------------


def wire_vectors() -> Json:
    """Returns a node's requests, and for answers whether they are final or need a retry."""
    key = bytes(range(32))
    people = ("ann@example.org", "Ann@example.org", "", "J\u00fcrgen")
    return {
        "requests": asyncio.run(requests()),
        "answers": [*_answers()],
        "pins": PINS,
        "lease_requests": [{"users": n, "valid": 1 <= n <= 2_048} for n in (0, 1, 2_048, 2_049)],
        "user_ids": [{"key": key.hex(), "name": n, "id": opaque_id(key, n)} for n in people],
    }


@dataclass
class _Recorder:
    """An HTTP transport that keeps requests and answers each with the next document."""

    answers: list[str]
    seen: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return httpx.Response(200, text=self.answers.pop(0))


SHOWN_HEADERS = ("authorization", "content-type", "accept-encoding", "riffle-batch-key")


async def requests() -> list[Json]:
    """Returns the requests that the reference node makes for one batch, in their order."""
    from riffle.node_client.shuffler_client import ShufflerClient  # noqa: PLC0415  (much to load)

    batch, user, lease = fields()["batch_id"], "11" * 16, secret("lease").hex()[:32]
    granted = {"user": user, "slot": 0, "lease": lease, "expires_at": NOW + 120}
    recorder = _Recorder(
        [
            OpenBatches(batches=(), lease_seconds=120).model_dump_json(),
            json.dumps(signed(written())),
            json.dumps({"leases": [granted], "refused": []}),
            json.dumps({"results": [{"lease": lease, "outcome": "accepted"}]}),
            json.dumps({"reason": "no-users"}),
        ]
    )
    transport = httpx.MockTransport(recorder)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:8401", transport=transport) as client:
        node = ShufflerClient(client)
        await node.open_batches("TOKEN", 20)
        await node.descriptor("TOKEN", batch)
        await node.lease("TOKEN", batch, [user])
        body = frame(lease, bytes(range(8)))
        await node.upload("TOKEN", batch, [lease], body, NOW, key_id("batch"))
        await node.decline("TOKEN", batch, "no-users")
    return [
        {
            "method": request.method,
            "target": request.url.raw_path.decode(),
            "headers": {n: request.headers[n] for n in SHOWN_HEADERS if n in request.headers},
            "body": request.content.hex(),
        }
        for request in recorder.seen
    ]


def _answer(status: int, slug: str, detail: str = "No.") -> str:
    kind = f"urn:riffle:problem:{slug}"
    return json.dumps({"type": kind, "title": "Title", "status": status, "detail": detail})


def _answers() -> Iterator[Json]:
    """Yields answers. ``final``: this problem ends the request. ``wait``: seconds until a retry."""
    for slug, (kind, _) in PROBLEMS.items():
        temporary = kind in (408, 429) or kind >= 500
        end: Json = {"wait": 0} if temporary else {"final": slug}
        yield {"status": int(kind), "body": _answer(kind, slug)} | end
    for status, body, after, wait in (
        (429, _answer(429, "too-many-requests"), "7", 7),
        (503, _answer(503, "unavailable"), "100000", 300),
        (503, "", "-3", 0),
        (503, "", "soon", 0),
        (409, _answer(404, "unknown-batch"), None, 0),
        (404, _answer(404, "no-such-slug"), None, 0),
        (404, _answer(404, "unknown-batch").replace("riffle", "other"), None, 0),
        (404, json.dumps({"detail": "Not Found"}), None, 0),
        (404, "<html>Not Found</html>", None, 0),
        (404, _answer(404, "unknown-batch")[:40], None, 0),
        (404, "[]", None, 0),
        (302, "", None, 0),
    ):
        header = {} if after is None else {"retry_after": after}
        yield {"status": status, "body": body, **header, "wait": wait}


PINS: list[Json] = [
    {"text": f"{'1f' * 32}\n", "keys": ["1f" * 32]},
    {"text": f"# two\n\n  {'1f' * 32} # old\r\n{'2e' * 32}", "keys": ["1f" * 32, "2e" * 32]},
    {"text": "", "keys": None},
    {"text": "# none\n", "keys": None},
    {"text": f"{'1F' * 32}\n", "keys": None},
    {"text": f"{'1f' * 31}\n", "keys": None},
    {"text": f"{'1f' * 32} {'2e' * 32}\n", "keys": None},
    {"text": f"{'1f' * 32}\nname\n", "keys": None},
    {"text": f"{'1f' * 32}\u00e9\n", "keys": None},
]
"""Files of pinned keys: ``keys`` is null if a node must refuse the file."""

FILES = {
    "hpke.json": hpke_vectors,
    "descriptors.json": descriptor_vectors,
    "parsing.json": parsing_vectors,
    "refusals.json": refusal_vectors,
    "counters.json": counter_vectors,
    "draws.json": draw_vectors,
    "reports.json": report_vectors,
    "analyzer.json": analyzer_vectors,
    "accountant.json": accountant_vectors,
    "wire.json": wire_vectors,
}


def text_of(content: Json) -> str:
    """Returns a file's text, with one vector in each line."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(each, separators=(",", ":")) for each in value)
            lines.append(f'"{name}": [\n{rows}\n]')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Writes all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (FOLDER / name).write_text(text_of(make()), encoding="ascii")


if __name__ == "__main__":
    main()
