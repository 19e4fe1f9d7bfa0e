"""Every decoder under hostile input: it answers, or refuses with its own documented error.

A few thousand inputs each by default; ``RIFFLE_FUZZ_INPUTS=100000`` for a campaign, whose memory
and slowest input are printed with ``-s``.
"""

import json
import os
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import pytest

from common import wire
from common.at_rest import AtRest
from common.counters import CounterLayout, Sizes
from common.descriptor import Document, SignedDescriptor, first_fault, parse, serialize
from common.errors import MOST_DETAIL, LocalError, RemoteError, RiffleError
from common.hpke import KeyPair, SealBroken, open_histogram, open_sealed, seal, seal_indices
from common.noise import Padding, Trust
from common.pins import pinned
from common.randomness import SeededRandomness
from common.workflow import Symbols, encode
from coordinator import shuffler_api as coordinators
from coordinator.analyzer import open_messages
from coordinator.keys import KeyRing
from coordinator.specs import ManualDeployment, RunSpec, Truth, read_document
from node_client import shuffler_api as nodes
from node_client.environments.file import load
from node_client.settings import Settings as NodeSettings
from shuffler.vault import BatchSecret, Vault
from tests.common.descriptors import ONE_MESSAGE, descriptor
from tests.coordinator.world import SMALL
from tests.fuzz.mutator import mutate

INPUTS = int(os.environ.get("RIFFLE_FUZZ_INPUTS", "600"))
MOST_GROWTH = 8 << 20
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
        return nodes._read((httpx.Response(status), body), kind, lambda _: True)

    return decode


def answered_to_the_coordinator(kind: type[Document]) -> Callable[[bytes], object]:
    def decode(body: bytes) -> object:
        header = {"Retry-After": body[:5_000].decode("ascii", "replace").translate(PRINTABLE)}
        return (
            coordinators._read(kind, httpx.Response(200, content=body)),
            coordinators._refusal(httpx.Response(503, content=body, headers=header)),
        )

    return decode


PRINTABLE = dict.fromkeys([*range(32), 127, 0xFFFD], "1")


def in_a_file(folder: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    file = folder / "input"

    def decode(data: bytes) -> object:
        file.write_bytes(data)
        return read(file)

    return decode


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
    upload_seconds={"uploads": 8, "p50": 0.1, "p95": 0.2, "p99": 0.3},
    balanced=True,
)


class NotCountedError(Exception):
    """The analyzer counted a message as failed."""


def one_message(trust: Trust) -> Case:
    """What is inside a report of the workflows that send one message, as the analyzer reads it."""
    layout = CounterLayout(Sizes(3, 1, 1), "joint")
    size = Symbols.of(trust, layout).size
    noise = descriptor(**ONE_MESSAGE[trust]).to_noise()
    valid = encode(layout, noise, Padding(1, 0), None, SeededRandomness.keyed(0, trust))

    def decode(plaintext: bytes) -> object:
        fitted = plaintext[:size].ljust(size, b"\xff")
        sealed = seal(KEY.public, b"info", fitted)
        histogram, failed = open_messages(KEY.private, b"info", sealed, trust, layout)
        assert histogram[-1] + failed == 1
        if failed:
            raise NotCountedError
        return histogram

    return Case(decode, (bytes(valid.tolist()),), (NotCountedError,))


def at_rest(folder: Path) -> dict[str, Case]:
    """Files of keys, sealed by a storage key and in clear."""
    sealing, vault = AtRest(bytes(32)), Vault(folder / "secrets", AtRest(None))
    vault.put(ID, BatchSecret.generate())
    (secret,) = (folder / "secrets").iterdir()
    ring = KeyRing(folder / "keys", AtRest(None), lambda: 1.0)
    ring.init()
    private, states = sorted((folder / "keys").glob("*.*"))

    def into(file: Path, read: Callable[[], object]) -> Case:
        def decode(data: bytes) -> object:
            file.write_bytes(data)
            return read()

        return Case(decode, (file.read_bytes(),), (LocalError,))

    def check() -> None:
        KeyRing(folder / "keys", AtRest(None), lambda: 1.0).check()

    return {
        "file at rest": Case(
            lambda data: sealing.open(data, "key"), (sealing.seal(b"key", "key"),), (LocalError,)
        ),
        "batch secret": into(secret, lambda: vault.get(ID)),
        "analyzer key": into(private, check),
        "analyzer key states": into(states, check),
    }


