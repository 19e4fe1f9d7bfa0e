"""Opens one report with the private keys, and names the mistake if it does not open. Pure.

Sections are those of docs/protocol.md.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import special

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.parameters import Flips, Noise
from riffle.common.protocol.descriptor import LABEL_DIGEST, LABEL_MASK, BatchDescriptor, Context
from riffle.common.protocol.hpke import (
    KEY_BYTES,
    LABEL_MESSAGE,
    LABEL_REPORT,
    OVERHEAD,
    TAG_BYTES,
    OpenError,
    open_each,
    open_sealed,
)

UNLIKELY = 1e-6


class MistakeError(ValueError):
    """A client's mistake: a section of docs/protocol.md, and what was expected and seen."""

    def __init__(self, section: str, detail: str) -> None:
        super().__init__(section, detail)
        self.section, self.detail = section, detail


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one step; ``section`` is one of docs/protocol.md."""

    ok: bool
    step: str
    section: str
    detail: str


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """A batch's descriptor, its bytes, and the private keys of analyzer and batch."""

    context: Context
    data: bytes
    analyzer: bytes
    batch: bytes


@dataclass(frozen=True, slots=True)
class OpenReport:
    """An opened report: how often it has each index (C + 1,), dummies last, and its ephemeral
    public keys."""

    counts: Ints
    ephemeral: tuple[bytes, ...]


# ---- one report --------------------------------------------------------------------------------


def read_report(keys: BatchKeys, sealed: bytes) -> OpenReport:
    """Opens a report as uploaded; raises MistakeError for the first thing that is wrong."""
    d = keys.context.descriptor
    if len(sealed) != d.report_bytes:
        raise MistakeError("4.6", wrong_size(d, len(sealed)))
    try:
        opened = open_sealed(keys.batch, keys.context.report_info, sealed)
    except OpenError:
        raise MistakeError("3.4", _explain(keys, [sealed], outer=True)) from None
    if d.word_bits:
        return OpenReport(_unmask(keys, opened), (sealed[:KEY_BYTES], opened[:KEY_BYTES]))
    size = d.message_bytes
    messages = [opened[i : i + size] for i in range(0, len(opened), size)]
    plain = list(open_each(keys.analyzer, keys.context.message_info, messages))
    if closed := [m for m, text in zip(messages, plain, strict=True) if text is None]:
        why = _explain(keys, closed, outer=False)
        raise MistakeError("3.4", f"{len(closed)} of {len(messages)} messages do not open: {why}")
    counts = _histogram(d, b"".join(text for text in plain if text is not None))
    return OpenReport(counts, (sealed[:KEY_BYTES], *(m[:KEY_BYTES] for m in messages)))


def wrong_size(d: BatchDescriptor, size: int) -> str:
    """Returns the sentence about a sealed report of a wrong size."""
    whole, rest = divmod(size - OVERHEAD, d.message_bytes)
    seen = "no whole number of messages" if rest else f"those of {whole} messages"
    L = d.padding.messages
    return (
        f"expected a sealed report of {d.report_bytes} bytes ({L} messages of {d.message_bytes} "
        f"bytes in a seal of {OVERHEAD}); seen {size} bytes, {seen}"
    )


def _histogram(d: BatchDescriptor, plain: bytes) -> Ints:
    """Counts the symbols of a report's plaintexts (C + 1,)."""
    layout, C = d.layout, d.layout.counters
    if d.trust == "local":
        bits = np.unpackbits(np.frombuffer(plain, dtype=np.uint8))
        if bits[C:].any():
            raise MistakeError("9", f"expected zeros after the last of {C} bits; seen a 1")
        return np.append(bits[:C], 0).astype(np.int64)
    symbols = d.symbols.read(plain).ravel()
    if symbols.max() <= layout.dummy:
        return np.bincount(symbols, minlength=C + 1)
    swapped = np.frombuffer(plain, np.uint8).reshape(-1, layout.width)[:, ::-1]
    values = swapped @ (256 ** np.arange(layout.width - 1, -1, -1))
    why = "; read as little-endian, all exist" if values.max() <= layout.dummy else ""
    detail = f"expected big-endian indices up to {layout.dummy}, the dummy's; seen {symbols.max()}"
    raise MistakeError("7", detail + why)


