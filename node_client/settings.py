"""Settings of a node process (``RIFFLE_NODE_...`` variables), and the fields that a node may log.

The fields of the log name no user, lease or episode. ``detail`` is one line of one of Riffle's own
errors, about a descriptor, a file or an answer of the shuffler.
"""

import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from riffle.common.mechanism.parameters import Guarantee
from riffle.common.process import configuration
from riffle.common.process.endpoint import check_urls, is_loopback_service
from riffle.common.process.heads import HeadFolder
from riffle.common.process.journal import Journal
from riffle.common.protocol.descriptor import (
    MAX_EPOCH_SECONDS,
    Document,
    Hex16,
    Hex32,
    Name,
    first_fault,
)
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import read_pins
from riffle.common.protocol.wire import MAX_USERS_A_LEASE
from riffle.node_client.environments.registry import Parameter, declaration_of, make
from riffle.node_client.environments.tabular import Environment, EpisodeShape
from riffle.node_client.ledger import NAME, Limit, PersonalLedger
from riffle.node_client.trust import Demands
from riffle.node_client.users import opaque_id

T = TypeVar("T")
NEEDS_KEY = (
    "needs users_key_file, which hides the ids from the shuffler: 'riffle network enrol' writes "
    "users_key, and so does 'openssl rand -hex 32'"
)
OwnId = Annotated[str, StringConstraints(pattern=r"^\S+( \S+)*$", max_length=200)]
PREFIX = "RIFFLE_NODE_"
JOURNAL = Journal(
    "node",
    *("batch_id", "node_id", "messages", "reports", "accepted", "episodes", "failed"),
    *("problem", "reason", "detail", "request"),
)


class Credential(Document):
    """The id, owner and token of one node at the shuffler."""

    node_id: Hex16
    owner: Name | None = None
    token: str = Field(min_length=1, repr=False)