def cases(folder: Path) -> dict[str, Case]:
    """Every decoder of the three roles, by name."""
    spec = document(**SMALL)
    return {
        **at_rest(folder),
        "local report": one_message("local"),
        "central report": one_message("central"),
        "pins": Case(
            in_a_file(folder, pinned), (f"{KEY_HEX} # a key\n{ID * 2}\n".encode(),), (LocalError,)
        ),
        "truth": Case(lambda body: read_document(Truth, body), (TRUTH,)),
        "coordinator: conservation": Case(
            answered_to_the_coordinator(wire.Conservation),
            (CONSERVATION,),
            (RemoteError, LocalError),
        ),
        "descriptor": Case(
            parse, (serialize(descriptor()), serialize(descriptor(layer=1, data_slots=1)))
        ),
        "frames": Case(lambda body: list(wire.frames(body, 300)), (bytes(316), bytes(632))),
        "sealed report": Case(
            lambda data: open_sealed(KEY.private, b"info", data),
            (seal(KEY.public, b"info", SEALED),),
            (SealBroken,),
        ),
        "messages": Case(
            lambda data: open_histogram(KEY.private, b"info", data, 2, 5), (SEALED,), (ValueError,)
        ),
        "run spec": Case(lambda body: read_document(RunSpec, body), (spec,)),
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
            lambda body: read_document(wire.EnrolRequest, body), (document(name="n", users=3),)
        ),
        "acknowledgement": Case(
            lambda body: read_document(wire.Acknowledgement, body),
            (document(messages_sha256=KEY_HEX),),
        ),
        "node: descriptor": Case(
            answered_to_a_node(SignedDescriptor, SIGNED), (SIGNED,), AT_A_NODE
        ),
        "node: leases": Case(answered_to_a_node(wire.LeaseReply, LEASES), (LEASES,), AT_A_NODE),
        "node: uploaded": Case(
            answered_to_a_node(wire.UploadReply, UPLOADED), (UPLOADED,), AT_A_NODE
        ),
        "coordinator: status": Case(
            answered_to_the_coordinator(wire.BatchStatus), (STATUS,), (RemoteError, LocalError)
        ),
        "MDP file": Case(in_a_file(folder, load), (MDP,), (LocalError,)),
        "users file": Case(
            in_a_file(folder, lambda file: node_settings(folder, users_file=file).users()),
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
        "Retry-After": Case(
            lambda data: nodes.retry_after(
                data.decode("latin-1"), datetime(2026, 1, 1, tzinfo=UTC)
            ),
            (b"120", b"Fri, 31 Dec 1999 23:59:59 GMT"),
            (),
        ),
    }


AT_A_NODE: tuple[type[Exception], ...] = (RemoteError, nodes._TryAgain)
with TemporaryDirectory() as _folder:
    NAMES = list(cases(Path(_folder)))


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_answers_or_refuses(name: str, tmp_path: Path) -> None:
    case = cases(tmp_path)[name]
    for valid in case.valid:
        case.decode(valid)
    refused, slowest = 0, 0.0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(INPUTS):
            rng = np.random.default_rng([number, zlib.crc32(name.encode())])
            data = mutate(rng, case.valid[number % len(case.valid)])
            began = time.perf_counter()
            try:
                case.decode(data)
            except case.refusals as error:
                refused += 1
                if isinstance(error, RiffleError):
                    assert "\n" not in error.detail and len(error.detail) <= MOST_DETAIL, number
            except Exception as error:
                raise AssertionError(f"input {number}: {error!r} for {data[:200]!r}") from error
            slowest = max(slowest, time.perf_counter() - began)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{name}: {INPUTS} inputs, {refused} refused, slowest {slowest:.3f} s, kept {grown} B")
    assert refused or not case.refusals
    assert grown < MOST_GROWTH


def test_first_faults_are_one_line() -> None:
    with pytest.raises(ValueError, match="descriptor") as caught:
        SignedDescriptor.model_validate_json(b"{}")
    assert "\n" not in first_fault(caught.value)  # type: ignore[arg-type]