def _unmask(keys: BatchKeys, opened: bytes) -> Ints:
    """Returns the vector of a report of sums, with a dummy count of 0."""
    d = keys.context.descriptor
    C, bits, own = d.layout.counters, d.word_bits or 16, opened[:KEY_BYTES]
    words = np.frombuffer(opened[KEY_BYTES:], dtype=f"<u{bits // 8}")
    most = d.noise.bits + 1

    def small(vector: npt.NDArray[Any]) -> bool:
        return bool(vector.max() <= most)

    def mask(label: bytes, digest: bytes) -> npt.NDArray[Any]:
        return sums.add_masks(keys.analyzer, label + digest, own, C, bits)

    right = mask(LABEL_MASK, keys.context.digest)
    if small(vector := words - right):
        return np.append(vector, 0).astype(np.int64)
    reasons = [
        ("the mask was subtracted, not added", words + right),
        ("no mask was added", words),
        ("the words are big-endian", words.byteswap() - right),
        ("the masked words are big-endian", (words - right).byteswap()),
    ]
    reasons += [
        (" and ".join(n for n in (named, other) if n), words - mask(label, digest))
        for (named, label), (other, digest) in product(
            _labels(LABEL_MASK, LABEL_MESSAGE), _digests(keys)
        )
        if named or other
    ]
    found = next(
        (name for name, vector in reasons if small(vector)), "the mistake is not known here"
    )
    detail = f"expected words of at most {most} under the mask; seen larger ones: {found}"
    raise MistakeError("8.3", detail)


# ---- why a seal does not open ------------------------------------------------------------------


def _labels(right: bytes, other: bytes) -> list[tuple[str, bytes]]:
    return [
        ("", right),
        (f"the label {other!r}", other),
        ("a label without its final zero byte", right[:-1]),
        ("no label", b""),
    ]


def _digests(keys: BatchKeys) -> Iterator[tuple[str, bytes]]:
    """Yields wrong digests with their names; the first is the right one, without a name."""
    digest, data = keys.context.digest, keys.data
    yield "", digest
    for text in _rewritten(data):
        name = "the digest of a descriptor that was parsed and written again"
        yield name, hashlib.sha256(LABEL_DIGEST + text).digest()
    yield "a digest without its label", hashlib.sha256(data).digest()
    yield "a digest whose label has no zero byte", hashlib.sha256(LABEL_DIGEST[:-1] + data).digest()
    yield "the digest in hexadecimal", digest.hex().encode()
    yield "the batch id in place of the digest", bytes.fromhex(keys.context.descriptor.batch_id)
    yield "no digest", b""


def _rewritten(data: bytes) -> Iterator[bytes]:
    def shorten(number: str) -> float:
        return int(float(number)) if float(number).is_integer() else float(number)

    for short, keys, blanks in product((False, True), (False, True), ((",", ":"), (", ", ": "))):
        document = json.loads(data, parse_float=shorten if short else float)
        yield json.dumps(document, sort_keys=keys, separators=blanks).encode()


def _explain(keys: BatchKeys, sealed: Sequence[bytes], *, outer: bool) -> str:
    """Names the mistake for which none of these seals opens."""
    own, other = (LABEL_REPORT, LABEL_MESSAGE) if outer else (LABEL_MESSAGE, LABEL_REPORT)
    private, wrong = (keys.batch, keys.analyzer) if outer else (keys.analyzer, keys.batch)
    info = own + keys.context.digest
    expected = f"expected the info {own!r} and the 32 bytes of the digest, and no aad"
    first = sealed[0]
    moved = first[-KEY_BYTES:] + first[:-KEY_BYTES]
    whose = "analyzer's" if outer else "batch's"
    for (key_name, key), (label_name, label), (name, digest), (form_name, form) in product(
        [("", private), (f"the {whose} key", wrong)],
        _labels(own, other),
        list(_digests(keys)),
        [("", first), ("the ephemeral key last", moved)],
    ):
        names = [n for n in (key_name, label_name, name, form_name) if n]
        if names and _opens(hpke.AEAD.AES_128_GCM, key, label + digest, form):
            return f"{expected}; seen a seal with {', '.join(names)}"
    for name, aead in (("AES-256-GCM", "AES_256_GCM"), ("ChaCha20Poly1305", "CHACHA20_POLY1305")):
        if _opens(getattr(hpke.AEAD, aead), private, info, first):
            return f"expected AES-128-GCM; seen a seal with {name}"
    if _makes_sense(
        keys, [_decrypt_unchecked(private, info, each) for each in sealed], outer=outer
    ):
        return f"{expected}; seen a text that decrypts, with a wrong tag: is the aad not empty?"
    return f"{expected}; seen a seal that opens under no mistake known here"


