"""Decoders of all roles, each with inputs it accepts and the errors it may refuse others with."""

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_type_hints

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError

from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.parameters import Padding, Trust
from riffle.common.mechanism.randomness import SeededRandomness
from riffle.common.mechanism.workflow import Symbols, encode
from riffle.common.process.endpoint import read_answer
from riffle.common.protocol import wire
from riffle.common.protocol.descriptor import Document, SignedDescriptor, parse, serialize
from riffle.common.protocol.errors import LocalError, RemoteError, parse_retry_after
from riffle.common.protocol.hpke import (
    KeyPair,
    OpenError,
    open_histogram,
    open_sealed,
    seal,
    seal_indices,
)
from riffle.common.protocol.signatures import sign_deposit, verify_deposit
from riffle.common.protocol.verification import read_pins
from riffle.common.server.at_rest import StorageCipher
from riffle.coordinator.api.runs import _known_index, follow_events
from riffle.coordinator.batches import shuffler_client as coordinators
from riffle.coordinator.batches.analyzer import open_messages
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.specs import ManualDeployment, RunSpec, TrueValueSpec, read_document
from riffle.coordinator.store.records import pack, unpack
from riffle.deploy.operator import EVENT_STREAM, Operator
from riffle.experiments.regret import SeedResult
from riffle.experiments.sweep import Row, Rows
from riffle.node_client.environments.tabular import load_mdp
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.store.vault import BatchSecret, Vault
from tests.common.descriptors import ONE_MESSAGE, descriptor
from tests.coordinator.world import SMALL

KEY = KeyPair.generate()
SEALED = seal_indices(KEY.public, b"info", np.arange(3), 2)
ID, KEY_HEX, SIGNATURE = "0" * 32, "1" * 64, "2" * 128


@dataclass(frozen=True)
class Case:
    """A decoder, inputs it accepts, and the errors it may refuse others with."""

    decode: Callable[[bytes], object]
    valid: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = (RemoteError,)


def document(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def answered_to_a_node(kind: type[Document], valid: bytes) -> Callable[[bytes], object]:
    """How a node reads an answer of the shuffler's, whatever its status."""

    def decode(body: bytes) -> object:
        checksum = zlib.crc32(body)
        status = 200 if body == valid or checksum % 2 else 400 + checksum % 200
        return read_answer("the shuffler", httpx.Response(status), body, kind, lambda _: True)

    return decode


def answered_to_the_coordinator(kind: type[Document]) -> Callable[[bytes], object]:
    def decode(body: bytes) -> object:
        header = {"Retry-After": body[:5_000].decode("ascii", "replace").translate(PRINTABLE)}
        busy = httpx.Response(503, headers=header)
        return (
            read_answer("the shuffler", httpx.Response(200), body, kind, lambda _: True),
            coordinators._refusal(busy, body),
        )

    return decode


PRINTABLE = dict.fromkeys([*range(32), 127, 0xFFFD], "1")


def in_a_file(folder: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    file = folder / "input"

    def decode(data: bytes) -> object:
        file.write_bytes(data)
        return read(file)

    return decode


def key_file(folder: Path) -> Path:
    file = folder / "users_key"
    file.write_text(KEY_HEX)
    return file


def node_settings(folder: Path, **files: Path) -> NodeSettings:
    credentials = folder / "credentials.json"
    credentials.write_bytes(CREDENTIALS)
    given: dict[str, object] = {"credentials_file": credentials, **files}
    return NodeSettings.model_construct(**given)  # type: ignore[arg-type]


CREDENTIALS = json.dumps([{"node_id": ID, "token": "t" * 43}]).encode()
MDP = document(
    horizon=2, P=[[[1.0, 0.0]], [[0.5, 0.5]]], r=[[0.0], [1.0]], d1=[0.25, 0.75]
)  # fmt: skip
SIGNED = document(
    descriptor=serialize(descriptor()).decode(),
    coordinator_signature=SIGNATURE,
    batch_key=KEY_HEX,
    shuffler_signature=SIGNATURE,
)
STATUS = document(batch_id=ID, state="sealed", n=8, episodes=9)
LEASES = document(
    leases=[{"user": ID, "slot": 1, "lease": ID, "expires_at": 2}],
    refused=[{"user": ID, "problem": "late"}],
)
UPLOADED = document(results=[{"lease": ID, "outcome": "accepted"}])
POLICY = [[[0, 1], [1, 0]]]
TRUTH = document(
    optimal_value=1.5, values=[{"deployment": 0, "value": 1.0}, {"deployment": 1, "value": 0}]
)
CONSERVATION = document(
    batch_id=ID,
    state="sealed",
    n=8,
    messages_a_report=3,
    accepted=8,
    held=8,
    dropped={"expired": 0},
    messages={"accepted": 24, "held": 24, "forwarded": 0, "dropped": 0},
    balanced=True,
)


def answered_to_the_operator(
    status: int, ask: Callable[[Operator], object]
) -> Callable[[bytes], object]:
    body = b""

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body, headers={"Content-Type": EVENT_STREAM})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1")

    def decode(data: bytes) -> object:
        nonlocal body
        body = data
        return ask(Operator(client, patience=0))

    return decode


def refused(operator: Operator) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        operator.run(ID)
    return caught.value


def in_a_header(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("latin-1"))


def signed_deposit(signature: str) -> SignedDescriptor:
    """What the shuffler makes of a deposit's signature that verifies."""
    verify_deposit(SIGNER.public_key().public_bytes_raw(), DEPOSIT, signature)
    fields = json.loads(SIGNED) | {"coordinator_signature": signature}
    return SignedDescriptor(**fields)


SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(32))
DEPOSIT = serialize(descriptor())
SIGNED_DEPOSIT = sign_deposit(SIGNER.private_bytes_raw(), DEPOSIT).encode()
PROBLEM = RemoteError("wrong-state", "the run is over")
EVENTS = b'id: 1\nevent: run_started\ndata: {"run": "1", "at": 1.5}\n\n' + (
    b'id: 2\nevent: run_finished\ndata: {"run": "1", "at": 2}\n\n'
)
RUNS = document(runs=[{"id": ID, "name": "a run"}])
RESULT = SeedResult(3, 0.5, 0.5, 0.4, 2, 10, 0.1, [[0]], {"c": 1}, episodes=(1.0,))
ROW = json.dumps(asdict(Row("a run", 3, "0" * 16, result=RESULT))).encode()


