"""Checks of ``riffle doctor``: of a machine, a network, and the needs of a run."""

import datetime
import os
import platform
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509

from riffle.common.process.configuration import RoleSettings, similar_variable
from riffle.common.process.endpoint import failure_reason, split_urls
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import KeyPair, OpenError, open_sealed, seal
from riffle.common.server.at_rest import is_sealed
from riffle.common.server.monitoring import clock_skew, clock_trouble
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.network.processes import make_folder, probe
from riffle.deploy.network.secrets import ROLES, STORAGE, inner_network
from riffle.deploy.network.settings_files import SETTINGS_FILE
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.settings import Settings as ShufflerSettings

LEAST_DAYS = 30
LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 1 << 30
ROLE_SETTINGS: tuple[type[RoleSettings], ...] = (
    ShufflerSettings,
    CoordinatorSettings,
    NodeSettings,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. If it is not ``ok``, ``detail`` tells what to do."""

    check: str
    ok: bool
    detail: str


def examine(folder: Path, ports: list[int], network: Path | None, urls: list[str]) -> list[Finding]:
    """Runs all checks of this machine, of the results folder and, if given, of a network."""
    version, count = platform.python_version(), os.cpu_count() or 1
    findings = [
        Finding("python", sys.version_info >= LEAST_PYTHON, f"{version}; 3.11 or later is needed"),
        _cryptography(),
        Finding("processors", count >= 2, f"{count}; with fewer than 2 runs take twice as long"),
        _folder(folder),
        _space(folder),
    ]
    findings += [_port(port) for port in ports]
    findings += check_variables(os.environ)
    findings += check_settings(os.environ)
    ca_file = None
    if network is not None:
        findings += check_secrets(network)
        findings += check_tokens(network)
        findings += check_encryption(network)
        findings += check_certificates(network, datetime.datetime.now(datetime.UTC))
        findings += check_settings_files(network)
        files = sorted((network / "operator").glob("*_url"))
        urls = urls or [url for file in files for url in split_urls(file.read_text())]
        file = network / "operator" / "ca.pem"
        ca_file = file if file.exists() else None
    return findings + [finding for url in urls for finding in check_service(url, ca_file)]


def check_secrets(network: Path) -> Iterator[Finding]:
    """Finds missing folders, and files that other users can read."""
    folders = [network / role for role in (*ROLES, *STORAGE)]
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        inner = inner_network(network)
        names = ", ".join(map(str, missing)) if len(missing) < len(folders) else ""
        absent = names or f"network in {network}"
        detail = f"there is no {absent}; make it with 'riffle network init {network}'"
        if inner is not None:
            detail = f"there is no network in {network}, but one in {inner}: name that folder"
        yield Finding("secrets", False, detail)
    for folder in (folder for folder in folders if folder not in missing):
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        readable = [file for file in files if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]
        if readable:
            yield Finding("secrets", False, f"others can read {readable[0]}; say chmod go= on it")
        else:
            yield Finding("secrets", True, f"{folder} is its owner's alone")


def check_tokens(network: Path) -> Iterator[Finding]:
    """Finds tokens that two services accept, or that one service accepts for two callers."""
    seen: dict[str, Path] = {}
    for file in sorted(network.glob("*/*_token_hash")):
        if (other := seen.setdefault(file.read_text().strip(), file)) != file:
            fix = "remove both and their tokens, and say 'riffle network init' again"
            yield Finding("tokens", False, f"{other} and {file} are of one token; {fix}")
            return
    if seen:
        yield Finding("tokens", True, f"{len(seen)} tokens open one service each")


def check_encryption(network: Path) -> Iterator[Finding]:
    """Finds private keys that are not encrypted."""
    for role in ("shuffler", "coordinator"):
        folder = network / role
        files = [folder / "signing_key", *sorted((folder / "analyzer_keys").glob("*.key"))]
        clear = [file for file in files if file.is_file() and not is_sealed(file.read_bytes())]
        if clear:
            detail = f"{clear[0]} is not encrypted: good for a demonstration on one machine only"
            yield Finding("encryption", False, detail)
        elif files[0].is_file():
            yield Finding("encryption", True, f"private keys in {folder} are encrypted")


def check_certificates(network: Path, now: datetime.datetime) -> Iterator[Finding]:
    """Finds certificates that have expired or soon will. ``now`` is timezone-aware."""
    files, ok = sorted(network.glob("*/*.pem")), True
    for file in files:
        try:
            end = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
        except ValueError:
            ok = False
            yield Finding("certificates", False, f"{file} is no certificate; restore it")
            continue
        days = (end - now).days
        if days < LEAST_DAYS:
            ok = False
            when = f"ended {end:%Y-%m-%d}" if end <= now else f"ends in {days} days"
            fix = "remove all *.pem and tls.key of the network and say 'riffle network init' again"
            yield Finding("certificates", False, f"{file} {when}; {fix}")
    if files and ok:
        yield Finding("certificates", True, f"{len(files)} end in {LEAST_DAYS} days or later")


def check_service(url: str, ca_file: Path | None) -> Iterator[Finding]:
    """Checks whether a service is ready, and how far its clock is from this machine's clock."""
    try:
        answer = probe(f"{url}/readyz", ca_file)
    except httpx.HTTPError as error:
        yield Finding("service", False, f"{url} does not answer: {failure_reason(error)}")
        return
    except LocalError as error:
        yield Finding("service", False, error.detail)
        return
    yield Finding("service", answer.is_success, f"{url} says {answer.text.strip()[:400]}")
    skew = clock_skew(answer.headers.get("Date"), datetime.datetime.now(datetime.UTC))
    trouble = clock_trouble(skew)
    if trouble is not None:
        trouble = trouble.replace("the shuffler's clock", f"the clock of {url}")
    yield Finding("clock", trouble is None, trouble or f"{url} has about our time")


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Finds variables that are not settings, but have a role's prefix or resemble a setting."""
    prefixes = tuple(settings.prefix() for settings in ROLE_SETTINGS)
    known = [name for settings in ROLE_SETTINGS for name in settings.variables()]
    for name in sorted(environment):
        near = similar_variable(name, known)
        # Names of settings are not case-sensitive.
        if name.upper() in known or not (near or name.upper().startswith(prefixes)):
            continue
        hint = f"; did you mean {near}?" if near else ""
        yield Finding("variables", False, f"no role knows {name}{hint}")


def check_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the settings of each role that has variables in this process's ``environment``."""
    for role in ROLE_SETTINGS:
        if any(name.upper().startswith(role.prefix()) for name in environment):
            yield _settings(role, None)


def check_settings_files(network: Path) -> Iterator[Finding]:
    """Checks the settings file of each role that has one in its folder."""
    for role, folder in zip(ROLE_SETTINGS, ROLES, strict=False):
        if (file := network / folder / SETTINGS_FILE).exists():
            yield _settings(role, file)


def _settings(role: type[RoleSettings], file: Path | None) -> Finding:
    try:
        settings = role.load(file)
        if isinstance(settings, NodeSettings):
            settings.users()  # reads the credentials and the users' key, too
    except LocalError as error:
        return Finding("settings", False, f"{file}: {error.detail}" if file else error.detail)
    known = f"{file} is" if file else f"{role.prefix()}* are"
    return Finding("settings", True, f"{known} understood")


def _cryptography() -> Finding:
    try:
        key = KeyPair.generate()
        works = open_sealed(key.private, b"doctor", seal(key.public, b"doctor", b"x")) == b"x"
    except (OpenError, RuntimeError) as error:
        return Finding("hpke", False, f"sealing fails: {error}; reinstall 'cryptography'")
    return Finding("hpke", works, "a message sealed here opens here")


def _folder(folder: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=make_folder(folder)) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except LocalError as error:
        return Finding("results folder", False, error.detail)
    except OSError as error:
        return Finding("results folder", False, f"cannot write in {folder}: {error.strerror}")
    return Finding("results folder", True, f"{folder} can be written")


def _space(folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("disk", False, f"cannot look at {folder}: {error.strerror}")
    return Finding("disk", free >= LEAST_FREE_BYTES, f"{free >> 20} MiB free; 1024 are enough")


def _port(port: int) -> Finding:
    with socket.socket() as listener:
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "ports end at 65535"
            return Finding("port", False, f"port {port} cannot be used: {why}; choose another")
    return Finding("port", True, f"{port} is free")
