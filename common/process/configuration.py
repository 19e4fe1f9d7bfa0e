"""Settings of a role: environment variables with the role's prefix, checked before the role starts.

The file named by ``..._SETTINGS_FILE`` may hold settings too, one ``NAME=value`` per line (dotenv).
The environment takes precedence over the file. Relative paths in the file start at its folder.
"""

import difflib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from dotenv.parser import Binding, parse_stream
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsError

from riffle.common.mechanism.parameters import DEFAULT_AGGREGATIONS, Aggregation, Trust
from riffle.common.process.endpoint import is_loopback_service
from riffle.common.protocol.descriptor import MAX_EPISODE_SECONDS, first_fault
from riffle.common.protocol.errors import LocalError

Share = Annotated[float, Field(gt=0, le=1)]

MIN_SIMILARITY = 0.85
"""A name that is at least this similar (0 to 1) to a setting's name counts as misspelt."""


class RoleSettings(BaseSettings):
    """Base of the roles' settings. Call `load` to read them."""

    loopback_defaults: ClassVar[dict[str, float]] = {"max_owner_share": 1.0}
    """Defaults that apply if all peers are on this machine; one owner then has all nodes."""

    settings_file: Path | None = Field(
        default=None,
        description="file of lines NAME=value; relative paths start at its folder; environment "
        "variables override its lines",
    )

    @model_validator(mode="before")
    @classmethod
    def _relax_on_loopback(cls, values: dict[str, Any]) -> dict[str, Any]:
        return (cls.loopback_defaults | values) if cls.has_loopback_peers(values) else values

    @classmethod
    def has_loopback_peers(cls, values: Mapping[str, Any]) -> bool:
        """Returns whether all peers in these settings are on this machine."""
        return is_loopback_service(str(values.get("shuffler_url")))

    @classmethod
    def prefix(cls) -> str:
        """Returns the prefix of the role's variables."""
        return str(cls.model_config.get("env_prefix", ""))

    @classmethod
    def variables(cls) -> list[str]:
        """Returns the names of the role's variables."""
        return [cls.prefix() + name.upper() for name in cls.model_fields]

    def hex_value(self, name: str) -> bytes:
        """Returns the 32 bytes of a setting, given as hexadecimal text or as a file of such text.

        Raises LocalError ``invalid-spec`` if neither is set, or the text or the file is unusable.
        """
        text, file = getattr(self, name, None), getattr(self, f"{name}_file")
        variable = self.prefix() + name.upper()
        if text is None and file is None:
            raise LocalError("invalid-spec", f"set {variable} or {variable}_FILE")
        return (
            hex_file(f"{variable}_FILE", file) if text is None else hex32(variable, text.encode())
        )

    @classmethod
    def load(cls, settings_file: Path | None = None, **given: Any) -> Self:  # noqa: ANN401
        """Returns the settings of the environment and of the settings file.

        The file is ``settings_file`` or, by default, the file that the variable SETTINGS_FILE
        names. ``given`` replaces single settings. Raises LocalError ``invalid-spec``, which names
        the wrong variable or line.
        """
        prefix = cls.prefix()
        # Names of settings are not case-sensitive.
        environment = {name.upper(): value for name, value in os.environ.items()}
        file = settings_file or environment.get(f"{prefix}SETTINGS_FILE")
        if file is not None:
            _check_file(Path(file), cls.variables())
        try:
            settings = cls(_env_file=file, **given)
        except SettingsError as error:  # a list or an object that is not JSON
            raise LocalError("invalid-spec", f"{prefix}*: {error}; give JSON") from error
        except ValidationError as error:
            fault = first_fault(error).removeprefix("document: ")
            raise LocalError("invalid-spec", f"{prefix}*: {fault}") from error
        elsewhere = environment.keys() | {prefix + name.upper() for name in given}
        moved = {
            name: Path(file or "").parent / value
            for name, value in settings
            if isinstance(value, Path) and prefix + name.upper() not in elsewhere
        }
        return settings.model_copy(update=moved) if file else settings


