"""The descriptor: strict parsing, digests, signatures; one fault a vector."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ValidationError, model_validator

from riffle.common.mechanism.parameters import (
    MAX_DRAWS,
    BatchNoise,
    FairBits,
    Flips,
    Laplace,
    Noise,
)
from riffle.common.protocol import descriptor as d
from riffle.common.protocol import signatures
from riffle.common.protocol.errors import RemoteError
from tests.common.descriptors import ONE_MESSAGE, RUN_ID, descriptor

VECTORS = json.loads((Path(__file__).parent / "vectors" / "descriptor_faults.json").read_text())
SIGNING_KEY = Ed25519PrivateKey.generate()
PRIVATE = SIGNING_KEY.private_bytes_raw()
PUBLIC = SIGNING_KEY.public_key().public_bytes_raw()
DIGEST = "d1660257ffe01c9c13dc1f23d4ebf8cf3956e1001f49e8f7f48a1ec8319e3dbe"


def test_a_fault_has_no_prefix_of_pydantic() -> None:
    class Odd(BaseModel):
        @model_validator(mode="after")
        def refuse(self) -> "Odd":
            raise ValueError("both are odd")

    with pytest.raises(ValidationError) as caught:
        Odd()
    assert d.first_fault(caught.value) == "document: both are odd"


def test_without_epochs_a_descriptor_has_the_bytes_that_it_had_before_epochs() -> None:
    data = d.serialize(descriptor())
    before = "5aff82cf86d789a05b68f60d1e53715e652f9fd08457319b8d758824ef556fdd"
    assert d.parse(data).digest.hex() == before
    assert b"epoch" in d.serialize(descriptor(epoch_seconds=60))


def test_a_batch_belongs_to_the_epoch_in_which_it_expires() -> None:
    assert descriptor().epoch is None
    for expires_at, epoch in ((119, d.Epoch(60, 120)), (120, d.Epoch(120, 180))):
        assert descriptor(expires_at=expires_at, epoch_seconds=60).epoch == epoch


def test_users_report_again_in_later_epochs_only() -> None:
    day, other_day, week = d.Epoch(0, 10), d.Epoch(10, 20), d.Epoch(0, 70)
    assert all(d.may_report(0, epoch) for epoch in (None, day, week))
    assert d.may_report(d.bars_until(day), other_day)
    for before, after in (
        (day, day), (other_day, day), (day, week), (week, other_day),
        (None, day), (day, None), (None, None),
    ):  # fmt: skip
        assert not d.may_report(d.bars_until(before), after)


@pytest.mark.parametrize(
    ("share", "n", "slots"),
    [
        (1.0, 4, 4),
        (0.5, 4, 2),
        (0.5, 5, 2),
        (0.3, 10, 3),
        (0.29, 100, 29),
        (0.05, 39, 1),
        (0.25, 3, 0),
        (1e-9, 4, 0),
    ],
)
def test_slots_of_an_owner(share: float, n: int, slots: int) -> None:
    """The written decimal, rounded down: no owner has more; a batch of none is no batch."""
    changes = {"n": n, "owner_share": share, "guarantee": {"epsilon": 1.0, "beta": 0.1}}
    changes["guarantee"] |= {"dishonest_fraction": 0.5}  # type: ignore[operator]
    if slots:
        assert descriptor(**changes).owner_slots == slots
    else:
        with pytest.raises(ValidationError, match="less than one slot"):
            descriptor(**changes)


@pytest.mark.parametrize("kind", ["messages", *ONE_MESSAGE])
def test_an_owners_share_is_at_most_gamma_in_every_kind_of_batch(kind: str) -> None:
    promise = {"epsilon": 10.0, "beta": 1e-3, "dishonest_fraction": 0.1}
    changes = ONE_MESSAGE.get(kind, {}) | {"n": 40, "guarantee": promise}
    assert descriptor(owner_share=0.1, **changes).owner_slots == 4
    assert descriptor(owner_share=1.0, **changes).owner_slots == 40
    with pytest.raises(ValidationError, match="owner_share must not be above"):
        descriptor(owner_share=0.11, **changes)


@pytest.mark.parametrize("twice", ['"n":9,', '"noise":{},'])
def test_a_member_twice_is_refused(twice: str) -> None:
    """Parsers differ in which of the two they take, so two nodes could see two batches."""
    data = d.serialize(descriptor()).decode()
    with pytest.raises(RemoteError, match="twice") as refused:
        d.parse(data.replace("{", "{" + twice, 1).encode())
    assert refused.value.slug == "malformed"


def made(vector: dict[str, Any]) -> d.BatchDescriptor:
    return descriptor(**ONE_MESSAGE.get(vector.get("trust", "shuffle"), {}))


def with_fault(vector: dict[str, Any]) -> bytes:
    document = json.loads(d.serialize(made(vector)))
    value = math.inf if vector["value"] == "<infinity>" else vector["value"]
    target = document
    for step in vector["path"][:-1]:
        target = target[step]
    if vector["path"] and value == "<missing>":
        del target[vector["path"][-1]]
    elif vector["path"]:
        target[vector["path"][-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_every_vector_is_accepted_or_refused_as_stated(vector: dict[str, Any]) -> None:
    data = with_fault(vector)
    if vector["fault"] is None:
        assert d.parse(data).descriptor == made(vector)
        return
    with pytest.raises(RemoteError) as caught:
        d.parse(data)
    assert caught.value.slug == "malformed"
    assert vector["fault"] in caught.value.detail
    assert "\n" not in caught.value.detail


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
def test_bytes_that_are_no_document_are_malformed(data: bytes) -> None:
    with pytest.raises(RemoteError) as caught:
        d.parse(data)
    assert caught.value.slug == "malformed"


def test_an_enormous_descriptor_is_refused_unread() -> None:
    with pytest.raises(RemoteError) as caught:
        d.parse(b" " * (d.MAX_DESCRIPTOR_BYTES + 1))
    assert caught.value.slug == "too-large"


def test_the_digest_is_of_the_bytes_as_received() -> None:
    data = d.serialize(descriptor())
    spaced = json.dumps(json.loads(data)).encode()
    assert d.parse(data).descriptor == d.parse(spaced).descriptor
    assert d.parse(data).digest != d.parse(spaced).digest
    assert d.parse(data).message_info != d.parse(data).report_info


@pytest.mark.parametrize("changes", [{"deployment": 1}, {"expires_at": 1_999_999_999}])
def test_no_seal_fits_another_batch_even_of_the_same_run(changes: dict[str, Any]) -> None:
    batches = [d.parse(d.serialize(descriptor(**each))) for each in ({}, changes)]
    infos = [(one.message_info, one.mask_info, one.report_info) for one in batches]
    assert len({info for each in infos for info in each}) == 6


def test_a_field_that_is_left_out_at_its_default_changes_no_byte() -> None:
    plain = d.serialize(descriptor())
    assert hashlib.sha256(plain).hexdigest() == DIGEST, "as before these fields existed"
    named = d.serialize(descriptor(episode_seconds=600))
    assert named == plain[:-1] + b',"episode_seconds":600}'
    assert d.parse(named).descriptor.episode_seconds == 600


def test_sizes_follow_from_the_descriptor() -> None:
    batch = descriptor()
    assert batch.layout.counters == 32
    assert batch.message_bytes == 48 + 1
    assert batch.report_bytes == 352 * 49 + 48


def test_a_report_without_the_shuffle_is_one_message() -> None:
    local, central = (descriptor(**ONE_MESSAGE[trust]) for trust in ("local", "central"))
    assert local.message_bytes == 48 + 4, "a bit for each of 32 counters"
    assert central.message_bytes == 48 + 2 * 1, "an index a step"
    for batch in (local, central):
        assert batch.report_bytes == batch.message_bytes + 48
        assert batch.release_bytes == 8 * batch.message_bytes


def test_a_batch_that_is_summed_has_one_vector_a_report_and_one_in_all() -> None:
    batch = descriptor(**ONE_MESSAGE["sums"])
    assert batch.padding.messages == 1
    assert batch.report_bytes == 32 + 32 * 2 + 48, "a key, a word a counter, the outer seal"
    assert batch.release_bytes == 32 * 2 + 8 * 32, "one sum, a key a report"
    with pytest.raises(ValidationError, match="'shuffle' only"):
        descriptor(**ONE_MESSAGE["local"], aggregation="sums", word_bits=16)


@pytest.mark.parametrize(
    "noise", [Noise(3, 5, 4), Flips(7), Laplace(2**31 + 1), FairBits(12)], ids=str
)
def test_noise_survives_the_wire(noise: BatchNoise) -> None:
    document = d.NoiseDocument.of(noise)
    assert document.noise() == noise
    assert d.NoiseDocument.model_validate_json(document.model_dump_json()) == document


def test_the_noise_bits_of_a_report_are_bounded() -> None:
    def noise(bits: int) -> dict[str, int]:
        return {"bits": bits, "p_numerator": 1, "p_log2": 32}

    assert descriptor(noise=noise(MAX_DRAWS // 32)).layout.counters == 32
    for bits in (MAX_DRAWS // 32 + 1, 1 << 32):
        with pytest.raises(ValueError, match="noise bits a report exceed"):
            descriptor(noise=noise(bits))


def test_batch_ids_are_deterministic_and_distinct() -> None:
    ids = {signatures.batch_id(run, i) for run in (RUN_ID, "0" * 32) for i in range(50)}
    assert len(ids) == 100
    assert signatures.batch_id(RUN_ID, 3) in ids


def test_signatures_verify_and_do_not_cross_protocol_steps() -> None:
    data = d.serialize(descriptor())
    context, batch_key = d.parse(data), bytes(32)
    deposit = signatures.sign_deposit(PRIVATE, data)
    counter = signatures.countersign(PRIVATE, context.digest, batch_key)
    signatures.verify_deposit(PUBLIC, data, deposit)
    signatures.verify_countersign(PUBLIC, context.digest, batch_key, counter)
    faults: list[Callable[[], None]] = [
        lambda: signatures.verify_deposit(PUBLIC, data + b" ", deposit),
        lambda: signatures.verify_deposit(PUBLIC, data, counter),
        lambda: signatures.verify_deposit(PUBLIC, data, ""),
        lambda: signatures.verify_deposit(PUBLIC, data, "zz"),
        lambda: signatures.verify_deposit(PUBLIC, data, deposit.upper()),
        lambda: signatures.verify_deposit(PUBLIC, data, f" {deposit}"),
        lambda: signatures.verify_deposit(bytes(32), data, deposit),
        lambda: signatures.verify_countersign(PUBLIC, context.digest, b"\x01" + bytes(31), counter),
        lambda: signatures.verify_countersign(PUBLIC, bytes(32), batch_key, counter),
    ]
    for fault in faults:
        with pytest.raises(RemoteError) as caught:
            fault()
        assert caught.value.slug == "bad-signature"
