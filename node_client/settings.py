"""A node process's configuration, from ``RIFFLE_NODE_...`` variables. Checked whole at start."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from riffle.common.mechanism.noise import Guarantee, Trust
from riffle.common.process.configuration import RoleSettings, file_bytes, hex_file
from riffle.common.process.endpoint import check_urls, is_loopback_url, split_urls
from riffle.common.protocol.descriptor import Document, Hex16, Hex32, Name, first_fault
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.messages import MAX_USERS_A_LEASE
from riffle.common.protocol.verification import read_pins
from riffle.node_client.environments.registry import Parameter, make
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.trust import Demands

PREFIX = "RIFFLE_NODE_"


class Credential(Document):
    """One node's name and token at the shuffler."""

    node_id: Hex16
    token: str = Field(min_length=1, repr=False)


class Settings(RoleSettings):
    """Pins, demands, environment, credentials. What protects users has no default."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    shuffler_url: str = Field(description="https://host:port, replicas by commas; http on loopback")
    shuffler_id: Name = Field(description="the shuffler that descriptors must name")
    shuffler_key: Hex32 | None = Field(default=None, description="its Ed25519 public key, hex")
    shuffler_key_file: Path | None = Field(default=None, description="or a file that holds it")
    coordinator_key: Hex32 | None = Field(default=None, description="Ed25519 public key, hex")
    coordinator_key_file: Path | None = Field(default=None, description="or a file that holds it")
    analyzer_keys_file: Path | None = Field(
        default=None, description="pinned analyzer keys, hex, one a line; read at every batch"
    )
    ca_file: Path | None = Field(default=None, description="PEM of a private CA of the shuffler")
    credentials_file: Path = Field(description="JSON list of {node_id, token}, one a node")
    state_dir: Path = Field(description="where the users already asked are kept")
    users_file: Path | None = Field(
        default=None, description="JSON object node_id -> list of user ids (32 hex digits each)"
    )
    simulated_users: bool = Field(
        default=False, description="invent user ids instead: simulations and tests only"
    )

    environment: Name = Field(default="RiverSwim-v0", description="id of the users' environment")
    states: int | None = Field(default=None, ge=1, description="X, if not the environment's own")
    actions: int | None = Field(default=None, ge=1, description="A, if not the environment's own")
    horizon: int | None = Field(default=None, ge=1, description="H, if not the environment's own")
    environment_parameters: dict[str, Parameter] = Field(
        default_factory=dict, description="JSON object of what else the environment takes"
    )

    max_epsilon: float = Field(gt=0, description="largest epsilon the owner accepts")
    max_beta: float = Field(gt=0, lt=1, description="largest beta the owner accepts")
    min_dishonest_fraction: float = Field(
        ge=0, lt=1, description="dishonest reports that epsilon and beta must survive"
    )
    trust_models: tuple[Trust, ...] = Field(
        default=("shuffle",),
        min_length=1,
        description="trust models that the owner allows, a JSON list of shuffle, local, central",
    )
    test_entry: bool = Field(default=False, description="allow seeded batches, loopback only")

    workers: int = Field(
        default_factory=lambda: os.cpu_count() or 1, ge=1, le=256, description="sealing processes"
    )
    users_a_request: int = Field(
        default=MAX_USERS_A_LEASE,
        ge=1,
        le=MAX_USERS_A_LEASE,
        description="most users of one lease request",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_urls("shuffler_url", self.shuffler_url)
        if self.test_entry and not self.loopback:
            raise ValueError("test_entry needs a shuffler on loopback")
        for name in ("shuffler_key", "coordinator_key"):
            if (getattr(self, name) is None) == (getattr(self, f"{name}_file") is None):
                raise ValueError(f"give exactly one of {name} and {name}_file")
        if (self.users_file is None) != self.simulated_users:
            raise ValueError(
                "give exactly one of users_file and simulated_users=true: a node that invents its "
                "users protects none of them from being asked twice"
            )
        return self

    @property
    def loopback(self) -> bool:
        """Whether the shuffler is on this machine."""
        return all(map(is_loopback_url, split_urls(self.shuffler_url)))

    def make_environment(self) -> Environment:
        """The environment.

        Raises:
            LocalError: ``invalid-spec``, see `registry.make`.
        """
        sizes = {"states": self.states, "actions": self.actions, "horizon": self.horizon}
        given = {name: size for name, size in sizes.items() if size is not None}
        return make(self.environment, **{**self.environment_parameters, **given})

    def demands(self, environment: Environment) -> Demands:
        """Pins and demands for the trust core.

        Raises:
            LocalError: ``invalid-spec``: a key file cannot be read.
        """
        return Demands(
            coordinator_key=_key(
                "COORDINATOR_KEY", self.coordinator_key, self.coordinator_key_file
            ),
            shuffler_key=_key("SHUFFLER_KEY", self.shuffler_key, self.shuffler_key_file),
            shuffler_id=self.shuffler_id,
            required=Guarantee(self.max_epsilon, self.max_beta, self.min_dishonest_fraction),
            environment=self.environment,
            sizes=environment.sizes,
            reward_range=environment.reward_range,
            trust_models=self.trust_models,
            analyzer_keys=read_pins(self.analyzer_keys_file),
            test_entry=self.test_entry,
            loopback=self.loopback,
        )

    def credentials(self) -> list[Credential]:
        """The nodes of this process.

        Raises:
            LocalError: ``invalid-spec``: unreadable, malformed, empty, or a node named twice.
        """
        try:
            found = _CREDENTIALS.validate_json(
                file_bytes(f"{PREFIX}CREDENTIALS_FILE", self.credentials_file)
            )
        except ValidationError as error:
            raise LocalError(
                "invalid-spec", f"credentials file {self.credentials_file}: {first_fault(error)}"
            ) from None  # the cause would show tokens
        if len({credential.node_id for credential in found}) != len(found) or not found:
            raise LocalError(
                "invalid-spec", f"credentials file {self.credentials_file}: name every node once"
            )
        return found

    def users(self) -> dict[str, list[str]] | None:
        """Node id -> ids of its users; None when users are simulated.

        Raises:
            LocalError: ``invalid-spec``: unreadable, malformed, a user named twice, or other nodes
                than the credentials file has.
        """
        if self.users_file is None:
            return None
        try:
            found = _USERS.validate_json(file_bytes(f"{PREFIX}USERS_FILE", self.users_file))
        except ValidationError as error:
            raise self._bad_users(first_fault(error)) from None  # the cause would show ids
        named = {credential.node_id for credential in self.credentials()}
        for node in sorted(found.keys() - named):
            raise self._bad_users(f"node {node} has no credential")
        for node in sorted(node for node in named if not found.get(node)):
            raise self._bad_users(f"no users of node {node}")
        if _has_repeats(found.values()):
            raise self._bad_users("a user is named twice; one person has one id, at one node")
        return found

    def _bad_users(self, why: str) -> LocalError:
        return LocalError("invalid-spec", f"users file {self.users_file}: {why}")


_USERS = TypeAdapter(dict[Hex16, list[Hex16]])
_CREDENTIALS = TypeAdapter(list[Credential])


def _has_repeats(lists: Iterable[Sequence[str]]) -> bool:
    users = [user for some in lists for user in some]
    return len(set(users)) != len(users)


def _key(name: str, text: str | None, file: Path | None) -> bytes:
    if text is not None:
        return bytes.fromhex(text)
    assert file is not None  # noqa: S101 -- exactly one of the two, as was checked
    return hex_file(f"{PREFIX}{name}_FILE", file)
