"""The secrets of a network, in one folder per role, so that no role holds another's secrets.

docs/howto.md says what is in each folder. Only the shuffler's operator enrols nodes: the
coordinator's folder never holds credentials.
"""

import datetime
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError

from riffle.common.process import endpoint
from riffle.common.process.configuration import hex_file
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RiffleError, foreign_answer, read_refusal
from riffle.common.protocol.signatures import public_key
from riffle.common.protocol.wire import Enrolment, EnrolRequest, NodeList, NodeSummary
from riffle.common.server.at_rest import StorageCipher, replace_file
from riffle.coordinator.batches.keys import KeyRecord, KeyRing
from riffle.deploy.network.certificates import make_authority
from riffle.deploy.network.processes import make_folder

STORAGE = ("shuffler-storage", "coordinator-storage")
ROLES = ("shuffler", "coordinator", "nodes", "operator")
SHUFFLER_ID = "shuffler"
SHUFFLER = "the shuffler"
NETWORK_FOLDER = "network"  # the secrets folder inside the folder of ``riffle up``
URL_FILE = "coordinator_url"
SHUFFLER_URL_FILE = "shuffler_url"
LOOPBACK = {URL_FILE: "http://127.0.0.1:8400", SHUFFLER_URL_FILE: "http://127.0.0.1:8401"}
"""The services' addresses if neither the caller nor the operator's folder names others."""
TOKEN_FILE = "coordinator_token"  # noqa: S105  (a file's name)
SHUFFLER_TOKEN_FILE = "shuffler_token"  # noqa: S105
REQUEST_SECONDS = 60.0

T = TypeVar("T")
_CREDENTIALS = TypeAdapter(list[Enrolment])


def init_network(folder: Path, shuffler_url: str = "", coordinator_url: str = "") -> None:
    """Writes every missing secret; idempotent.

    A server's certificate names its role, localhost, and the hosts of its addresses. Raises
    LocalError ``wrong-state`` if there is a file in place of a folder.
    """
    for role in (*ROLES, *STORAGE):
        make_folder(folder / role)
    shuffler, coordinator = folder / "shuffler", folder / "coordinator"
    operator, nodes = folder / "operator", folder / "nodes"
    for role in ("shuffler", "coordinator"):
        _write(folder / f"{role}-storage" / "key", secrets.token_bytes(32).hex())
        _write_key_pair(folder, role)
    _write(shuffler / "coordinator_key", (nodes / "coordinator_key").read_text())
    ring = key_ring(folder)
    ring.init()
    for pinning in (nodes, shuffler):
        _write(pinning / "analyzer_keys", _pins(ring.records()))
    _write_token(coordinator / "shuffler_token", shuffler / "coordinator_token_hash")
    _write_token(operator / SHUFFLER_TOKEN_FILE, shuffler / "operator_token_hash")
    _write_token(operator / TOKEN_FILE, coordinator / "operator_token_hash")
    # Each service has a token of its own, so that no service can read the other's metrics.
    for server in (shuffler, coordinator):
        _write_token(operator / f"{server.name}_metrics_token", server / "metrics_token_hash")
    _write_certificates(folder, {"shuffler": shuffler_url, "coordinator": coordinator_url})


def key_ring(folder: Path) -> KeyRing:
    """Returns the analyzer's keys of a network."""
    keys = folder / "coordinator" / "analyzer_keys"
    return KeyRing(keys, storage_cipher(folder, "coordinator"), time.time)


def storage_cipher(folder: Path, role: str) -> StorageCipher:
    """Returns the cipher of a server's private keys; raises the errors of `hex_file`."""
    file = folder / f"{role}-storage" / "key"
    return StorageCipher(hex_file(str(file), file))


def pin(folder: Path, keys: Iterable[Mapping[str, Any]]) -> None:
    """Writes the pins for nodes and shuffler: all public keys in ``keys`` except erased keys."""
    records = [KeyRecord(**key) for key in keys]
    for role in ("nodes", "shuffler"):
        _replace(folder / role / "analyzer_keys", _pins(records))


def _pins(records: Iterable[KeyRecord]) -> str:
    used = [record for record in records if record.state != "erased"]
    return "".join(f"{record.public} # {record.id}\n" for record in used)


def _write_key_pair(folder: Path, role: str) -> None:
    """Writes a server's signing key, and its public half into the folder of nodes' pins."""
    private_file, cipher = folder / role / "signing_key", storage_cipher(folder, role)
    if not private_file.exists():
        fresh = Ed25519PrivateKey.generate().private_bytes_raw().hex().encode()
        replace_file(private_file, cipher.seal(fresh, "signing key"))
    private = bytes.fromhex(cipher.open(private_file.read_bytes(), "signing key").decode())
    _write(folder / "nodes" / f"{role}_key", public_key(private).hex())


