"""The batch descriptor: one immutable signed document that defines a batch.

The coordinator signs a descriptor's bytes (Ed25519). The shuffler adds a fresh public key of the
batch and countersigns. The digest is SHA-256 over a protocol label and the bytes as received. Every
seal is bound to the digest, so nothing sealed under one descriptor opens under another.

Parsing is strict: it refuses unknown fields, wrong types and inconsistent sizes.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import MAX_COUNTERS, CounterLayout, Families, Sizes, Support
from riffle.common.mechanism.parameters import (
    MAX_DRAWS,
    Aggregation,
    BatchNoise,
    FairBits,
    Flips,
    Laplace,
    Noise,
    Padding,
    Trust,
    honest_reports,
)
from riffle.common.mechanism.policy import TOTAL_WEIGHT, Mixture
from riffle.common.mechanism.workflow import Symbols
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.hpke import LABEL_MESSAGE, LABEL_REPORT, OVERHEAD
from riffle.common.protocol.signatures import key_id

LABEL_DIGEST = b"riffle v1 descriptor\x00"
LABEL_MASK = b"riffle v1 mask\x00"

MAX_STATES, MAX_ACTIONS, MAX_HORIZON = 10_000, 1_000, 1_000
MAX_POLICIES = 4_096
MAX_MESSAGES = 1 << 16
MAX_DESCRIPTOR_BYTES = 16 << 20
MAX_EPISODE_SECONDS = 15 * 86_400
MAX_EXACT = (1 << 53) - 1
"""The largest integer that every JSON reader represents exactly; it also fits a 64-bit column."""
MAX_EPOCH_SECONDS = 100 * 366 * 86_400

HEX16 = "[0-9a-f]{32}"
Hex16 = Annotated[str, StringConstraints(pattern=f"^{HEX16}$")]
Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$")]
Weight = Annotated[int, Field(ge=-TOTAL_WEIGHT, le=TOTAL_WEIGHT)]
Action = Annotated[int, Field(ge=-MAX_ACTIONS, le=MAX_ACTIONS)]
"""The bounds of weights and actions only prevent overflow; `Mixture` checks the values."""
Policy = tuple[tuple[Action, ...], ...]


class Document(BaseModel):
    """Base of every wire document: frozen, strict, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Epoch:
    """A period from ``start`` until just before ``end``, in which a user may report once.

    Times are seconds since 1970, UTC.
    """

    start: int
    end: int

    @classmethod
    def of(cls, expires_at: int, seconds: int | None) -> "Epoch | None":
        """Returns the epoch of a batch that expires at ``expires_at``.

        The signed document alone determines the epoch, so no clock decides it.
        """
        if seconds is None:
            return None
        start = expires_at // seconds * seconds
        return cls(start, start + seconds)


def bars_until(epoch: Epoch | None) -> int:
    """Returns the time until which a user who reported in this epoch may not report again."""
    return MAX_EXACT if epoch is None else epoch.end


def may_report(barred_until: int, epoch: Epoch | None) -> bool:
    """Returns whether a user who is barred until ``barred_until`` may report in this epoch.

    ``barred_until`` is the `bars_until` of the user's last report, or 0 if there is none. Nobody
    can report in two epochs that overlap, even if a clock goes back or epochs get another length.
    """
    return not barred_until or (epoch is not None and barred_until <= epoch.start)


NoiseKind = Literal["bernoulli", "flips", "laplace", "binomial"]

KINDS: dict[Trust, tuple[NoiseKind, ...]] = {
    "shuffle": ("bernoulli",),
    "local": ("flips",),
    "central": ("laplace", "binomial"),
}
"""The kinds of noise that each trust model allows."""


class NoiseDocument(Document):
    """Noise as a document: kind `bernoulli` is `Noise`, `binomial` is `FairBits` (p = 1/2).

    For `flips` and `laplace`, bits is 1, and p_numerator / 2**32 is f of `Flips` or q of `Laplace`.
    """

    kind: NoiseKind = "bernoulli"
    bits: int = Field(ge=1, le=1 << 32)
    p_numerator: int = Field(ge=1)
    p_log2: int = Field(ge=1, le=32)

    @classmethod
    def of(cls, noise: BatchNoise) -> "NoiseDocument":
        """Returns the document for this noise."""
        match noise:
            case Noise(bits, p_numerator, p_log2):
                return cls(bits=bits, p_numerator=p_numerator, p_log2=p_log2)
            case FairBits(bits):
                return cls(kind="binomial", bits=bits, p_numerator=1, p_log2=1)
            case Flips(numerator):
                return cls(kind="flips", bits=1, p_numerator=numerator, p_log2=32)
            case Laplace(numerator):
                return cls(kind="laplace", bits=1, p_numerator=numerator, p_log2=32)

    def noise(self) -> BatchNoise:
        """Returns the noise; raises ValueError if the numbers do not suit the kind."""
        noise: BatchNoise
        match self.kind:
            case "bernoulli":
                noise = Noise(self.bits, self.p_numerator, self.p_log2)
            case "binomial":
                noise = FairBits(self.bits)
            case "flips":
                noise = Flips(self.p_numerator)
            case "laplace":
                noise = Laplace(self.p_numerator)
        # Each noise has exactly one document: a field that its kind does not use has a fixed value.
        if NoiseDocument.of(noise) != self:
            raise ValueError(f"noise of kind {self.kind} takes other bits or another p_log2")
        return noise


