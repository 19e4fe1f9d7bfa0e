"""A small world for the node's tests: keys, a valid descriptor, the owner's demands."""

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.parameters import Guarantee
from riffle.common.protocol.descriptor import BatchDescriptor, SignedDescriptor, parse, serialize
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.signatures import batch_id, countersign, sign_deposit
from riffle.node_client.trust import Demands

RUN_ID = "00112233445566778899aabbccddeeff"
SIZES = Sizes(X=4, A=2, H=2)
N = 24
NOW = 1_800_000_000
EXPIRES = NOW + 86_400

COORDINATOR = b"\x01" * 32
SHUFFLER = b"\x02" * 32
ANALYZER = KeyPair.from_private(b"\x03" * 32)
BATCH = KeyPair.from_private(b"\x04" * 32)
STRANGER = b"\x05" * 32

CENTRAL: dict[str, Any] = {
    "trust": "central",
    "noise": {"kind": "laplace", "bits": 1, "p_numerator": 1222067847, "p_log2": 32},
    "data_slots": 1,
    "noise_slots": 0,
}
"""Changes that make the batch below send the trajectories to the coordinator."""

SUMS: dict[str, Any] = {
    "aggregation": "sums",
    "word_bits": 16,
    "data_slots": 1,
    "noise_slots": 0,
}
"""Changes that make the batch below one whose reports are summed."""


def public(private: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def fields(**changes: Any) -> dict[str, Any]:
    """RiverSwim with X=4, H=2, joint counters, 24 reports of 88 messages, epsilon below 5."""
    run_id, deployment = changes.get("run_id", RUN_ID), changes.get("deployment", 0)
    valid: dict[str, Any] = {
        "run_id": run_id,
        "batch_id": batch_id(run_id, deployment),
        "shuffler_id": "shuffler-1",
        "deployment": deployment,
        "environment": "RiverSwim-v0",
        "n": N,
        "expires_at": EXPIRES,
        "states": 4,
        "actions": 2,
        "horizon": 2,
        "reward_low": 0.0,
        "reward_high": 1.0,
        "families": "joint",
        "policies": (((0, 1, 0, 1), (1, 0, 1, 0)), ((1, 1, 1, 1), (1, 1, 1, 1))),
        "weights": (2**30, 2**32 - 2**30),
        "noise": {"bits": 1, "p_numerator": 1, "p_log2": 2},
        "data_slots": 2,
        "noise_slots": 86,
        "guarantee": {"epsilon": 5.0, "beta": 1e-2, "dishonest_fraction": 0.1},
        "analyzer_key": ANALYZER.public.hex(),
    }
    return valid | changes


def descriptor(**changes: Any) -> BatchDescriptor:
    return BatchDescriptor.model_validate(fields(**changes))


def sign(
    data: bytes,
    *,
    coordinator: bytes = COORDINATOR,
    shuffler: bytes = SHUFFLER,
    batch_key: bytes = BATCH.public,
) -> SignedDescriptor:
    """Both signatures over a descriptor's bytes."""
    return SignedDescriptor(
        descriptor=data.decode(),
        coordinator_signature=sign_deposit(coordinator, data),
        batch_key=batch_key.hex(),
        shuffler_signature=countersign(shuffler, parse(data).digest, batch_key),
    )


def signed(**changes: Any) -> SignedDescriptor:
    return sign(serialize(descriptor(**changes)))


def demands(**changes: Any) -> Demands:
    valid: dict[str, Any] = {
        "coordinator_key": public(COORDINATOR),
        "shuffler_key": public(SHUFFLER),
        "shuffler_id": "shuffler-1",
        "required": Guarantee(5.0, 1e-2, 0.1),
        "environment": "RiverSwim-v0",
        "sizes": SIZES,
        "reward_range": (0.0, 1.0),
        "max_episode_seconds": 15 * 86_400,
    }
    return Demands(**(valid | changes))