def _write_token(clear_file: Path, hash_file: Path) -> None:
    _write(clear_file, secrets.token_urlsafe(32))
    _write(hash_file, endpoint.hash_token(clear_file.read_text()))


def _write_certificates(folder: Path, urls: Mapping[str, str]) -> None:
    """Writes the TLS files of both servers together, because their CA's key is not kept."""
    if (folder / "operator" / "ca.pem").exists():
        return
    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority(now)
    for role, text in urls.items():
        hosts = [urlsplit(url).hostname or role for url in endpoint.split_urls(text)]
        certificate, key = authority.issue(role, now, hosts)
        _replace(folder / role / "tls.pem", certificate)
        _replace(folder / role / "tls.key", key)
    for role in ROLES:
        _replace(folder / role / "ca.pem", authority.pem)


def _write(file: Path, text: str) -> None:
    if not file.exists():
        _replace(file, text)


def _replace(file: Path, text: str) -> None:
    replace_file(file, text.encode())


def operator_token(folder: Path, name: str) -> str:
    """Returns one of the operator's tokens. Raises LocalError ``unavailable`` if there is none."""
    file = folder / "operator" / name
    if file.exists():
        return file.read_text().strip()
    inner = inner_network(folder)
    hint = (
        ": no network is up there, or not yet (riffle up says when it is); name the folder of a "
        "network, as --network runs/demo/network, or make a new one with 'riffle network init'"
    )
    if inner is not None:
        hint = f"; the network's folder is {inner}"
    raise LocalError("unavailable", f"no token at {file}{hint}")


def inner_network(folder: Path) -> Path | None:
    """Returns the secrets folder in a folder of ``riffle up``; None for any other folder."""
    inner = folder / NETWORK_FOLDER
    return inner if (inner / "operator").is_dir() else None


def operator_client(folder: Path, url: str, token: str) -> httpx.Client:
    """Opens the operator's HTTP client, with a bearer token and the network's CA.

    ``url`` may list several replicas, separated by commas. Raises ValueError if an address is
    malformed, or is http and not on this machine.
    """
    urls = endpoint.check_urls("the address", url)
    verify = endpoint.server_verification(folder / "operator" / "ca.pem")
    transport = endpoint.Failover(urls, httpx.HTTPTransport(verify=verify, trust_env=False))
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(
        base_url=urls[0], headers=headers, timeout=REQUEST_SECONDS, transport=transport
    )


def address(folder: Path, name: str, given: str | None) -> str:
    """Returns ``given``, or the address in the operator's file ``name``, or the default address."""
    file = folder / "operator" / name
    return given or (file.read_text() if file.exists() else LOOPBACK[name])


def shuffler_operator(folder: Path, url: str | None = None) -> httpx.Client:
    """Opens the HTTP client of the shuffler's operator. Raises the errors of `operator_client`."""
    token = operator_token(folder, SHUFFLER_TOKEN_FILE)
    return operator_client(folder, address(folder, SHUFFLER_URL_FILE, url), token)


def ask(
    client: httpx.Client,
    service: str,
    read: Callable[[httpx.Response], T],
    method: str,
    path: str,
    **details: Any,  # noqa: ANN401  (httpx's content, params and headers)
) -> T:
    """Sends a request; returns the answer, parsed by ``read``.

    ``read`` raises ValueError if the answer is not the service's. Raises RemoteError if the service
    refuses the request, and LocalError ``unavailable`` if the service gives no answer of its own.
    """
    place = f"{service} at {client.base_url}"
    try:
        answer = client.request(method, path, **details)
    except httpx.HTTPError as error:
        raise LocalError(
            "unavailable", f"{place} does not answer: {endpoint.failure_reason(error)}"
        ) from error
    if answer.is_error:
        raise refusal(place, answer)
    try:
        return read(answer)
    except (ValueError, RecursionError):  # without its cause, which may show a token
        raise LocalError("unavailable", foreign_answer(place, answer.status_code)) from None


def refusal(service: str, answer: httpx.Response) -> RiffleError:
    """Returns the error for an unsuccessful answer."""
    now, after = datetime.datetime.now(datetime.UTC), answer.headers.get("Retry-After")
    return read_refusal(service, answer.status_code, answer.content, after, now)


