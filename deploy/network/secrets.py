"""The secrets of a network, one folder a role, so that no role holds another's.

``init_network`` writes them where they are missing and never overwrites one:

- ``shuffler/``: its signing key, the coordinator's public key, hashes of the tokens it accepts.
- ``coordinator/``: its signing key, the analyzer's private key, its token at the shuffler, the hash
  of the operator's token.
- ``nodes/``: public keys to pin, and, after `enrol`, the nodes' credentials. Enrolment belongs to
  the shuffler's operator: the coordinator's folder never sees them.
- ``operator/``: the operator's two tokens and the one that reads metrics, in clear; keep this
  folder. In ``coordinator_url`` may stand where the coordinator answers.

Private keys are encrypted under the key of ``shuffler-storage/`` or ``coordinator-storage/``, which
belongs on another medium than the role's own folder.

Each server also gets a TLS certificate of the network's own CA (``certificates``), whose
certificate everybody else holds as ``ca.pem``. On loopback TLS may be left off.
"""

import datetime
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError

from riffle.common.process.endpoint import (
    AsyncFailover,
    Failover,
    check_url,
    hash_token,
    server_verification,
    split_urls,
)
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RemoteError, problem_document, problem_slug
from riffle.common.protocol.messages import Enrolment, EnrolRequest
from riffle.common.server.at_rest import FileCipher, replace_file
from riffle.coordinator.batches.keys import KeyRecord, KeyRing
from riffle.deploy.network.certificates import make_authority
from riffle.deploy.network.processes import make_folder

STORAGE = ("shuffler-storage", "coordinator-storage")
ROLES = ("shuffler", "coordinator", "nodes", "operator")
SHUFFLER_ID = "shuffler"
NETWORK_FOLDER = "network"
"""Name of the network's folder within that of ``riffle up``."""
URL_FILE = "coordinator_url"
TOKEN_FILE = "coordinator_token"  # noqa: S105  (a file's name)
SHUFFLER_TOKEN_FILE = "shuffler_token"  # noqa: S105
SECONDS = 60.0
_CREDENTIALS = TypeAdapter(list[Enrolment])


def init_network(folder: Path, replicas: int = 1) -> None:
    """Write every secret that is missing. Idempotent.

    Certificates name ``replicas`` hosts a server: ``shuffler``, ``shuffler-2`` and so on.

    Raises:
        LocalError: ``wrong-state``, a file is where a folder is needed.
    """
    for role in (*ROLES, *STORAGE):
        make_folder(folder / role)
    for role in ("shuffler", "coordinator"):
        _write(folder / f"{role}-storage" / "key", secrets.token_bytes(32).hex())
        _key_pair(folder, role)
    _copy(folder / "nodes" / "coordinator_key", folder / "shuffler" / "coordinator_key")
    ring = key_ring(folder)
    ring.init()
    for role in ("nodes", "shuffler"):
        _write(folder / role / "analyzer_keys", _pins(ring.records()))
    _token(
        folder / "coordinator" / "shuffler_token", folder / "shuffler" / "coordinator_token_hash"
    )
    _token(folder / "operator" / SHUFFLER_TOKEN_FILE, folder / "shuffler" / "operator_token_hash")
    _token(folder / "operator" / TOKEN_FILE, folder / "coordinator" / "operator_token_hash")
    _token(folder / "operator" / "metrics_token", folder / "shuffler" / "metrics_token_hash")
    _copy(folder / "shuffler" / "metrics_token_hash", folder / "coordinator" / "metrics_token_hash")
    _certificates(folder, replicas)


def enrol(
    folder: Path,
    shuffler_url: str,
    nodes: int,
    users: int,
    on_node: Callable[[], None] = lambda: None,
) -> None:
    """Enrol nodes, each for at most ``users`` users, until the network has ``nodes`` credentials.

    ``on_node`` is called after each.

    Raises:
        RemoteError: the shuffler refused.
        LocalError: ``unavailable``, it does not answer; ``invalid-spec``, the file of credentials
            is damaged.
    """
    file = folder / "nodes" / "credentials.json"
    credentials = _credentials(file) if file.exists() else []
    token = operator_token(folder, SHUFFLER_TOKEN_FILE)
    with operator_client(folder, shuffler_url, token) as client:
        for number in range(len(credentials), nodes):
            request = EnrolRequest(name=f"node-{number + 1}", users=users)
            credentials.append(_enrol_one(client, request))
            # After each one: a token is shown once, and an interrupted enrolment must not lose it.
            _replace(file, json.dumps([one.model_dump() for one in credentials], indent=1))
            on_node()


def operator_token(folder: Path, name: str) -> str:
    """One of the operator's tokens.

    Raises:
        LocalError: ``unavailable``, it is not there.
    """
    file = folder / "operator" / name
    if not file.exists():
        raise LocalError("unavailable", f"no token at {file}{_elsewhere(folder)}")
    return file.read_text().strip()


def _elsewhere(folder: Path) -> str:
    """Where the network may be whose token is not in this folder."""
    inner = inner_network(folder)
    if inner is not None:
        return f"; the network's folder is {inner}"
    return (
        ": no network is up there, or not yet (riffle up says when it is); name the folder of a "
        "network, as --network runs/demo/network, or make a new one with 'riffle network init'"
    )


def inner_network(folder: Path) -> Path | None:
    """The network's folder within the results' folder of ``riffle up``, where that was meant."""
    inner = folder / NETWORK_FOLDER
    return inner if (inner / "operator").is_dir() else None