class Settings(configuration.DemandSettings):
    """Pins, demands, environment, credentials. Settings that protect users have no default."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    shuffler_url: str = Field(description="https://host:port[,https://...]; http on loopback")
    shuffler_id: Name = Field(description="the shuffler that descriptors must name")
    shuffler_key: Hex32 | None = Field(default=None, description="shuffler's Ed25519 key, hex")
    shuffler_key_file: Path | None = Field(default=None, description="file with that key")
    ca_file: Path | None = Field(default=None, description="PEM of a private CA of the shuffler")
    credentials_file: Path = Field(description="JSON list of {node_id, owner, token}")
    state_dir: Path = Field(description="folder of the record of users who were asked")
    users_file: Path | None = Field(
        default=None,
        description="JSON object node_id -> list of the owner's own ids of people, such as e-mail "
        "addresses; an id must always be spelt the same way",
    )
    users_key_file: Path | None = Field(
        default=None,
        description="file with a secret key, 64 hex digits, that hides these ids from the "
        "shuffler; the same for all nodes that may serve the same person, and never changed",
    )
    simulated_users: bool = Field(
        default=False, description="invent user ids instead: simulations and tests only"
    )

    environment: Name = Field(default="RiverSwim-v0", description="id of the users' environment")
    states: int | None = Field(
        default=None, ge=1, description="X, number of states; default: the environment's"
    )
    actions: int | None = Field(
        default=None, ge=1, description="A, number of actions; default: the environment's"
    )
    horizon: int | None = Field(
        default=None, ge=1, description="H, steps of an episode; default: the environment's"
    )
    environment_parameters: dict[str, Parameter] = Field(
        default_factory=dict, description="JSON object of the environment's other parameters"
    )

    max_epsilon: float = Field(gt=0, description="largest epsilon the owner accepts")
    max_beta: float = Field(gt=0, lt=1, description="largest beta the owner accepts")
    min_dishonest_fraction: float = Field(
        ge=0, lt=1, description="share of dishonest reports that a batch must withstand"
    )
    shortest_epoch_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EPOCH_SECONDS,
        description="shortest epoch in which a person may report again; needs a ledger; default: a "
        "person reports once in a lifetime",
    )
    ledger_file: Path | None = Field(
        default=None,
        description="file that records what each person has spent, over all shufflers; one file "
        "for all nodes of an owner",
    )
    ledger_head_dir: Path | None = Field(
        default=None,
        description="folder of the ledger's head, which no copy of the ledger may replace; one "
        "folder for all nodes of an owner; default: the folder of USERS_KEY_FILE or, without it, "
        "of CREDENTIALS_FILE",
    )
    lifetime_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="largest epsilon that a person may spend over all batches",
    )
    lifetime_beta: float | None = Field(
        default=None, gt=0, lt=1, description="beta of the lifetime limit; default: MAX_BETA"
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
    episode_share: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="the share that an episode may take of what is left of a lease after the "
        "descriptor's time for an episode; if it takes longer, its report carries noise only",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_urls("shuffler_url", self.shuffler_url)
        if not self.loopback:
            configuration.check_shares(self.max_owner_share, self.min_dishonest_fraction)
        if self.test_entry and not self.loopback:
            raise ValueError("test_entry needs a shuffler on loopback")
        given = {self.ledger_file is not None, self.lifetime_epsilon is not None}
        if len(given) == 2 or (self.shortest_epoch_seconds is not None and True not in given):
            raise ValueError(
                "ledger_file and lifetime_epsilon need each other, and shortest_epoch_seconds "
                "needs both: a person who reports again spends more, and only her node's owner "
                "can add it up"
            )
        for name in ("shuffler_key", "coordinator_key"):
            if (getattr(self, name) is None) == (getattr(self, f"{name}_file") is None):
                raise ValueError(f"give exactly one of {name} and {name}_file")
        self._check_users()
        return self

    def _check_users(self) -> None:
        if (self.users_file is None) != self.simulated_users:
            raise ValueError(
                "give exactly one of users_file and simulated_users=true: a node that invents its "
                "users protects none of them from being asked twice"
            )
        if self.users_file is not None and self.users_key_file is None:
            raise ValueError(f"users_file {NEEDS_KEY}")

    @property
    def loopback(self) -> bool:
        """Returns whether the shuffler is on this machine."""
        return is_loopback_service(self.shuffler_url)

    @cached_property
    def users_key(self) -> bytes | None:
        """The key of `users.opaque_id`, read only once; raises LocalError ``invalid-spec``."""
        file = self.users_key_file
        return None if file is None else configuration.hex_file(f"{PREFIX}USERS_KEY_FILE", file)

    def ledger(self) -> PersonalLedger | None:
        """Returns the ledger, or None if the owner has none. Raises the errors of its `check`."""
        if self.ledger_file is None or self.lifetime_epsilon is None:
            return None
        folder = self.ledger_head_dir or (self.users_key_file or self.credentials_file).parent
        limit = Limit(self.lifetime_epsilon, self.lifetime_beta or self.max_beta)
        ledger = PersonalLedger(self.ledger_file, HeadFolder(folder, NAME), limit)
        ledger.check(self.users_key)
        return ledger

    def make_environment(self) -> Environment:
        """Makes the environment. Raises the errors of `registry.make`."""
        sizes = self.model_dump(include={"states", "actions", "horizon"}, exclude_none=True)
        return make(self.environment, **{**self.environment_parameters, **sizes})

    def demands(self, environment: EpisodeShape) -> Demands:
        """Returns the owner's pins and demands. Raises LocalError if a key file is unusable."""
        return Demands(
            coordinator_key=self.hex_value("coordinator_key"),
            shuffler_key=self.hex_value("shuffler_key"),
            shuffler_id=self.shuffler_id,
            required=Guarantee(self.max_epsilon, self.max_beta, self.min_dishonest_fraction),
            environment=self.environment,
            sizes=environment.sizes,
            reward_range=environment.reward_range,
            declaration=declaration_of(environment),
            trust_models=self.trust_models,
            aggregations=self.aggregations,
            max_owner_share=self.max_owner_share,
            analyzer_keys=read_pins(self.analyzer_keys_file),
            max_seconds=self.max_batch_seconds,
            shortest_epoch=self.shortest_epoch_seconds,
            max_episode_seconds=self.max_episode_seconds,
            test_entry=self.test_entry,
            loopback=self.loopback,
        )

    def credentials(self) -> list[Credential]:
        """Returns the credentials of all nodes of this process.

        Raises LocalError ``invalid-spec`` if the file is unreadable, malformed or empty, or names a
        node twice.
        """
        if not self.credentials_file.exists():
            why = "there is none, and no node is enrolled yet: say 'riffle network enrol'"
            raise _bad_file("credentials", self.credentials_file, why)
        credentials = _read("credentials", self.credentials_file, _CREDENTIALS)
        nodes = {credential.node_id for credential in credentials}
        if len(nodes) != len(credentials) or not credentials:
            raise _bad_file("credentials", self.credentials_file, "name every node once")
        return credentials

    def users(self) -> dict[str, list[str]] | None:
        """Returns each node's opaque user ids by node id; None if users are simulated.

        Raises LocalError ``invalid-spec`` if the file is unreadable or malformed, names a user
        twice, or names other nodes than the credentials file does.
        """
        if self.users_file is None:
            return None
        nodes = {credential.node_id for credential in self.credentials()}
        key = self.users_key or b""  # `_check_users` demands it
        users = _read("users", self.users_file, _USERS)
        faults = [f"node {node} has no credential" for node in sorted(users.keys() - nodes)]
        faults += [f"no users of node {node}" for node in sorted(nodes) if not users.get(node)]
        people = [user for of_node in users.values() for user in of_node]
        if len(set(people)) != len(people):
            faults.append("a user is named twice; one person has one id, at one node")
        if faults:
            raise _bad_file("users", self.users_file, faults[0])
        return {node: [opaque_id(key, user) for user in ids] for node, ids in users.items()}


class AppSettings(Settings):
    """Settings of nodes inside an app, which names its users: ``users_file`` is not read."""

    def _check_users(self) -> None:
        if self.users_key_file is None:
            raise ValueError(f"an app {NEEDS_KEY}")

    def users(self) -> None:
        """Returns None, because no file lists an app's users."""

    def name_of(self, user: str) -> str:
        """Returns a user's opaque id. Raises LocalError ``invalid-spec`` if ``user`` is no id."""
        try:
            return opaque_id(self.users_key or b"", _USER.validate_python(user))
        except ValidationError as error:  # raised without its cause, which would show the id
            raise LocalError("invalid-spec", f"user's id: {first_fault(error)}") from None


_USER = TypeAdapter(OwnId)
_USERS = TypeAdapter(dict[Hex16, list[OwnId]])
_CREDENTIALS = TypeAdapter(list[Credential])


def _read(kind: str, file: Path, adapter: TypeAdapter[T]) -> T:
    try:
        return adapter.validate_json(configuration.file_bytes(f"{PREFIX}{kind.upper()}_FILE", file))
    except ValidationError as error:  # raised without its cause, which would show tokens or ids
        is_key = error.errors(include_input=False)[0]["loc"][-1:] == ("[key]",)
        # In a users file written the wrong way round, users' ids are the keys: quote no key.
        why = "a key is not a node's id, 32 hex digits" if is_key else first_fault(error)
        raise _bad_file(kind, file, why) from None


def _bad_file(kind: str, file: Path, why: str) -> LocalError:
    return LocalError("invalid-spec", f"{kind} file {file}: {why}")
