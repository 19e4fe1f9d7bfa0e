"""Settings of the coordinator: environment variables ``RIFFLE_COORDINATOR_*``, checked at start.

Key, token and hash files hold one line of text: keys and hashes as 64 hexadecimal digits, the
token as it is sent.
"""

import socket
from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from common.at_rest import AtRest, storage
from common.configuration import RoleSettings
from common.descriptor import Name
from common.endpoint import Tls, is_loopback, tls_files
from common.errors import LocalError
from common.failover import check_urls
from coordinator.leases import Replica
from coordinator.specs import LearnerName

PREFIX = "RIFFLE_COORDINATOR_"


class Settings(RoleSettings):
    """What an operator can set. Build it with `load`, which explains what is wrong."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8400, ge=1, le=65535, description="port to listen on")
    data_dir: Path = Field(description="directory of the store")
    store_url: str | None = Field(default=None, description="database URL; default: SQLite file")
    storage_key: SecretStr | None = Field(
        default=None, description="32 bytes in hex that encrypt private keys on disk; or:"
    )
    storage_key_file: Path | None = Field(
        default=None, description="file with it, on another medium; mandatory off loopback"
    )
    signing_key_file: Path = Field(description="Ed25519 private key that signs descriptors")
    analyzer_keys_dir: Path = Field(
        description="folder of the keys that open messages; written to when keys are rotated"
    )
    shuffler_url: str = Field(description="https://host:port, replicas by commas; http on loopback")
    shuffler_id: Name = Field(description="the shuffler that descriptors name")
    ca_file: Path | None = Field(default=None, description="PEM of a private CA of the shuffler")
    shuffler_token_file: Path = Field(description="token of the coordinator at the shuffler")
    operator_token_hash_file: Path = Field(description="SHA-256 of the operator's token")
    metrics_token_hash_file: Path | None = Field(
        default=None, description="SHA-256 of a token that may read /metrics, as the operator's may"
    )
    lease_seconds: int = Field(
        default=15,
        ge=1,
        le=3600,
        description="after this time another replica drives the runs of one that was killed",
    )
    workers: int = Field(default=2, ge=1, le=256, description="processes that open messages")
    learners: dict[LearnerName, str] = Field(
        default_factory=dict,
        description='JSON object of learners in Python files, name -> "path/file.py:Class"',
    )
    tls_cert_file: Path | None = Field(default=None, description="PEM certificate chain")
    tls_key_file: Path | None = Field(default=None, description="PEM private key of it")
    test_entry: bool = Field(default=False, description="allow seeded runs; loopback only")

    @field_validator("shuffler_url")
    @classmethod
    def _reachable(cls, url: str) -> str:
        return check_urls("shuffler_url", url)

    @property
    def url(self) -> str:
        """Database URL."""
        return self.store_url or f"sqlite:///{self.data_dir / 'coordinator.sqlite'}"

    def replica(self) -> Replica:
        """This replica's part in driving runs, under a name that a restart does not change."""
        return Replica(f"{socket.gethostname()}:{self.port}", self.lease_seconds)

    def tls(self) -> Tls | None:
        """TLS files; None on loopback without TLS.

        Raises:
            LocalError: one of the two is missing, or both are and others could listen.
        """
        return tls_files(self.host, self.tls_cert_file, self.tls_key_file, PREFIX)

    def signing_key(self) -> bytes:
        """Raw Ed25519 private key (32 bytes)."""
        data = _bytes("SIGNING_KEY_FILE", self.signing_key_file)
        opened = self.at_rest().open(data, "signing key")
        return _parsed("SIGNING_KEY_FILE", self.signing_key_file, opened)

    def at_rest(self) -> AtRest:
        """How private keys lie on this service's disk.

        Raises:
            LocalError: see `common.at_rest.storage`.
        """
        return storage(self.storage_key, self.storage_key_file, self.host, PREFIX)

    def operator_hash(self) -> str:
        """SHA-256 of the operator's token, hex."""
        return _hex_bytes("OPERATOR_TOKEN_HASH_FILE", self.operator_token_hash_file).hex()

    def metrics_hash(self) -> str | None:
        """Hash of a token that may read the metrics and nothing else, if there is one."""
        file = self.metrics_token_hash_file
        return None if file is None else _hex_bytes("METRICS_TOKEN_HASH_FILE", file).hex()

    def shuffler_token(self) -> str:
        """The coordinator's token at the shuffler."""
        return _text("SHUFFLER_TOKEN_FILE", self.shuffler_token_file)

    def check_test_entry(self) -> None:
        """Raise LocalError when the test entry is open beyond this machine."""
        if self.test_entry and not is_loopback(self.host):
            raise LocalError(
                "invalid-spec", f"{PREFIX}TEST_ENTRY needs a loopback HOST, not {self.host}"
            )


def _bytes(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise LocalError("invalid-spec", f"{PREFIX}{name}: cannot read {file}: {error}") from error


def _text(name: str, file: Path) -> str:
    try:
        return _bytes(name, file).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise LocalError("invalid-spec", f"{PREFIX}{name}: cannot read {file}: {error}") from error


def _hex_bytes(name: str, file: Path) -> bytes:
    return _parsed(name, file, _bytes(name, file))


def _parsed(name: str, file: Path, data: bytes) -> bytes:
    """32 bytes from their hexadecimal text."""
    try:
        value = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        value = b""
    if len(value) != 32:
        raise LocalError("invalid-spec", f"{PREFIX}{name}: {file} must hold 64 hexadecimal digits")
    return value