class NotCountedError(Exception):
    """The analyzer counted a message as failed."""


def one_message(trust: Trust) -> Case:
    """What is inside a report of the workflows that send one message, as the analyzer reads it."""
    layout = CounterLayout(Sizes(3, 1, 1), "joint")
    size = Symbols.of(trust, layout).size
    noise = descriptor(**ONE_MESSAGE[trust]).batch_noise
    valid = encode(layout, noise, Padding(1, 0), None, SeededRandomness.keyed(0, trust))

    def decode(plaintext: bytes) -> object:
        fitted = plaintext[:size].ljust(size, b"\xff")
        sealed = seal(KEY.public, b"info", fitted)
        histogram, failed = open_messages(KEY.private, b"info", trust, layout, sealed)
        assert histogram[-1] + len(failed) == 1
        if failed:
            raise NotCountedError
        return histogram

    return Case(decode, (bytes(valid.tolist()),), (NotCountedError,))


def at_rest(folder: Path) -> dict[str, Case]:
    """Files of keys, sealed by a storage key and in clear."""
    sealing, vault = StorageCipher(bytes(32)), Vault(folder / "secrets", StorageCipher(None))
    vault.put(ID, BatchSecret.generate())
    (secret,) = (folder / "secrets").iterdir()
    ring = KeyRing(folder / "keys", StorageCipher(None), lambda: 1.0)
    ring.init()
    private, states = sorted((folder / "keys").glob("*.*"))

    def into(file: Path, read: Callable[[], object]) -> Case:
        def decode(data: bytes) -> object:
            file.write_bytes(data)
            return read()

        return Case(decode, (file.read_bytes(),), (LocalError,))

    def check() -> None:
        KeyRing(folder / "keys", StorageCipher(None), lambda: 1.0).check()

    return {
        "file at rest": Case(
            lambda data: sealing.open(data, "key"), (sealing.seal(b"key", "key"),), (LocalError,)
        ),
        "batch secret": into(secret, lambda: vault.get(ID)),
        "analyzer key": into(private, check),
        "analyzer key states": into(states, check),
    }


