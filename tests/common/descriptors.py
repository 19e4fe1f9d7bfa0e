"""A small valid descriptor for tests of every role."""

from typing import Any

from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.signatures import batch_id

RUN_ID = "00112233445566778899aabbccddeeff"

FLIPS = {"kind": "flips", "bits": 1, "p_numerator": 2**29, "p_log2": 32}
LAPLACE = {"kind": "laplace", "bits": 1, "p_numerator": 2**30, "p_log2": 32}
ONE_MESSAGE: dict[str, dict[str, Any]] = {
    "local": {"trust": "local", "noise": FLIPS, "data_slots": 1, "noise_slots": 0},
    "sums": {"aggregation": "sums", "word_bits": 16, "data_slots": 1, "noise_slots": 0},
    "central": {"trust": "central", "noise": LAPLACE, "data_slots": 1, "noise_slots": 0},
}
"""What makes the batch below one of the other workflows, or a sum."""


def descriptor(**changes: Any) -> BatchDescriptor:
    """A batch of 8 reports over X=2, A=2, H=2 with weak noise; override any field."""
    deployment = int(changes.get("deployment", 0))
    run_id = str(changes.get("run_id", RUN_ID))
    fields: dict[str, Any] = {
        "run_id": run_id,
        "batch_id": batch_id(run_id, deployment),
        "shuffler_id": "shuffler-1",
        "deployment": deployment,
        "environment": "RiverSwim-v0",
        "n": 8,
        "expires_at": 2_000_000_000,
        "states": 2,
        "actions": 2,
        "horizon": 2,
        "reward_low": 0.0,
        "reward_high": 1.0,
        "families": "joint",
        "policies": (((0, 1), (1, 0)), ((1, 1), (1, 1))),
        "weights": (2**31, 2**31),
        "noise": {"bits": 20, "p_numerator": 1, "p_log2": 2},
        "data_slots": 2,
        "noise_slots": 350,
        "guarantee": {"epsilon": 10.0, "beta": 1e-3, "dishonest_fraction": 0.0},
        "analyzer_key": "11" * 32,
    }
    return BatchDescriptor.model_validate(fields | changes)