def _opens(aead: hpke.AEAD, private: bytes, info: bytes, sealed: bytes) -> bool:
    suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, aead)
    try:
        suite.decrypt(sealed, X25519PrivateKey.from_private_bytes(private), info)
    except (InvalidTag, ValueError):
        return False
    return True


def _makes_sense(keys: BatchKeys, plain: Sequence[bytes], *, outer: bool) -> bool:
    d = keys.context.descriptor
    if not outer:
        return all(int.from_bytes(text, "big") <= d.layout.dummy for text in plain)
    if d.word_bits:
        try:
            return _unmask(keys, plain[0]) is not None
        except MistakeError:
            return False
    message = plain[0][: d.message_bytes]
    return _opens(hpke.AEAD.AES_128_GCM, keys.analyzer, keys.context.message_info, message)


def _decrypt_unchecked(private: bytes, info: bytes, sealed: bytes) -> bytes:
    """Opens a seal without checking its tag (RFC 9180, sections 4.1 and 5.1; base mode)."""
    kem, suite = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x01"

    def extract(name: bytes, salt: bytes, label: bytes, secret: bytes) -> bytes:
        return hmac.digest(salt or bytes(32), b"HPKE-v1" + name + label + secret, "sha256")

    def expand(name: bytes, secret: bytes, label: bytes, info: bytes, size: int) -> bytes:
        text = size.to_bytes(2, "big") + b"HPKE-v1" + name + label + info
        return hmac.digest(secret, text + b"\x01", "sha256")[:size]

    key, enc = X25519PrivateKey.from_private_bytes(private), sealed[:KEY_BYTES]
    try:
        dh = key.exchange(X25519PublicKey.from_public_bytes(enc))
    except ValueError:  # a point of low order
        dh = bytes(KEY_BYTES)
    both = enc + key.public_key().public_bytes_raw()
    shared = expand(kem, extract(kem, b"", b"eae_prk", dh), b"shared_secret", both, 32)
    ids = extract(suite, b"", b"psk_id_hash", b""), extract(suite, b"", b"info_hash", info)
    secret, context = extract(suite, shared, b"secret", b""), b"\x00" + b"".join(ids)
    aes = expand(suite, secret, b"key", context, 16)
    nonce = expand(suite, secret, b"base_nonce", context, 12)
    stream = Cipher(algorithms.AES128(aes), modes.CTR(nonce + b"\x00\x00\x00\x02")).decryptor()
    return stream.update(sealed[KEY_BYTES:-TAG_BYTES])


# ---- a report in a file ------------------------------------------------------------------------


def check_report(keys: BatchKeys, sealed: bytes) -> Iterator[Finding]:
    """Yields what is right and what is wrong about one report, whatever its episode is.

    The number of ones is wrong if it is less likely than `UNLIKELY`.
    """
    d, layout = keys.context.descriptor, keys.context.descriptor.layout
    try:
        report = read_report(keys, sealed)
    except MistakeError as mistake:
        yield Finding(False, "seals", mistake.section, mistake.detail)
        return
    yield Finding(True, "seals", "3.4", f"all open; {d.padding.messages} messages")
    fresh = len(set(report.ephemeral)) == len(report.ephemeral)
    yield Finding(fresh, "ephemeral keys", "3.4", "all differ" if fresh else "one is used twice")
    noise, ones = d.to_noise(), int(report.counts[: layout.counters].sum())
    bits, p = (noise.bits, noise.p) if isinstance(noise, Noise) else (1, 0.0)
    p = noise.f if isinstance(noise, Flips) else p
    N, most = bits * layout.counters, int(report.counts[: layout.counters].max())
    likely = special.bdtr(ones, N, p) > UNLIKELY and (
        ones <= layout.cells or special.bdtrc(ones - layout.cells - 1, N, p) > UNLIKELY
    )
    limit = 1 + bits * (p > 0)
    expected = f"expected about {N * p:.4g} of noise, and up to {layout.cells} of data"
    detail = f"{ones} ones of counters; {expected}"
    yield Finding(bool(likely), "noise", "7", detail)
    yield Finding(
        most <= limit, "counters", "7", f"at most {most} of one counter; expected up to {limit}"
    )