class DemandSettings(RoleSettings):
    """Demands on every batch. A node's owner and a shuffler's operator each set their own."""

    coordinator_key: str | None = Field(
        default=None, description="coordinator's Ed25519 public key, hex"
    )
    coordinator_key_file: Path | None = Field(default=None, description="file with that key")
    analyzer_keys_file: Path | None = Field(
        default=None, description="pinned analyzer keys, hex, one a line; read at every batch"
    )
    trust_models: tuple[Trust, ...] = Field(
        default=("shuffle",),
        min_length=1,
        description="trust models that are allowed, a JSON list of shuffle, local, central",
    )
    aggregations: tuple[Aggregation, ...] = Field(
        default=DEFAULT_AGGREGATIONS,
        min_length=1,
        description="aggregations that are allowed, a JSON list of messages, sums; with sums, one "
        "dishonest report can set every count, so every node must run its owner's own software",
    )
    max_owner_share: Share = Field(
        default=0.05,
        description="largest share of a batch that one owner's nodes may hold; default on "
        "loopback: 1, which is no limit",
    )
    max_batch_seconds: int = Field(
        default=31 * 86_400,
        ge=1,
        le=10 * 366 * 86_400,
        description="longest time for which a batch may be open; the shuffler erases its reports "
        "at most RETENTION_SECONDS later; until then, whoever seizes the shuffler can link "
        "messages to their senders",
    )
    max_episode_seconds: int = Field(
        default=7 * 86_400,
        ge=0,
        le=MAX_EPISODE_SECONDS,
        description="longest time that a batch may give a person's episode; a slot that is taken "
        "and not used is free again only after this time",
    )


def check_shares(max_owner_share: float, dishonest_fraction: float) -> None:
    """Raises ValueError if one owner's nodes could break the guarantee by adding no noise."""
    if max_owner_share > dishonest_fraction:
        raise ValueError(
            f"off loopback, max_owner_share {max_owner_share:g} must not be above "
            f"min_dishonest_fraction {dishonest_fraction:g}: an owner whose nodes add no noise "
            "would break the guarantee; lower the share, or raise the fraction"
        )


def file_bytes(variable: str, file: Path) -> bytes:
    """Returns the bytes of the file that a variable names; raises LocalError ``invalid-spec``."""
    try:
        return file.read_bytes()
    except OSError as error:
        detail = f"{variable}: cannot read {file}: {error.strerror}"
        raise LocalError("invalid-spec", detail) from error


def hex32(variable: str, text: bytes) -> bytes:
    """Returns a key or hash (32 bytes) from hexadecimal text; blanks around it are ignored.

    Raises LocalError ``invalid-spec``, whose sentence omits the text: the text may be secret.
    """
    try:
        value = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        value = b""
    if len(value) != 32:
        raise LocalError("invalid-spec", f"{variable} must be 32 bytes as 64 hex digits")
    return value


def hex_file(variable: str, file: Path) -> bytes:
    """Returns the 32 bytes of the file that a variable names; raises the errors of `hex32`."""
    return hex32(variable, file_bytes(variable, file))


def similar_variable(name: str, known: Iterable[str]) -> str | None:
    """Returns the variable that a misspelt name resembles, if any; ignores case."""
    matches = difflib.get_close_matches(name.upper(), list(known), 1, MIN_SIMILARITY)
    return matches[0] if matches else None


def _check_file(file: Path, variables: list[str]) -> None:
    """Raises LocalError at the first line that is not a setting of the role."""
    try:
        lines = list(parse_stream(io.StringIO(file.read_text("utf-8"))))
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError("invalid-spec", f"cannot read settings file {file}: {error}") from error
    known = [name for name in variables if not name.endswith("_SETTINGS_FILE")]
    for line in lines:
        if (fault := _fault(line, known)) is not None:
            number = line.original.line + line.original.string.count("\n", 0, -1)
            raise LocalError("invalid-spec", f"settings file {file}, line {number}: {fault}")


def _fault(line: Binding, known: list[str]) -> str | None:
    if line.error or (line.key is not None and line.value is None):
        return "not understood; give NAME=value"
    if line.key is None or line.key.upper() in known:
        return None
    similar = similar_variable(line.key, known)
    return f"there is no setting {line.key}" + (f"; did you mean {similar}?" if similar else "")
