"""Opens one report with the private keys, and names the mistake if it does not open. Pure.

Sections are those of docs/protocol.md.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import special

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.parameters import Flips, Noise
from riffle.common.protocol import hpke as seals
from riffle.common.protocol.descriptor import LABEL_DIGEST, LABEL_MASK, BatchDescriptor, Context
from riffle.common.protocol.hpke import KEY_BYTES, LABEL_MESSAGE, LABEL_REPORT

UNLIKELY = 1e-6
_AES = hpke.AEAD.AES_128_GCM
_OTHERS = {"AES-256-GCM": hpke.AEAD.AES_256_GCM, "ChaCha20": hpke.AEAD.CHACHA20_POLY1305}


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
    """How often a report has each index (C + 1,), dummies last, and its ephemeral public keys."""

    counts: Ints
    ephemeral: tuple[bytes, ...]


def read_report(keys: BatchKeys, sealed: bytes) -> OpenReport:
    """Opens a report as uploaded; raises MistakeError for the first thing that is wrong."""
    d, context = keys.context.descriptor, keys.context
    if len(sealed) != d.report_bytes:
        raise MistakeError("4.6", wrong_size(d, len(sealed)))
    try:
        opened = seals.open_sealed(keys.batch, context.report_info, sealed)
    except seals.OpenError:
        raise MistakeError("3.4", _explain(keys, [sealed], outer=True)) from None
    if d.word_bits:
        return OpenReport(_unmask(keys, opened), (sealed[:KEY_BYTES], opened[:KEY_BYTES]))
    size = d.message_bytes
    messages = [opened[i : i + size] for i in range(0, len(opened), size)]
    plain = list(seals.open_each(keys.analyzer, context.message_info, messages))
    if closed := [m for m, text in zip(messages, plain, strict=True) if text is None]:
        why = _explain(keys, closed, outer=False)
        raise MistakeError("3.4", f"{len(closed)} of {len(messages)} messages do not open: {why}")
    counts = _histogram(d, b"".join(text for text in plain if text is not None))
    return OpenReport(counts, (sealed[:KEY_BYTES], *(m[:KEY_BYTES] for m in messages)))


def wrong_size(d: BatchDescriptor, size: int) -> str:
    """Returns the sentence about a sealed report of a wrong size."""
    whole, rest = divmod(size - seals.OVERHEAD, d.message_bytes)
    seen = "no whole number of messages" if rest else f"those of {whole} messages"
    expected = f"{d.padding.messages} messages of {d.message_bytes} bytes in a seal of 48"
    return f"expected {d.report_bytes} bytes ({expected}); seen {size} bytes, {seen}"


def _histogram(d: BatchDescriptor, plain: bytes) -> Ints:
    layout, C, octets = d.layout, d.layout.counters, np.frombuffer(plain, np.uint8)
    if d.trust == "local":
        bits = np.unpackbits(octets)
        if bits[C:].any():
            raise MistakeError("9", f"expected zeros after the last of {C} bits; seen a 1")
        return np.append(bits[:C], 0).astype(np.int64)
    symbols = d.symbols.read(plain).ravel()
    if symbols.max() <= layout.dummy:
        return np.bincount(symbols, minlength=C + 1)
    swapped = octets.reshape(-1, layout.width) @ 256 ** np.arange(layout.width)
    why = "; read as little-endian, all exist" if swapped.max() <= layout.dummy else ""
    detail = f"expected big-endian indices up to {layout.dummy}, the dummy's; seen {symbols.max()}"
    raise MistakeError("7", detail + why)


def _unmask(keys: BatchKeys, opened: bytes) -> Ints:
    d, own = keys.context.descriptor, opened[:KEY_BYTES]
    C, bits, most = d.layout.counters, d.word_bits or 16, d.noise.bits + 1
    words = np.frombuffer(opened[KEY_BYTES:], dtype=f"<u{bits // 8}")
    masks = (
        (name, sums.add_masks(keys.analyzer, info, own, C, bits))
        for name, info in _infos(keys, LABEL_MASK, LABEL_MESSAGE)
    )
    vectors = [(f"a mask with {name}", words - mask) for name, mask in masks]
    right = vectors[0][1]
    if right.max() <= most:
        return np.append(right, 0).astype(np.int64)
    vectors += [("no mask", words), ("big-endian words before the mask", right.byteswap())]
    vectors += [("big-endian words", words.byteswap() - (words - right))]
    vectors += [("a mask that was subtracted", 2 * words - right)]
    found = next((name for name, vector in vectors if vector.max() <= most), "another mistake")
    raise MistakeError("8.3", f"expected words of at most {most} under the mask; seen {found}")


def _infos(keys: BatchKeys, right: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields infos with the mistakes that make them; the first is the right one."""
    digest, data = keys.context.digest, keys.data
    labels = [("", right), (f"the label {other!r}", other), ("no label", b"")]
    labels += [("a label without its final zero byte", right[:-1])]
    digests = [("", digest), ("a digest without its label", hashlib.sha256(data).digest())]
    digests += [("the digest in hexadecimal", digest.hex().encode()), ("no digest", b"")]
    for text in _rewritten(data):
        name = "the digest of a descriptor that was parsed and written again"
        digests.append((name, hashlib.sha256(LABEL_DIGEST + text).digest()))
    for (one, label), (two, end) in product(labels, digests):
        yield ", ".join(filter(None, (one, two))), label + end


