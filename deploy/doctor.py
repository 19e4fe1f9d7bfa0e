"""What is wrong with this machine or this network, said before it is blamed on Riffle."""

import datetime
import os
import platform
import socket
import sys
import tempfile
from pathlib import Path

from riffle.common.errors import LocalError
from riffle.common.hpke import KeyPair, SealBroken, open_sealed, seal
from riffle.deploy import checks
from riffle.deploy.certificates import LOOPBACK
from riffle.deploy.checks import Finding
from riffle.deploy.folder import made

LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 1 << 30


def examine(folder: Path, ports: list[int], network: Path | None, urls: list[str]) -> list[Finding]:
    """All checks: this machine, the folder for results, and, where given, a network."""
    findings = [_python(), _cryptography(), _processors(), _folder(folder), _space(folder)]
    findings += [_port(port) for port in ports]
    findings += checks.variables(os.environ)
    findings += checks.settings(os.environ)
    if network is not None:
        findings += checks.secrets(network)
        findings += checks.encryption(network)
        findings += checks.certificates(network, datetime.datetime.now(datetime.UTC))
    ca_file = network / "operator" / "ca.pem" if network is not None else None
    known = ca_file if ca_file is not None and ca_file.exists() else None
    return findings + [finding for url in urls for finding in checks.service(url, known)]


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
        with tempfile.TemporaryFile(dir=made(folder)) as file:
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
        usage = os.statvfs(folder)
    except OSError as error:
        return Finding("disk", False, f"cannot look at {folder}: {error.strerror}")
    free = usage.f_bavail * usage.f_frsize
    return Finding("disk", free >= LEAST_FREE_BYTES, f"{free >> 20} MiB free; 1024 are enough")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "ports end at 65535"
            return Finding("port", False, f"port {port} cannot be used: {why}; choose another")
    return Finding("port", True, f"{port} is free")
