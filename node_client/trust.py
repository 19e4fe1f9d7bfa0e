"""Decides whether a node takes part in a batch. Pure: no I/O, no randomness; time is an argument.

docs/protocol.md lists the checks and their order. A refusal is a `RemoteError` that can be logged:
its detail holds only the descriptor's and the owner's numbers.
"""

from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from riffle.common.accounting import Account
from riffle.common.mechanism.counters import Sizes, possible_cells
from riffle.common.mechanism.parameters import DEFAULT_AGGREGATIONS, Aggregation, Guarantee, Trust
from riffle.common.protocol import verification
from riffle.common.protocol.descriptor import BatchDescriptor, Context, SignedDescriptor, parse
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.signatures import batch_id, verify_countersign, verify_deposit
from riffle.node_client.environments.tabular import Declaration

_PROBE = X25519PrivateKey.from_private_bytes(b"\x01" * 32)  # any scalar reveals a low-order point


@dataclass(frozen=True, slots=True)
class Demands:
    """Pins and demands of the node's owner. Keys are raw Ed25519 public keys (32 bytes)."""

    coordinator_key: bytes
    shuffler_key: bytes
    shuffler_id: str
    required: Guarantee
    environment: str
    sizes: Sizes
    reward_range: tuple[float, float]
    max_episode_seconds: int
    declaration: Declaration = field(default_factory=Declaration)
    trust_models: tuple[Trust, ...] = ("shuffle",)
    aggregations: tuple[Aggregation, ...] = DEFAULT_AGGREGATIONS
    max_owner_share: float = 1.0
    analyzer_keys: frozenset[str] | None = None
    max_seconds: int = 31 * 86_400
    shortest_epoch: int | None = None
    test_entry: bool = False
    loopback: bool = False


@dataclass(frozen=True, slots=True)
class AcceptedBatch:
    """A batch that this node may serve, with its recomputed guarantee."""

    context: Context
    batch_key: bytes
    account: Account


def accept(
    signed: SignedDescriptor, requested_id: str, demands: Demands, now: float
) -> AcceptedBatch:
    """Checks a descriptor against the owner's demands at ``now`` (seconds since 1970, UTC).

    Raises RemoteError for the first check that fails.
    """
    data, batch_key = signed.descriptor.encode(), bytes.fromhex(signed.batch_key)
    context = parse(data)
    verify_deposit(demands.coordinator_key, data, signed.coordinator_signature)
    verify_countersign(demands.shuffler_key, context.digest, batch_key, signed.shuffler_signature)
    descriptor = context.descriptor
    _check_ids(descriptor, requested_id, demands)
    verification.check_expiry(descriptor, now, demands.max_seconds, demands.max_episode_seconds)
    verification.check_trust(descriptor, demands.trust_models, demands.aggregations)
    verification.check_epoch(descriptor, demands.shortest_epoch, now)
    _check_content(descriptor, demands)
    _check_point(bytes.fromhex(descriptor.analyzer_key), "analyzer's key")
    _check_point(batch_key, "batch's key")
    account = verification.check_guarantee(descriptor, demands.required, demands.max_owner_share)
    return AcceptedBatch(context, batch_key, account)


def _check_ids(descriptor: BatchDescriptor, requested_id: str, demands: Demands) -> None:
    if descriptor.batch_id != requested_id:
        raise RemoteError("wrong-recipient", f"asked for {requested_id}, got {descriptor.batch_id}")
    if descriptor.batch_id != batch_id(descriptor.run_id, descriptor.deployment):
        raise RemoteError("wrong-recipient", "the batch id is not its run's and deployment's")
    if descriptor.shuffler_id != demands.shuffler_id:
        raise RemoteError(
            "wrong-recipient",
            f"made for shuffler {descriptor.shuffler_id!r}, ours is {demands.shuffler_id!r}",
        )


def _check_content(descriptor: BatchDescriptor, demands: Demands) -> None:
    if demands.analyzer_keys is not None and descriptor.analyzer_key not in demands.analyzer_keys:
        raise RemoteError(
            "outdated-key",
            f"messages would be sealed to analyzer key {descriptor.analyzer_key_id}, which is not "
            "pinned here; if the operator rotated keys, add it to ANALYZER_KEYS_FILE",
        )
    if descriptor.environment != demands.environment:
        raise RemoteError(
            "wrong-recipient",
            f"made for environment {descriptor.environment!r}, ours is {demands.environment!r}",
        )
    if descriptor.sizes != demands.sizes:
        raise RemoteError(
            "wrong-size", f"made for {descriptor.sizes}, this environment has {demands.sizes}"
        )
    low, high = demands.reward_range
    if not (descriptor.reward_low <= low and high <= descriptor.reward_high):
        raise RemoteError(
            "wrong-size",
            f"rewards in [{descriptor.reward_low:g}, {descriptor.reward_high:g}] declared, "
            f"this environment gives [{low:g}, {high:g}]",
        )
    _check_declaration(descriptor, demands.declaration)
    if descriptor.test_seed is not None and not (demands.test_entry and demands.loopback):
        raise RemoteError(
            "test-entry-refused",
            "the descriptor seeds noise, which protects nobody; that needs the owner's test entry "
            "and a shuffler on loopback",
        )


def _check_declaration(descriptor: BatchDescriptor, declared: Declaration) -> None:
    """Checks that the descriptor's declaration agrees with ``declared``, the environment's own."""
    if descriptor.homogeneous and declared.homogeneous is False:
        detail = "the steps are declared to be alike, and in this environment they differ"
        raise RemoteError("wrong-recipient", detail)
    if descriptor.support is None or declared.support is None:
        return
    sizes = descriptor.sizes
    here, there = (
        possible_cells(support, sizes.X, sizes.A, sizes.H)
        for support in (declared.support, descriptor.support)
    )
    if missing := np.setdiff1d(here, there, assume_unique=True).size:
        detail = f"the declared support leaves out {missing} of {here.size} transitions made here"
        raise RemoteError("wrong-recipient", detail)


def _check_point(public_key: bytes, name: str) -> None:
    """Refuses a point of low order: anybody could open messages that are sealed to it."""
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError as error:
        raise RemoteError("wrong-key", f"the {name} is a point of low order") from error
