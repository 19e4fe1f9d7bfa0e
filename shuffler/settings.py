"""Settings of the shuffler: environment variables ``RIFFLE_SHUFFLER_*``, checked at start.

Keys and hashes are hexadecimal. A variable with the ending ``_FILE`` names a file with the value.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import SettingsConfigDict

from riffle.common.mechanism.parameters import Guarantee
from riffle.common.process.configuration import DemandSettings, check_shares
from riffle.common.process.endpoint import is_loopback
from riffle.common.protocol.descriptor import Name
from riffle.common.protocol.wire import LEASE_BYTES
from riffle.common.server.settings import ServerSettings
from riffle.shuffler.rules import Demands
from riffle.shuffler.store.schema import sqlite_url

PREFIX = "RIFFLE_SHUFFLER_"
Origin = Annotated[str, StringConstraints(pattern=r"^https?://[^/?#*\s]+$")]


class Settings(ServerSettings, DemandSettings):
    """The settings of a shuffler. Call `load` to read them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")
    loopback_defaults: ClassVar[dict[str, float]] = {
        "min_dishonest_fraction": 0.0,
        "smallest_n": 2,
        "max_owner_share": 1.0,
    }

    port: int = Field(default=8401, ge=1, le=65535, description="port to listen on")
    data_dir: Path = Field(description="directory of the store and of the batch secrets")
    shuffler_id: Name = Field(description="this shuffler's name, which descriptors must state")
    coordinator_token_hash: str | None = Field(
        default=None, description="SHA-256 of the coordinator's token"
    )
    coordinator_token_hash_file: Path | None = Field(
        default=None, description="file with that hash"
    )
    operator_token_hash: str | None = Field(
        default=None, description="SHA-256 of the operator's token"
    )
    operator_token_hash_file: Path | None = Field(default=None, description="file with that hash")
    max_epsilon: float = Field(default=1.0, gt=0, le=100, description="largest epsilon accepted")
    max_beta: float = Field(default=1e-5, gt=0, lt=1, description="largest beta accepted")
    min_dishonest_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="share of dishonest reports a batch must withstand; default on loopback: 0",
    )
    smallest_n: int = Field(default=20, ge=2, description="smallest batch; default on loopback: 2")
    max_batch_bytes: int = Field(
        default=1 << 30, ge=1 << 12, description="largest batch: bytes handed over"
    )
    max_open_batches: int = Field(default=1_000, ge=1, description="most batches open at once")
    retention_seconds: int = Field(
        default=30 * 86_400,
        ge=1,
        le=10 * 366 * 86_400,
        description="longest time from sealing a batch to erasing it, acknowledged or not",
    )
    lease_seconds: int = Field(
        default=120,
        ge=1,
        le=86_400,
        description="seconds that a lease lasts beyond the descriptor's time for an episode",
    )
    max_upload_bytes: int = Field(
        default=64 << 20, ge=1 << 12, description="largest upload, in bytes"
    )
    max_inflight_bytes: int = Field(
        default=256 << 20, ge=1 << 12, description="memory for incoming uploads, in bytes"
    )
    node_requests: float = Field(
        default=100.0, gt=0, description="requests a second of one node; bursts: ten seconds' worth"
    )
    node_reports: float = Field(
        default=5_000.0,
        gt=0,
        description="reports a second of one node; bursts: ten seconds' worth",
    )
    node_requests_at_once: int = Field(
        default=64, ge=1, description="most requests of one node at once, long polls included"
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="origins of web pages whose scripts may be nodes, a JSON list such as "
        '["https://clinic.example"]; default: none',
    )
    show_fill: bool = Field(
        default=True,
        description="tell the coordinator how many tenths of an open batch are full (n >= 100)",
    )

    @classmethod
    def has_loopback_peers(cls, values: Mapping[str, Any]) -> bool:
        """Returns whether only this machine can connect."""
        return is_loopback(values.get("host", cls.model_fields["host"].default))

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if is_loopback(self.host):
            return self
        check_shares(self.max_owner_share, self.min_dishonest_fraction)
        if self.smallest_n * self.max_owner_share < 1.0:
            raise ValueError(
                f"off loopback, smallest_n {self.smallest_n} must be at least "
                f"{math.ceil(1.0 / self.max_owner_share)}, 1 / max_owner_share: in a smaller batch "
                "no owner may hold a slot"
            )
        return self

    @property
    def url(self) -> str:
        """The URL of the database."""
        return self.store_url or sqlite_url(self.data_dir)

    @property
    def inflight_of_a_node(self) -> int:
        """The most bytes of uploads in progress that one node may have; any single upload fits."""
        return max(self.max_inflight_bytes // 4, self.max_upload_bytes)

    def public_key(self) -> bytes:
        """Returns the raw Ed25519 public key (32 bytes) of the signing key."""
        private = Ed25519PrivateKey.from_private_bytes(self.signing_key())
        return private.public_key().public_bytes_raw()

    def coordinator_hash(self) -> str:
        """Returns the SHA-256 of the coordinator's token, hex."""
        return self.hex_value("coordinator_token_hash").hex()

    def demands(self) -> Demands:
        """Returns the operator's demands. Raises LocalError if a setting is not safe."""
        self.check_test_entry()
        return Demands(
            shuffler_id=self.shuffler_id,
            coordinator_key=self.hex_value("coordinator_key"),
            guarantee=Guarantee(self.max_epsilon, self.max_beta, self.min_dishonest_fraction),
            trust_models=self.trust_models,
            aggregations=self.aggregations,
            smallest_n=self.smallest_n,
            max_owner_share=self.max_owner_share,
            epoch_seconds=self.epoch_seconds,
            test_entry=self.test_entry,
            max_batch_bytes=self.max_batch_bytes,
            max_report_bytes=self.inflight_of_a_node - LEASE_BYTES,
            max_batch_seconds=self.max_batch_seconds,
            max_episode_seconds=self.max_episode_seconds,
        )
