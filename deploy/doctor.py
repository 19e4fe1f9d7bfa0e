"""What is wrong with this machine or this network, said before it is blamed on Riffle."""

import os
import platform
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.hpke import KeyPair, SealBroken, open_sealed, seal
from deploy.certificates import LOOPBACK
from deploy.network import ROLES
from deploy.probe import get

LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, whether it is well, and what to do when it is not."""

    check: str
    ok: bool
    detail: str


def examine(folder: Path, ports: list[int], network: Path | None, urls: list[str]) -> list[Finding]:
    """All checks: this machine, the folder for results, and, where given, a network."""
    findings = [_python(), _cryptography(), _processors(), _folder(folder), _space(folder)]
    findings += [_port(port) for port in ports]
    if network is not None:
        findings += _secrets(network)
    ca_file = network / "operator" / "ca.pem" if network is not None else None
    known = ca_file if ca_file is not None and ca_file.exists() else None
    return findings + [_service(url, known) for url in urls]


def _python() -> Finding:
    ok = sys.version_info >= LEAST_PYTHON
    return Finding("python", ok, f"{platform.python_version()}; 3.11 or later is needed")


def _cryptography() -> Finding:
    try:
        key = KeyPair.generate()
        works = open_sealed(key.private, b"doctor", seal(key.public, b"doctor", b"x")) == b"x"
    except (SealBroken, RuntimeError) as error:
        return Finding("hpke", False, f"sealing fails: {error}; reinstall 'cryptography'")
    return Finding("hpke", works, "a message sealed here opens here")


def _processors() -> Finding:
    count = os.cpu_count() or 1
    return Finding("processors", count >= 2, f"{count}; with fewer than 2 runs take twice as long")


def _folder(folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("results folder", False, f"cannot write in {folder}: {error.strerror}")
    return Finding("results folder", True, f"{folder} can be written")


def _space(folder: Path) -> Finding:
    try:
        usage = os.statvfs(folder)
    except OSError as error:
        return Finding("disk", False, f"cannot look at {folder}: {error.strerror}")
    free = usage.f_bavail * usage.f_frsize
    return Finding("disk", free >= LEAST_FREE_BYTES, f"{free >> 20} MiB free; 1024 are enough")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            detail = f"port {port} cannot be used: {error.strerror}; choose another"
            return Finding("port", False, detail)
    return Finding("port", True, f"{port} is free")


def _secrets(network: Path) -> Iterator[Finding]:
    for role in ROLES:
        folder = network / role
        if not folder.is_dir():
            fix = f"there is no {folder}; make it with 'riffle network init {network}'"
            yield Finding("secrets", False, fix)
            continue
        open_files = [file for file in folder.iterdir() if _others_can_read(file)]
        if open_files:
            yield Finding("secrets", False, f"others can read {open_files[0]}; say chmod 600")
        else:
            yield Finding("secrets", True, f"{folder} is its owner's alone")


def _others_can_read(file: Path) -> bool:
    return bool(file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def _service(url: str, ca_file: Path | None) -> Finding:
    try:
        answer = get(f"{url}/readyz", ca_file)
    except httpx.HTTPError as error:
        return Finding("service", False, f"{url} does not answer: {error}; is it started?")
    return Finding("service", answer.is_success, f"{url} says {answer.text.strip()[:200]}")