def operator_client(folder: Path, url: str, token: str) -> httpx.Client:
    """An HTTP client of the operator's: bearer token, and the network's CA for https.

    ``url`` may be several, of replicas, with commas between.

    Raises:
        ValueError: one is no address, or would show the token to whoever listens on the way.
    """
    urls, verify = _addresses(url), server_verification(folder / "operator" / "ca.pem")
    transport = Failover(urls, httpx.HTTPTransport(verify=verify, trust_env=False))
    return httpx.Client(
        base_url=urls[0], headers=_bearer(token), timeout=SECONDS, transport=transport
    )


def async_operator_client(folder: Path, url: str, token: str) -> httpx.AsyncClient:
    """As `operator_client`, for many requests at a time."""
    urls, verify = _addresses(url), server_verification(folder / "operator" / "ca.pem")
    transport = AsyncFailover(urls, httpx.AsyncHTTPTransport(verify=verify, trust_env=False))
    return httpx.AsyncClient(
        base_url=urls[0], headers=_bearer(token), timeout=SECONDS, transport=transport
    )


def refusal(answer: httpx.Response, who: str) -> RemoteError:
    """The error that a service's refusal means, whether or not it is a problem document.

    Who knows no such route, or is none of ours, is another service than ``who``.
    """
    document = problem_document(answer.content)
    if answer.status_code == HTTPStatus.NOT_FOUND and _no_route(document):
        at = f"{answer.url.scheme}://{answer.url.netloc.decode()}"
        return RemoteError(
            "not-found",
            f"{at} answers, but not as {who} does; is it the address of another service?",
        )
    detail = document.get("detail", f"status {answer.status_code}")
    return RemoteError(problem_slug(document), f"{who} refused: {detail}")


def _no_route(document: dict[str, Any]) -> bool:
    """Whether a 404 means the address, and not what was asked for: Starlette's bare words."""
    return (
        problem_slug(document) == "internal"
        or document.get("detail") == HTTPStatus.NOT_FOUND.phrase
    )


def parse_enrolment(answer: httpx.Response) -> Enrolment:
    """The credential in the shuffler's answer to an enrolment.

    Raises:
        RemoteError: it refuses, or says something else (``malformed``).
    """
    if answer.is_error:
        raise refusal(answer, "the shuffler")
    try:
        return Enrolment.model_validate_json(answer.content)
    except ValidationError:  # without its cause, which may show the token
        raise RemoteError("malformed", "the shuffler's answer is no enrolment") from None


def _enrol_one(client: httpx.Client, request: EnrolRequest) -> Enrolment:
    try:
        answer = client.post("/v1/nodes", content=request.model_dump_json())
    except httpx.HTTPError as error:
        raise LocalError("unavailable", f"the shuffler does not answer: {error}") from error
    return parse_enrolment(answer)


def _credentials(file: Path) -> list[Enrolment]:
    try:
        return _CREDENTIALS.validate_json(file.read_bytes())
    except ValidationError as error:  # without its cause, which may show tokens
        raise LocalError("invalid-spec", f"credentials file {file}: {first_fault(error)}") from None


def _addresses(url: str) -> tuple[str, ...]:
    """Where to send a token: TLS, or this machine."""
    return tuple(check_url(f"the address {each!r}", each) for each in split_urls(url))


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _certificates(folder: Path, replicas: int) -> None:
    """TLS files of both servers, made together: their CA's key is not kept."""
    if (folder / "operator" / "ca.pem").exists():
        return
    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority(now)
    for host in ("shuffler", "coordinator"):
        others = (f"{host}-{number}" for number in range(2, replicas + 1))
        certificate, key = authority.issue(host, now, others)
        _replace(folder / host / "tls.pem", certificate)
        _replace(folder / host / "tls.key", key)
    for role in ROLES:
        _replace(folder / role / "ca.pem", authority.pem)


def at_rest(folder: Path, role: str) -> FileCipher:
    """How a server's private keys are encrypted.

    Raises:
        LocalError: ``invalid-spec``, the storage key is none.
    """
    file = folder / f"{role}-storage" / "key"
    try:
        return FileCipher(bytes.fromhex(file.read_text()))
    except ValueError as error:
        raise LocalError("invalid-spec", f"{file} must hold 64 hexadecimal digits") from error


def key_ring(folder: Path) -> KeyRing:
    """The analyzer's keys of a network."""
    keys = folder / "coordinator" / "analyzer_keys"
    return KeyRing(keys, at_rest(folder, "coordinator"), time.time)


def pin(folder: Path, keys: Iterable[Mapping[str, Any]]) -> None:
    """Pin the keys that are in use, or will be, at nodes and shuffler; let go of the others."""
    records = [KeyRecord(**key) for key in keys]
    for role in ("nodes", "shuffler"):
        _replace(folder / role / "analyzer_keys", _pins(records))


def _pins(records: Iterable[KeyRecord]) -> str:
    used = [record for record in records if record.state != "erased"]
    return "".join(f"{one.public} # {one.id}\n" for one in used)


def _key_pair(folder: Path, role: str) -> None:
    """A server's signing key, and its public half where nodes pin it."""
    private_file, storage = folder / role / "signing_key", at_rest(folder, role)
    if not private_file.exists():
        made = Ed25519PrivateKey.generate().private_bytes_raw().hex().encode()
        replace_file(private_file, storage.seal(made, "signing key"))
    private = bytes.fromhex(storage.open(private_file.read_bytes(), "signing key").decode())
    public = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    _write(folder / "nodes" / f"{role}_key", public.hex())


def _token(clear_file: Path, hash_file: Path) -> None:
    _write(clear_file, secrets.token_urlsafe(32))
    _write(hash_file, hash_token(clear_file.read_text()))


def _copy(source: Path, target: Path) -> None:
    _write(target, source.read_text())


def _write(file: Path, text: str) -> None:
    if not file.exists():
        _replace(file, text)


def _replace(file: Path, text: str) -> None:
    replace_file(file, text.encode())
