"""The coordinator's settings: environment variables ``RIFFLE_COORDINATOR_*``, checked at start.

A file that holds a key, a hash or a token has one line of text. Keys and hashes are 64 hexadecimal
digits. A file with a token has the token's text exactly as requests send it.
"""

import socket
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from riffle.common.mechanism.parameters import DEFAULT_AGGREGATIONS, Aggregation
from riffle.common.process.configuration import Share, file_bytes
from riffle.common.process.endpoint import check_urls, is_loopback_service
from riffle.common.protocol.descriptor import Name
from riffle.common.protocol.errors import LocalError
from riffle.common.server.settings import ServerSettings
from riffle.coordinator.specs import LearnerName
from riffle.coordinator.store.records import Replica

PREFIX = "RIFFLE_COORDINATOR_"
ALONE_SECONDS = 60
"""A run lease lasts this many seconds if `store_url` is not set and so no other replica exists."""


class Settings(ServerSettings):
    """The settings of a coordinator. Call `load` to read them; its errors say what is wrong."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    port: int = Field(default=8400, ge=1, le=65535, description="port to listen on")
    data_dir: Path = Field(description="directory of the store")
    analyzer_keys_dir: Path = Field(
        description="folder of the keys that open messages; written to when keys are rotated"
    )
    shuffler_url: str = Field(description="https://host:port[,https://...]; http on loopback")
    shuffler_id: Name = Field(description="the shuffler that descriptors name")
    ca_file: Path | None = Field(default=None, description="PEM of a private CA of the shuffler")
    shuffler_token_file: Path = Field(description="token of the coordinator at the shuffler")
    operator_token_hash_file: Path = Field(description="SHA-256 of the operator's token")
    aggregations: tuple[Aggregation, ...] = Field(
        default=DEFAULT_AGGREGATIONS,
        min_length=1,
        description="aggregations that runs may ask for, a JSON list of messages, sums",
    )
    max_owner_share: Share = Field(
        default=0.05,
        description="largest share of a batch's slots that one owner's nodes may hold; default "
        "with a shuffler on loopback: 1, which is no limit",
    )
    lease_seconds: int = Field(
        default=15,
        ge=1,
        le=3600,
        description="if a replica is killed, another takes over its runs after this time",
    )
    stall_seconds: int = Field(
        default=15,
        ge=1,
        le=30 * 86_400,
        description="if a batch makes no visible progress for this time, the run's trouble "
        "reports that",
    )
    workers: int = Field(default=2, ge=1, le=256, description="processes that open messages")
    learners: dict[LearnerName, str] = Field(
        default_factory=dict,
        description='JSON object of learners in Python files, name -> "path/file.py:Class"',
    )

    @model_validator(mode="after")
    def _safe(self) -> Self:
        check_urls("shuffler_url", self.shuffler_url)
        if self.max_owner_share == 1.0 and not is_loopback_service(self.shuffler_url):
            raise ValueError(
                "off loopback, max_owner_share must be below 1: one owner's nodes could hold a "
                "whole batch"
            )
        return self

    @property
    def url(self) -> str:
        """The database's URL."""
        return self.store_url or f"sqlite:///{self.data_dir / 'coordinator.sqlite'}"

    def replica(self) -> Replica:
        """Returns this replica's name (the same after a restart) and how long its leases last."""
        seconds = self.lease_seconds if self.store_url else ALONE_SECONDS
        return Replica(f"{socket.gethostname()}:{self.port}", seconds)

    def shuffler_token(self) -> str:
        """Returns the coordinator's token at the shuffler."""
        variable, file = f"{PREFIX}SHUFFLER_TOKEN_FILE", self.shuffler_token_file
        try:
            return file_bytes(variable, file).decode("ascii").strip()
        except UnicodeDecodeError as error:
            raise LocalError("invalid-spec", f"{variable}: {file} holds no token") from error