def _rewritten(data: bytes) -> Iterator[bytes]:
    def shorten(number: str) -> float:
        return int(float(number)) if float(number).is_integer() else float(number)

    for short, keys, blanks in product((False, True), (False, True), ((",", ":"), (", ", ": "))):
        document = json.loads(data, parse_float=shorten if short else float)
        yield json.dumps(document, sort_keys=keys, separators=blanks).encode()


def _explain(keys: BatchKeys, sealed: Sequence[bytes], *, outer: bool) -> str:
    """Names the mistake for which none of these seals opens."""
    labels = (LABEL_REPORT, LABEL_MESSAGE) if outer else (LABEL_MESSAGE, LABEL_REPORT)
    private, wrong = (keys.batch, keys.analyzer) if outer else (keys.analyzer, keys.batch)
    expected = f"expected the info {labels[0]!r} and the 32 bytes of the digest, and no aad; seen "
    first, infos = sealed[0], list(_infos(keys, *labels))
    whose = [("", private), (f"the {'analyzer' if outer else 'batch'}'s key", wrong)]
    tries = [(one, two, _AES, k, info) for (one, k), (two, info) in product(whose, infos)]
    tries += [(name, "", aead, private, infos[0][1]) for name, aead in _OTHERS.items()]
    for one, two, aead, key, info in tries:
        if _opens(aead, key, info, first):
            return f"{expected}{', '.join(filter(None, (one, two)))}"
    plain = [_decrypt_unchecked(private, infos[0][1], each) for each in sealed]
    if _makes_sense(keys, plain, outer=outer):
        return f"{expected}a text that decrypts, with a wrong tag: is the aad not empty?"
    return f"{expected}another mistake"


def _opens(aead: hpke.AEAD, private: bytes, info: bytes, sealed: bytes) -> bool:
    suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, aead)
    try:
        return suite.decrypt(sealed, X25519PrivateKey.from_private_bytes(private), info) is not None
    except (InvalidTag, ValueError):
        return False


def _makes_sense(keys: BatchKeys, plain: Sequence[bytes], *, outer: bool) -> bool:
    d = keys.context.descriptor
    if not outer:
        return all(int.from_bytes(text, "big") <= d.layout.dummy for text in plain)
    try:
        return bool(d.word_bits and _unmask(keys, plain[0]).size) or _opens(
            _AES, keys.analyzer, keys.context.message_info, plain[0][: d.message_bytes]
        )
    except MistakeError:
        return False


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
    nonce = expand(suite, secret, b"base_nonce", context, 12) + b"\x00\x00\x00\x02"
    stream = Cipher(algorithms.AES128(aes), modes.CTR(nonce)).decryptor()
    return stream.update(sealed[KEY_BYTES : -seals.TAG_BYTES])


def noise_bits(d: BatchDescriptor) -> tuple[int, float]:
    """Returns the noise bits of a counter in a report, and the probability of a 1."""
    noise = d.to_noise()
    if isinstance(noise, Flips):
        return 1, noise.f
    return (noise.bits, noise.p) if isinstance(noise, Noise) else (0, 0.0)


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
    (bits, p), counts = noise_bits(d), report.counts[: layout.counters]
    N, ones, data = bits * layout.counters, int(counts.sum()), layout.cells
    above = special.bdtrc(ones - data - 1, N, p) if ones > data else 1.0
    likely = bool(min(special.bdtr(ones, N, p), above) > UNLIKELY)
    detail = f"{ones} ones of counters; expected about {N * p:.4g} of noise, up to {data} of data"
    yield Finding(likely, "noise", "7", detail)
    most, limit = int(counts.max()), 1 + bits
    detail = f"at most {most} ones of a counter; expected up to {limit}"
    yield Finding(most <= limit, "counters", "7", detail)
