"""A small world for the shuffler's tests: keys, settings, a clock that is set, honest reports."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.parameters import Padding
from riffle.common.mechanism.sums import add, empty_sum, split_release
from riffle.common.process.endpoint import hash_token
from riffle.common.protocol import hpke
from riffle.common.protocol.descriptor import (
    BatchDescriptor,
    Context,
    NoiseDocument,
    parse,
    serialize,
)
from riffle.common.protocol.signatures import batch_id, sign_deposit
from riffle.shuffler.settings import Settings

COORDINATOR_KEY = bytes(range(32))
SHUFFLER_KEY = bytes(range(1, 33))
COORDINATOR_TOKEN, OPERATOR_TOKEN = "coordinator-token", "operator-token"
ANALYZER = hpke.KeyPair.from_private(bytes(range(2, 34)))
RUN = "ab" * 16
NOW = 1_800_000_000
LAYOUT = CounterLayout(Sizes(2, 2, 2), "joint", 0)
EPSILON, BETA = 8.0, 1e-3


def public(private: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


@dataclass
class FakeClock:
    """Seconds since 1970, moved by hand."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now


def settings(directory: Path, **changes: Any) -> Settings:
    key_file = directory / "signing.key"
    key_file.write_text(SHUFFLER_KEY.hex() + "\n")
    values: dict[str, Any] = {
        "data_dir": directory / "data",
        "shuffler_id": "shuffler-1",
        "signing_key_file": key_file,
        "coordinator_key": public(COORDINATOR_KEY).hex(),
        "coordinator_token_hash": hash_token(COORDINATOR_TOKEN),
        "operator_token_hash": hash_token(OPERATOR_TOKEN),
        "max_epsilon": EPSILON,
        "max_beta": BETA,
        "aggregations": ("messages", "sums"),
        "lease_seconds": 60,
    }
    return Settings(**values | changes)


# Calibrated for n = 4 (`common.accounting.calibrate`); larger batches get a better guarantee.
NOISE = NoiseDocument(bits=3, p_numerator=1, p_log2=1)
PADDING = Padding(LAYOUT.data_slots, 24)


def descriptor_fields(n: int = 4, deployment: int = 0, **changes: Any) -> dict[str, Any]:
    """Fields of an acceptable descriptor as JSON has them, with changes."""
    fields: dict[str, Any] = {
        "version": 1,
        "run_id": RUN,
        "batch_id": batch_id(RUN, deployment),
        "shuffler_id": "shuffler-1",
        "deployment": deployment,
        "trust": "shuffle",
        "environment": "RiverSwim-v0",
        "n": n,
        "expires_at": NOW + 3_600,
        "states": 2,
        "actions": 2,
        "horizon": 2,
        "reward_low": 0.0,
        "reward_high": 1.0,
        "families": "joint",
        "layer": 0,
        "policies": (((0, 1), (1, 0)),),
        "weights": (1 << 32,),
        "noise": NOISE,
        "data_slots": PADDING.data_slots,
        "noise_slots": PADDING.noise_slots,
        "guarantee": {"epsilon": EPSILON, "beta": BETA, "dishonest_fraction": 0.0},
        "analyzer_key": ANALYZER.public.hex(),
        "test_seed": None,
    }
    return fields | changes


def descriptor_bytes(n: int = 4, deployment: int = 0, **changes: Any) -> bytes:
    return serialize(BatchDescriptor(**descriptor_fields(n, deployment, **changes)))


def signature(data: bytes) -> str:
    return sign_deposit(COORDINATOR_KEY, data)


@dataclass
class Batch:
    """A batch as nodes know it, and reports to it whose messages are all distinct."""

    data: bytes
    batch_key: bytes
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = parse(self.data)

    @property
    def batch_id(self) -> str:
        return self.context.descriptor.batch_id

    def report(self, messages: bytes | None = None, *, key: bytes | None = None) -> bytes:
        """A sealed report. Messages are random bytes: the shuffler cannot tell."""
        d = self.context.descriptor
        size = d.padding.messages * d.message_bytes
        plaintext = os.urandom(size) if messages is None else messages
        return hpke.seal(key or self.batch_key, self.context.report_info, plaintext)

    def messages(self) -> bytes:
        """Random bytes of one report's messages."""
        d = self.context.descriptor
        return os.urandom(d.padding.messages * d.message_bytes)

    def handed_over(self, sent: list[bytes]) -> list[bytes]:
        """What must be handed over of the reports that were sent, in any order."""
        d = self.context.descriptor
        if d.word_bits is None:
            return sorted(self.rows(b"".join(sent)))
        total = empty_sum(d.layout.counters, d.word_bits)
        keys = [add(total, report) for report in sent]
        return [total.tobytes(), *sorted(keys)]

    def parts(self, released: bytes) -> list[bytes]:
        """What a hand-over consists of, in a fixed order."""
        d = self.context.descriptor
        if d.word_bits is None:
            return sorted(self.rows(released))
        total, keys = split_release(released, d.layout.counters, d.word_bits)
        return [total.tobytes(), *sorted(bytes(keys[i : i + 32]) for i in range(0, 32 * d.n, 32))]

    def rows(self, data: bytes) -> list[bytes]:
        """Messages of concatenated bytes, in their order."""
        size = self.context.descriptor.message_bytes
        return [data[start : start + size] for start in range(0, len(data), size)]


def user(number: int) -> str:
    return hashlib.sha256(number.to_bytes(8, "big")).hexdigest()[:32]


def multiset(rows: list[bytes]) -> list[bytes]:
    return sorted(rows)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
