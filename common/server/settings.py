"""Settings of both servers: address, TLS, store, private keys."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, SecretStr
from sqlalchemy import Table

from riffle.common.process.configuration import RoleSettings, file_bytes, hex32, hex_file
from riffle.common.process.endpoint import is_loopback
from riffle.common.protocol.descriptor import MAX_EPOCH_SECONDS
from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import StorageCipher
from riffle.common.server.database import Head


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a server's certificate chain and private key."""

    certificate: Path
    key: Path


class ServerSettings(RoleSettings):
    """Settings that the operator of either server can set."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(ge=1, le=65535, description="port to listen on")
    store_url: str | None = Field(default=None, description="database URL; default: SQLite file")
    storage_key: SecretStr | None = Field(
        default=None, description="32 bytes in hex that encrypt private keys on disk"
    )
    storage_key_file: Path | None = Field(
        default=None, description="file with that key, on another medium; mandatory off loopback"
    )
    signing_key_file: Path = Field(description="Ed25519 private key that signs descriptors")
    head_dir: Path | None = Field(
        default=None,
        description="folder of the store's head, which no copy of the store may replace; default: "
        "the folder of the signing key",
    )
    accept_older_store: int | None = Field(
        default=None,
        ge=1,
        description="accept one older store, once: the number that the refusal of this store names",
    )
    metrics_token_hash_file: Path | None = Field(
        default=None, description="SHA-256 of a second token that may read /metrics"
    )
    tls_cert_file: Path | None = Field(default=None, description="PEM certificate chain")
    tls_key_file: Path | None = Field(default=None, description="PEM key of the certificate")
    max_head_bytes: int = Field(
        default=1 << 14, ge=1 << 12, description="largest head of a request, in bytes"
    )
    head_seconds: float = Field(
        default=10.0, gt=0, le=600, description="time for a request's head, TLS included"
    )
    max_waiting_connections: int = Field(
        default=2_048, ge=1, description="most connections without a request; then the oldest ends"
    )
    max_strangers: int = Field(
        default=256,
        ge=1,
        description="most connections without a request, over TLS, of callers who have sent no "
        "valid token",
    )
    epoch_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EPOCH_SECONDS,
        description="length of an epoch, in which a user may report once, the same for coordinator "
        "and shuffler; every batch states it; default: a user reports once in a lifetime",
    )
    test_entry: bool = Field(default=False, description="accept seeded noise; loopback only")

    def tls(self) -> Tls | None:
        """Returns the TLS files; None on loopback without TLS.

        Raises LocalError ``invalid-spec`` if only one file is set, or TLS is mandatory and not set.
        """
        certificate, key = self.tls_cert_file, self.tls_key_file
        if certificate is not None and key is not None:
            return Tls(certificate, key)
        if certificate is None and key is None and is_loopback(self.host):
            return None
        demand = "set both" if certificate or key else "TLS is mandatory off loopback: set"
        files = f"{self.prefix()}TLS_CERT_FILE and _TLS_KEY_FILE"
        raise LocalError("invalid-spec", f"{demand} {files}")

    def storage_cipher(self) -> StorageCipher:
        """Returns the cipher of the private keys on this service's disk.

        Raises LocalError ``invalid-spec`` if the storage key is given twice or is malformed, or if
        it is missing and other machines could connect.
        """
        variable = f"{self.prefix()}STORAGE_KEY"
        if self.storage_key is not None and self.storage_key_file is not None:
            raise LocalError("invalid-spec", f"set one of {variable} and {variable}_FILE")
        if self.storage_key_file is not None:
            return StorageCipher(hex_file(f"{variable}_FILE", self.storage_key_file))
        if self.storage_key is not None:
            return StorageCipher(hex32(variable, self.storage_key.get_secret_value().encode()))
        if not is_loopback(self.host):
            detail = "private keys must be encrypted where others can connect"
            raise LocalError("invalid-spec", f"{detail}: set {variable}_FILE")
        return StorageCipher(None)

    def signing_key(self) -> bytes:
        """Returns the raw Ed25519 private key (32 bytes)."""
        variable = f"{self.prefix()}SIGNING_KEY_FILE"
        data = file_bytes(variable, self.signing_key_file)
        return hex32(variable, self.storage_cipher().open(data, "signing key"))

    def head(self, name: str, meta: Table) -> Head:
        """Returns the head of this service's store (see `common.server.database.Head`)."""
        folder, accepted = self.head_dir or self.signing_key_file.parent, self.accept_older_store
        variables = (f"{self.prefix()}ACCEPT_OLDER_STORE", f"{self.prefix()}STORE_URL")
        return Head(folder, name, meta, *variables, accepted)

    def operator_hash(self) -> str:
        """Returns the SHA-256 of the operator's token, hex."""
        return self.hex_value("operator_token_hash").hex()

    def metrics_hash(self) -> str | None:
        """Returns the hash of the token that may read only the metrics, or None if it is unset."""
        no_file = self.metrics_token_hash_file is None
        return None if no_file else self.hex_value("metrics_token_hash").hex()

    def check_tokens(self, *hashes: str | None) -> None:
        """Raises LocalError if two callers' tokens have the same hash."""
        given = [each for each in hashes if each is not None]
        if len(set(given)) < len(given):
            detail = f"{self.prefix()}*TOKEN*: two are of one token: make one for each"
            raise LocalError("invalid-spec", detail)

    def check_test_entry(self) -> None:
        """Raises LocalError if seeded batches are accepted and other machines could connect."""
        if self.test_entry and not is_loopback(self.host):
            variable = f"{self.prefix()}TEST_ENTRY"
            raise LocalError("invalid-spec", f"{variable} needs a loopback HOST, not {self.host}")
