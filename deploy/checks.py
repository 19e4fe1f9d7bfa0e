"""What is wrong with a network's files, its clocks, and the variables it is configured by."""

import datetime
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509

from riffle.common.at_rest import is_sealed
from riffle.common.configuration import RoleSettings, meant
from riffle.common.errors import LocalError
from riffle.common.readiness import clock_trouble, skew
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.network import ROLES, STORAGE, inner_network
from riffle.deploy.probe import get
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.settings import Settings as ShufflerSettings

LEAST_DAYS = 30
ROLE_SETTINGS: tuple[type[RoleSettings], ...] = (
    ShufflerSettings,
    CoordinatorSettings,
    NodeSettings,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, whether it is well, and what to do when it is not."""

    check: str
    ok: bool
    detail: str


def secrets(network: Path) -> Iterator[Finding]:
    """Folders that are missing, files that others can read."""
    folders = [network / role for role in (*ROLES, *STORAGE)]
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        yield Finding("secrets", False, _missing(network, missing, len(folders)))
    for folder in (folder for folder in folders if folder not in missing):
        readable = [file for file in sorted(folder.rglob("*")) if _others_can_read(file)]
        if readable:
            yield Finding("secrets", False, f"others can read {readable[0]}; say chmod go= on it")
        else:
            yield Finding("secrets", True, f"{folder} is its owner's alone")


def _missing(network: Path, missing: list[Path], of: int) -> str:
    inner = inner_network(network)
    if inner is not None:
        return f"there is no network in {network}, but one in {inner}: name that folder"
    what = "network in " + str(network) if len(missing) == of else ", ".join(map(str, missing))
    return f"there is no {what}; make it with 'riffle network init {network}'"


def encryption(network: Path) -> Iterator[Finding]:
    """Private keys that lie in clear."""
    for role in ("shuffler", "coordinator"):
        folder = network / role
        files = [folder / "signing_key", *sorted((folder / "analyzer_keys").glob("*.key"))]
        clear = [file for file in files if file.is_file() and not is_sealed(file.read_bytes())]
        if clear:
            detail = f"{clear[0]} is not encrypted: good for a demonstration on one machine only"
            yield Finding("encryption", False, detail)
        elif files[0].is_file():
            yield Finding("encryption", True, f"private keys in {folder} are encrypted")


def certificates(network: Path, now: datetime.datetime) -> Iterator[Finding]:
    """Certificates that are over, or soon are. ``now`` is aware."""
    files, well = sorted(network.glob("*/*.pem")), True
    for file in files:
        try:
            ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
        except ValueError:
            well = False
            yield Finding("certificates", False, f"{file} is no certificate; restore it")
            continue
        days = (ends - now).days
        if days < LEAST_DAYS:
            well = False
            told = f"ended {ends:%Y-%m-%d}" if ends <= now else f"ends in {days} days"
            fix = "remove all *.pem and tls.key of the network and say 'riffle network init' again"
            yield Finding("certificates", False, f"{file} {told}; {fix}")
    if files and well:
        yield Finding("certificates", True, f"{len(files)} end in {LEAST_DAYS} days or later")


def service(url: str, ca_file: Path | None) -> Iterator[Finding]:
    """Whether a service is ready, and how far its clock is off ours."""
    try:
        answer = get(f"{url}/readyz", ca_file)
    except httpx.HTTPError as error:
        yield Finding("service", False, f"{url} does not answer: {error}; is it started?")
        return
    except LocalError as error:
        yield Finding("service", False, error.detail)
        return
    yield Finding("service", answer.is_success, f"{url} says {answer.text.strip()[:400]}")
    ahead = skew(answer.headers.get("Date"), datetime.datetime.now(datetime.UTC))
    trouble = clock_trouble(ahead)
    said = trouble.replace("the shuffler's clock", f"the clock of {url}") if trouble else None
    yield Finding("clock", trouble is None, said or f"{url} has about our time")


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that are almost a setting: a typing error sets nothing, silently."""
    prefixes = tuple(settings.prefix() for settings in ROLE_SETTINGS)
    known = [name for settings in ROLE_SETTINGS for name in settings.variables()]
    for name in sorted(environment):
        # Names are not told apart by case where they are read.
        near = meant(name, known)
        if name.upper() in known or not (near or name.upper().startswith(prefixes)):
            continue
        hint = f"; did you mean {near}?" if near else ""
        yield Finding("variables", False, f"no role knows {name}{hint}")


def settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Settings of each role that has variables here: whether it would take them.

    ``environment`` must be the process's own: that is where settings are read.
    """
    for role in ROLE_SETTINGS:
        if not any(name.upper().startswith(role.prefix()) for name in environment):
            continue
        try:
            found = role.load()
        except LocalError as error:
            yield Finding("settings", False, error.detail)
            continue
        yield Finding("settings", True, f"{role.prefix()}* are understood")
        if isinstance(found, ShufflerSettings) and found.max_node_share == 1.0:
            detail = "RIFFLE_SHUFFLER_MAX_NODE_SHARE is 1.0: one node may fill a whole batch"
            yield Finding("share", False, f"{detail}; set the share that you trust one node with")


def _others_can_read(file: Path) -> bool:
    return bool(file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)) and file.is_file()