def documents() -> dict[str, Case]:
    """What is sent to the services."""
    return {
        "truth": Case(lambda body: read_document(TrueValueSpec, body), (TRUTH,)),
        "descriptor": Case(
            parse, (serialize(descriptor()), serialize(descriptor(layer=1, data_slots=1)))
        ),
        "frames": Case(lambda body: wire.split_frames(body, 300), (bytes(316), bytes(632))),
        "run spec": Case(lambda body: read_document(RunSpec, body), (document(**SMALL),)),
        "manual deployment": Case(
            lambda body: read_document(ManualDeployment, body),
            (
                document(policy=POLICY[0], episodes=5),
                document(policies=POLICY * 2, probabilities=[0.5, 0.5], episodes=5),
            ),
        ),
        "lease request": Case(
            lambda body: read_document(wire.LeaseRequest, body), (document(users=[ID]),)
        ),
        "enrolment": Case(
            lambda body: read_document(wire.EnrolRequest, body),
            (document(name="n", owner="me", users=3),),
        ),
        "acknowledgement": Case(
            lambda body: read_document(wire.Acknowledgement, body),
            (document(messages_sha256=KEY_HEX),),
        ),
    }


def sealed() -> dict[str, Case]:
    """What is encrypted on the messages, opened."""
    return {
        "local report": one_message("local"),
        "central report": one_message("central"),
        "sealed report": Case(
            lambda data: open_sealed(KEY.private, b"info", data),
            (seal(KEY.public, b"info", SEALED),),
            (OpenError,),
        ),
        "messages": Case(
            lambda data: open_histogram(KEY.private, b"info", data, 2, 5), (SEALED,), (ValueError,)
        ),
    }


def answers() -> dict[str, Case]:
    """What services answer to shuffler_client, coordinator and operator."""
    either = (RemoteError, LocalError)
    return {
        "coordinator: conservation": Case(
            answered_to_the_coordinator(wire.Conservation), (CONSERVATION,), either
        ),
        "coordinator: status": Case(
            answered_to_the_coordinator(wire.BatchStatus), (STATUS,), either
        ),
        "node: descriptor": Case(answered_to_a_node(SignedDescriptor, SIGNED), (SIGNED,), either),
        "node: leases": Case(answered_to_a_node(wire.LeaseReply, LEASES), (LEASES,), either),
        "node: uploaded": Case(answered_to_a_node(wire.UploadReply, UPLOADED), (UPLOADED,), either),
        "operator: events": Case(
            answered_to_the_operator(200, lambda operator: list(operator._stream(ID, 0, False))),
            (EVENTS,),
            either,
        ),
        "operator: runs": Case(answered_to_the_operator(200, Operator.runs), (RUNS,), either),
        "operator: problem": Case(
            answered_to_the_operator(409, refused), (document(**PROBLEM.document()),), (LocalError,)
        ),
    }


def headers() -> dict[str, Case]:
    """What headers say."""
    index = TypeAdapter(get_type_hints(follow_events, include_extras=True)["last_event_id"])
    return {
        "Retry-After": Case(
            in_a_header(lambda text: parse_retry_after(text, datetime(2026, 1, 1, tzinfo=UTC))),
            (b"120", b"Fri, 31 Dec 1999 23:59:59 GMT"),
            (),
        ),
        "If-None-Match": Case(in_a_header(_known_index), (b'"3"', b'W/"12"', b"*"), ()),
        "Last-Event-ID": Case(
            in_a_header(index.validate_python), (b"0", b"17"), (ValidationError,)
        ),
        "signature": Case(in_a_header(signed_deposit), (SIGNED_DEPOSIT,)),
    }


def files(folder: Path) -> dict[str, Case]:
    """What is read from files and stores."""
    return {
        **at_rest(folder),
        "pins": Case(
            in_a_file(folder, read_pins),
            (f"{KEY_HEX} # a key\n{ID * 2}\n".encode(),),
            (LocalError,),
        ),
        "MDP file": Case(in_a_file(folder, load_mdp), (MDP,), (LocalError,)),
        "users file": Case(
            in_a_file(
                folder,
                lambda file: node_settings(
                    folder, users_file=file, users_key_file=key_file(folder)
                ).users(),
            ),
            (json.dumps({ID: [KEY_HEX[:32], ID]}).encode(),),
            (LocalError,),
        ),
        "credentials file": Case(
            in_a_file(
                folder, lambda file: node_settings(folder, credentials_file=file).credentials()
            ),
            (CREDENTIALS,),
            (LocalError,),
        ),
        "rows of figures": Case(
            in_a_file(folder, Rows), (ROW + b"\n", 2 * (ROW + b"\n")), (LocalError,)
        ),
        "histogram": Case(unpack, (pack(np.arange(5)), b""), (LocalError,)),
    }


def cases(folder: Path) -> dict[str, Case]:
    """Every decoder of the roles, by name."""
    return {**documents(), **sealed(), **answers(), **headers(), **files(folder)}