class GuaranteeDocument(Document):
    """A `Guarantee` as a document."""

    epsilon: float = Field(gt=0, le=100)
    beta: float = Field(gt=0, lt=1)
    dishonest_fraction: float = Field(ge=0, lt=1)


class BatchDescriptor(Document):
    """A batch. ``test_seed``, if given, seeds noise and other draws, so the noise protects nobody.

    ``support`` and ``homogeneous`` repeat the environment's declaration: which transitions are
    possible, and whether all steps are alike. ``homogeneous`` changes no report.
    """

    version: int = Field(default=1, ge=1, le=1)
    run_id: Hex16
    batch_id: Hex16
    shuffler_id: Name
    deployment: int = Field(ge=0, le=MAX_EXACT)
    trust: Trust = "shuffle"
    aggregation: Aggregation = "messages"
    word_bits: int | None = Field(default=None, description="w of `sums`: 16 or 32")
    environment: Name
    n: int = Field(ge=1, le=1 << 32)
    expires_at: int = Field(ge=0, le=MAX_EXACT, description="seconds since 1970, UTC")
    states: int = Field(ge=1, le=MAX_STATES)
    actions: int = Field(ge=1, le=MAX_ACTIONS)
    horizon: int = Field(ge=1, le=MAX_HORIZON)
    reward_low: float = Field(allow_inf_nan=False)
    reward_high: float = Field(allow_inf_nan=False)
    families: Families
    support: Support | None = None
    homogeneous: bool = False
    layer: int | None = Field(default=None, ge=0)
    policies: tuple[Policy, ...] = Field(min_length=1, max_length=MAX_POLICIES)
    weights: tuple[Weight, ...]
    noise: NoiseDocument
    data_slots: int = Field(ge=1)
    noise_slots: int = Field(ge=0)
    guarantee: GuaranteeDocument
    owner_share: float = Field(
        default=1.0, gt=0, le=1, description="largest share of one owner's nodes; 1: no limit"
    )
    epoch_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EPOCH_SECONDS,
        exclude_if=lambda seconds: seconds is None,
        description="length of an epoch, in which a user may report once; absent: once a lifetime",
    )
    analyzer_key: Hex32
    test_seed: int | None = Field(default=None, ge=0)
    episode_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EPISODE_SECONDS,
        exclude_if=lambda value: value is None,
        description="how long a person's episode may take; leases last longer by this time",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.mixture.check(self.sizes)
        layout = self.layout
        _ = self.batch_noise
        if self.noise.kind not in KINDS[self.trust]:
            raise ValueError(f"trust {self.trust} takes no noise of kind {self.noise.kind}")
        if self.reward_low >= self.reward_high:
            raise ValueError("reward_low must be below reward_high")
        if layout.counters > MAX_COUNTERS:
            raise ValueError(f"{layout.counters} counters exceed {MAX_COUNTERS}")
        if (draws := self.noise.bits * layout.counters) > MAX_DRAWS:
            raise ValueError(f"{draws} noise bits a report exceed {MAX_DRAWS}")
        padded = (self.trust, self.aggregation) == ("shuffle", "messages")
        data_slots = layout.data_slots if padded else 1
        if self.data_slots != data_slots:
            raise ValueError(f"data_slots must be {data_slots} for these counters")
        if self.noise_slots and not padded:
            raise ValueError("a report is one message here and has no padding: no noise_slots")
        if self.aggregation == "sums" and self.trust != "shuffle":
            raise ValueError("sums are for trust 'shuffle' only")
        if self.word_bits != (bits := self._fewest_word_bits()):
            raise ValueError(f"word_bits must be {bits} for this batch")
        if self.padding.messages > MAX_MESSAGES:
            raise ValueError(f"{self.padding.messages} messages a report exceed {MAX_MESSAGES}")
        if self.guarantee.dishonest_fraction < self.owner_share < 1.0:
            raise ValueError("owner_share must not be above the guarantee's dishonest_fraction")
        if self.owner_slots < 1:
            raise ValueError(f"owner_share of n={self.n} slots is less than one slot")
        return self

    def _fewest_word_bits(self) -> int | None:
        noise, summed = self.batch_noise, self.aggregation == "sums"
        return sums.word_bits(self.n, noise) if summed and isinstance(noise, Noise) else None

    @property
    def analyzer_key_id(self) -> str:
        """The id of the analyzer's public key, to which messages are sealed."""
        return key_id(bytes.fromhex(self.analyzer_key))

    @property
    def epoch(self) -> Epoch | None:
        """The epoch in which the reports count; None if users report once in a lifetime."""
        return Epoch.of(self.expires_at, self.epoch_seconds)

    @property
    def sizes(self) -> Sizes:
        """The numbers X of states, A of actions and H of steps."""
        return Sizes(X=self.states, A=self.actions, H=self.horizon)

    @cached_property
    def layout(self) -> CounterLayout:
        """The layout of the batch's counters."""
        return CounterLayout(self.sizes, self.families, self.layer, self.support)

    @cached_property
    def mixture(self) -> Mixture:
        """The policies with their weights."""
        rows = [self.states] * self.horizon
        if any([len(row) for row in policy] != rows for policy in self.policies):
            raise ValueError(f"every policy must have shape {self.horizon, self.states}")
        policies = np.array(self.policies, dtype=np.int64)
        return Mixture(policies, np.array(self.weights, dtype=np.int64))

    @property
    def padding(self) -> Padding:
        """The numbers of data slots and of noise slots in a report."""
        return Padding(self.data_slots, self.noise_slots)

    @property
    def reward_range(self) -> tuple[float, float]:
        """The declared range of rewards."""
        return self.reward_low, self.reward_high

    @property
    def owner_slots(self) -> int:
        """The largest number of slots that one owner's nodes may hold: the share, rounded down."""
        share = self.owner_share
        return self.n if share == 1.0 else self.n - honest_reports(self.n, share)

    @property
    def symbols(self) -> Symbols:
        """The format of a message's plaintext."""
        return Symbols.of(self.trust, self.layout)

    @property
    def message_bytes(self) -> int:
        """The size in bytes of a sealed message or, in a summed batch, of a vector with its key."""
        if self.word_bits:
            return sums.report_bytes(self.layout.counters, self.word_bits)
        return OVERHEAD + self.symbols.size

    @property
    def report_bytes(self) -> int:
        """The size of a report in bytes, as uploaded under its outer seal."""
        return self.padding.messages * self.message_bytes + OVERHEAD

    @property
    def release_bytes(self) -> int:
        """The size in bytes of the shuffler's hand-over: all messages, or one sum and n keys."""
        if self.word_bits:
            return sums.release_bytes(self.n, self.layout.counters, self.word_bits)
        return self.n * self.padding.messages * self.message_bytes

    @cached_property
    def batch_noise(self) -> BatchNoise:
        """The noise that every user adds or, under trust ``central``, the coordinator adds."""
        return self.noise.noise()