def enrol(
    folder: Path,
    shuffler_url: str | None,
    owners: Collection[str],
    nodes: int,
    users: int,
    on_node: Callable[[], None] = lambda: None,
    file: Path | None = None,
) -> tuple[int, int]:
    """Enrols nodes, for at most ``users`` users each, until every owner has ``nodes`` valid nodes.

    Removes the credentials of revoked nodes from ``file`` (default ``nodes/credentials.json``).
    Returns the number of enrolments, and the smallest number of valid nodes that an owner now has.
    Raises the errors of `enrol_node`, and LocalError ``invalid-spec`` if the file is damaged.
    """
    file = file or folder / "nodes" / "credentials.json"
    try:
        credentials = _CREDENTIALS.validate_json(file.read_bytes()) if file.exists() else []
    except ValidationError as error:  # raised without its cause, which may show tokens
        raise LocalError("invalid-spec", f"credentials file {file}: {first_fault(error)}") from None
    count = 0
    with shuffler_operator(folder, shuffler_url) as client:
        listed = list_nodes(client)
        _write(folder / "nodes" / "users_key", secrets.token_bytes(32).hex())
        valid = {node.node_id for node in listed if node.revoked_at is None}
        revoked = {node.node_id for node in listed} - valid
        if revoked & {each.node_id for each in credentials}:
            credentials = [each for each in credentials if each.node_id not in revoked]
            _write_credentials(file, credentials)
        held = Counter(each.owner for each in credentials if each.node_id in valid)
        ever = Counter(node.owner for node in listed)
        for owner in owners:
            for _ in range(held[owner], nodes):
                ever[owner] += 1
                credentials.append(enrol_node(client, f"{owner}-{ever[owner]}", owner, users))
                # A token is shown only once, and an interrupted enrolment must not lose it.
                _write_credentials(file, credentials)
                count += 1
                on_node()
    return count, max(nodes, min(held[owner] for owner in owners))


def _write_credentials(file: Path, credentials: Iterable[Enrolment]) -> None:
    _replace(file, json.dumps([each.model_dump() for each in credentials], indent=1))


def list_nodes(client: httpx.Client) -> tuple[NodeSummary, ...]:
    """Returns all nodes ever enrolled, oldest first. Raises the errors of `enrol_node`."""
    read = NodeList.model_validate_json
    return ask(client, SHUFFLER, lambda got: read(got.content), "GET", "/v1/nodes").nodes


def find_node(client: httpx.Client, text: str) -> NodeSummary:
    """Returns the node with the name ``text``, or with an id that begins with ``text``.

    A revoked node counts only if no valid node fits. Raises LocalError ``not-found`` if no node or
    several nodes fit, and the errors of `enrol_node`. The error suggests no similar name, because a
    caller who trusts the suggestion may revoke the wrong node, for good.
    """
    nodes = {node.node_id: node for node in list_nodes(client)}
    names = {node_id: node.name for node_id, node in nodes.items()}
    valid = {node_id: name for node_id, name in names.items() if nodes[node_id].revoked_at is None}
    none = LocalError("not-found", f"no node is called {text!r}; see riffle network nodes")
    return nodes[find_id(text, valid if _matches(text, valid) else names, none, "nodes")]


def find_id(text: str, names: Mapping[str, str], none: LocalError, kind: str) -> str:
    """Returns the id with the name ``text``, or the id that begins with ``text``.

    ``names`` maps every id to its name. Raises the error ``none`` if no id fits, and an error with
    the same slug if several fit. ``kind`` names what has the ids, such as "runs".
    """
    matches = _matches(text, names)
    if len(matches) > 1:
        detail = f"{text!r} may mean {len(matches)} {kind}; say which of {', '.join(matches)}"
        raise LocalError(none.slug, detail)
    if not matches:
        raise none
    return matches[0]


def _matches(text: str, names: Mapping[str, str]) -> list[str]:
    return [i for i, name in names.items() if text and (name == text or i.startswith(text))]


def enrol_node(client: httpx.Client, name: str, owner: str, users: int) -> Enrolment:
    """Enrols an owner's node at the shuffler, for at most ``users`` users.

    Raises RemoteError if the shuffler refuses, LocalError ``unavailable`` if it does not answer.
    """
    try:
        request = EnrolRequest(name=name, owner=owner, users=users)
    except ValidationError as error:
        raise LocalError("invalid-spec", first_fault(error)) from error
    read, body = Enrolment.model_validate_json, request.model_dump_json()
    return ask(client, SHUFFLER, lambda got: read(got.content), "POST", "/v1/nodes", content=body)


def revoke_node(client: httpx.Client, node_id: str) -> None:
    """Revokes a node's credential. Raises the errors of `enrol_node`."""
    ask(client, SHUFFLER, read_nothing, "DELETE", f"/v1/nodes/{node_id}")


def read_nothing(answer: httpx.Response) -> None:
    """Reads an answer without content; raises ValueError if the answer has content."""
    if answer.status_code != HTTPStatus.NO_CONTENT:
        raise ValueError("an answer with content")