class SignedDescriptor(Document):
    """The descriptor's exact bytes and both signatures, as the shuffler serves them to nodes."""

    descriptor: str = Field(description="the descriptor's bytes, UTF-8 JSON, as deposited")
    coordinator_signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
    batch_key: Hex32
    shuffler_signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True, slots=True)
class Context:
    """A descriptor, the digest of its bytes as received, and the ``info`` strings of its seals."""

    descriptor: BatchDescriptor
    digest: bytes

    @property
    def message_info(self) -> bytes:
        """The HPKE ``info`` of a message (inner seal)."""
        return LABEL_MESSAGE + self.digest

    @property
    def mask_info(self) -> bytes:
        """The HKDF ``info`` of a summed batch's masks; `sums` appends the report's key E to it."""
        return LABEL_MASK + self.digest

    @property
    def report_info(self) -> bytes:
        """The HPKE ``info`` of a report (outer seal)."""
        return LABEL_REPORT + self.digest


def serialize(descriptor: BatchDescriptor) -> bytes:
    """Returns the descriptor's bytes, which are signed and deposited."""
    return descriptor.model_dump_json().encode()


def parse(data: bytes) -> Context:
    """Parses a descriptor. Raises RemoteError ``too-large``, or ``malformed`` with the fault."""
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise RemoteError("too-large", f"a descriptor has at most {MAX_DESCRIPTOR_BYTES} bytes")
    try:
        descriptor = BatchDescriptor.model_validate_json(data)
    except ValidationError as error:
        raise RemoteError("malformed", f"descriptor: {first_fault(error)}") from error
    json.loads(data, object_pairs_hook=_check_members)
    return Context(descriptor, hashlib.sha256(LABEL_DIGEST + data).digest())


def _check_members(members: list[tuple[str, Any]]) -> None:
    """Refuses an object with a repeated member, because parsers differ in which value they take."""
    if len(dict(members)) < len(members):
        raise RemoteError("malformed", "descriptor: an object has a member twice")


def first_fault(error: ValidationError) -> str:
    """Returns a pydantic error's first fault in one line: the field and the problem.

    The line quotes numbers that are out of range, but no other value: a value may be secret.
    """
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in fault["loc"]) or "document"
    value = f", not {fault['input']}" if fault["type"].startswith(("less_", "greater_")) else ""
    return f"{where}: {fault['msg'].removeprefix('Value error, ')}{value}"
