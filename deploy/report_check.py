"""Checks of reports by somebody who holds the private keys, and the names of common mistakes.

`read_report` opens one sealed report. `BatchLaw` tests the reports of a batch whose environment is
known. Every statistical test is exact, or a union bound: a correct client fails any test of a
session with probability at most `ERROR_RATE`. Everything is pure.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import special

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import Episode, Ints
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

ERROR_RATE = 1e-6
TESTS = 4_000
"""More tests than a session has; each errs with probability at most `LEVEL`."""
LEVEL = ERROR_RATE / TESTS
AXES = ("family", "h", "x", "a", "x'", "r")
Floats = npt.NDArray[np.float64]


class MistakeError(ValueError):
    """A client's mistake: a topic of docs/protocol.md; a sentence on what was expected and seen."""

    def __init__(self, topic: str, detail: str) -> None:
        super().__init__(topic, detail)
        self.topic, self.detail = topic, detail


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one step; ``topic`` is one of docs/protocol.md."""

    ok: bool
    step: str
    topic: str
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
        raise MistakeError("frames", wrong_size(d, len(sealed)))
    try:
        opened = open_sealed(keys.batch, keys.context.report_info, sealed)
    except OpenError:
        raise MistakeError("report seal", _explain(keys, [sealed], outer=True)) from None
    if d.word_bits:
        return OpenReport(_unmask(keys, opened), (sealed[:KEY_BYTES], opened[:KEY_BYTES]))
    size = d.message_bytes
    messages = [opened[i : i + size] for i in range(0, len(opened), size)]
    plain = list(open_each(keys.analyzer, keys.context.message_info, messages))
    if closed := [m for m, text in zip(messages, plain, strict=True) if text is None]:
        why = _explain(keys, closed, outer=False)
        raise MistakeError(
            "message seal", f"{len(closed)} of {len(messages)} messages do not open: {why}"
        )
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
            raise MistakeError("local", f"expected zeros after the last of {C} bits; seen a 1")
        return np.append(bits[:C], 0).astype(np.int64)
    symbols = d.symbols.read(plain).ravel()
    if symbols.max() <= layout.dummy:
        return np.bincount(symbols, minlength=C + 1)
    swapped = np.frombuffer(plain, np.uint8).reshape(-1, layout.width)[:, ::-1]
    values = swapped @ (256 ** np.arange(layout.width - 1, -1, -1))
    why = "; read as little-endian, all exist" if values.max() <= layout.dummy else ""
    detail = f"expected big-endian indices up to {layout.dummy}, the dummy's; seen {symbols.max()}"
    raise MistakeError("plaintext", detail + why)


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
    raise MistakeError("sums", detail)


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

    for parse, keys, blanks in product((float, shorten), (False, True), ((",", ":"), (", ", ": "))):
        document = json.loads(data, parse_float=parse)
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


# ---- the reports of a batch --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Test:
    """A number that was observed, and its distribution for a correct client, from 0 on.

    Tests of the same ``name`` in several batches may be added.
    """

    topic: str
    name: str
    observed: int
    law: Floats

    def __add__(self, other: "Test") -> "Test":
        law = np.convolve(self.law, other.law)
        return Test(self.topic, self.name, self.observed + other.observed, law)

    @property
    def fault(self) -> MistakeError | None:
        """Returns the mistake if the number is less likely than `LEVEL`, on one of two sides."""
        below, above = self.law[: self.observed + 1].sum(), self.law[self.observed :].sum()
        if min(below, above) > LEVEL / 2:
            return None
        mean = float(self.law @ np.arange(self.law.size))
        detail = f"{self.name}: expected about {mean:.4g}, seen {self.observed}"
        return MistakeError(self.topic, detail)


@lru_cache(maxsize=512)
def _binomial(N: int, p: float) -> Floats:
    """Returns the probabilities of 0 to N ones among N bits."""
    j = np.arange(N + 1.0)
    ways = special.gammaln(N + 1.0) - special.gammaln(j + 1) - special.gammaln(N - j + 1)
    return np.asarray(np.exp(ways + special.xlogy(j, p) + special.xlog1py(N - j, -p)))


@dataclass(frozen=True)
class BatchLaw:
    """The law of a batch's reports where every transition is certain.

    ``states`` (M, H + 1) and ``actions`` (M, H) are each policy's path; ``means`` (M, H) are the
    scaled rewards on it.
    """

    descriptor: BatchDescriptor
    states: Ints
    actions: Ints
    means: Floats

    @cached_property
    def paths(self) -> list[tuple[list[Ints], Ints]]:
        """For each policy: sets of counters, of which an episode raises one each; and the counters
        of its reward bits, by step. In ``joint`` a set has the counters of both reward bits."""
        return [self._path(k) for k in range(len(self.means))]

    def _path(self, k: int) -> tuple[list[Ints], Ints]:
        layout, none = self.descriptor.layout, np.zeros(self.means.shape[1], dtype=np.int64)
        states, actions = self.states[k], self.actions[k]
        zero, one = (layout.encode(Episode(states, actions, none + bit)) for bit in (0, 1))
        if "joint" in layout.shapes:
            return list(np.stack([zero, one], axis=1)), one
        return list(zero[:, None]), one[zero.size :]

    @property
    def noise(self) -> tuple[int, float]:
        """Noise bits of a counter in a report, and the probability of a 1; no bits if central."""
        match self.descriptor.to_noise():
            case Noise() as noise:
                return noise.bits, noise.p
            case Flips() as flips:
                return 1, flips.f
            case _:
                return 0, 0.0

    def matches(self, counts: Ints) -> npt.NDArray[np.bool_]:
        """Tells which reports (n, C + 1) may hold an episode of each policy: (n, M)."""
        found = [[counts[:, c].any(axis=1) for c in required] for required, _ in self.paths]
        return np.array(found).all(axis=1).T

    def noise_copies(self, counts: Ints) -> list[bytes]:
        """Returns each report's noise, to be compared; none if equal noise may be a coincidence."""
        (bits, p), noise = self.noise, counts[:, self._never].astype(np.uint8)
        equal = (p * p + (1 - p) ** 2) ** noise.shape[1]
        sure = bits > 0 and TESTS * len(noise) ** 2 * equal < LEVEL
        return [row.tobytes() for row in noise] if sure else []

    def check(self, counts: Ints) -> Iterator[MistakeError]:
        """Yields what is wrong with reports (n, C + 1) for certain, whatever is drawn."""
        d, bits = self.descriptor, self.noise[0]
        if d.trust == "local":
            return
        C, matches = d.layout.counters, self.matches(counts)
        if lost := int((~matches.any(axis=1)).sum()):
            detail = f"{lost} of {len(counts)} reports hold no episode of the batch's mixture"
            yield MistakeError("counters", f"{detail}{self._other_order(counts)}")
        elif counts[:, :C].max() > bits + 1:
            most = (
                f"expected at most {bits + 1} of a counter in a report: data and {bits} noise bits"
            )
            yield MistakeError("noise", f"{most}; seen {counts[:, :C].max()}")

    @cached_property
    def _never(self) -> Ints:
        """Counters that no episode raises: they hold noise only."""
        raised = [np.concatenate([*required, ones]) for required, ones in self.paths]
        return np.setdiff1d(np.arange(self.descriptor.layout.counters), np.concatenate(raised))

    @cached_property
    def _coordinates(self) -> npt.NDArray[np.int64]:
        """Every counter's family (by number) and h, x, a, x', r; -1 for a coordinate it lacks."""
        layout = self.descriptor.layout
        numbered = layout.split(np.arange(1.0, layout.counters + 1))
        table = np.full((layout.counters, len(AXES)), -1)
        for number, block in enumerate(numbered.values()):
            at = np.argwhere(block)
            places = block[tuple(at.T)].astype(np.int64) - 1
            table[places, 0], table[places, 1 : at.shape[1] + 1] = number, at
        return table

    def _other_order(self, counts: Ints) -> str:
        """Names another order of the counters in which every report holds an episode, if any."""
        C = self.descriptor.layout.counters
        orders = {"with 1 added to every index": np.append(np.arange(1, C), 0)}
        for axes in permutations(range(len(AXES))):
            order = np.lexsort(self._coordinates[:, axes[::-1]].T)
            name = f"in the order ({', '.join(AXES[axis] for axis in axes)})"
            orders.setdefault(name, np.argsort(order))
        for name, order in orders.items():
            if self.matches(counts[:, order]).any(axis=1).all():
                return f"; all hold one {name}"
        return ""

    def tests(self, counts: Ints) -> Iterator[Test]:
        """Yields the numbers of reports (n, C + 1) of one batch that chance decides."""
        (bits, p), n, noise = self.noise, len(counts), counts[:, self._never]
        N, size, totals = n * bits, self._never.size, noise.sum(axis=0)
        yield Test(
            "noise", "noise of all counters without data", int(totals.sum()), _binomial(N * size, p)
        )
        for axis, name in enumerate(AXES):
            values = self._coordinates[self._never, axis]
            for value in np.unique(values[values >= 0]):
                law = _binomial(N * int((values == value).sum()), p)
                total = int(totals[values == value].sum())
                yield Test("noise", f"noise of counters with {name} = {value}", total, law)
        law = _binomial(size, (1 - p) ** N)
        yield Test("noise", "counters that no report gave noise", int((totals == 0).sum()), law)
        law = np.diff(np.cumsum(_binomial(N, p)) ** size, prepend=0)
        yield Test("noise", "most noise of one counter", int(totals.max()), law)
        above = np.cumsum(_binomial(bits * size, p)[::-1])[::-1] ** n
        least = int(noise.sum(axis=1).min())
        yield Test("noise", "least noise of one report", least, -np.diff(above, append=0))
        yield from self._episode_tests(counts)

    def _episode_tests(self, counts: Ints) -> Iterator[Test]:
        (bits, p), n, matches = self.noise, len(counts), self.matches(counts)
        weights, local = self.descriptor.mixture.probabilities, self.descriptor.trust == "local"
        for k, (required, ones) in enumerate(self.paths):
            hidden = p * (1 - p) ** (required[0].size - 1) if local else 0.0
            own = (1 - hidden) ** len(required)
            by_noise = (1 - (1 - p) ** (bits * required[0].size)) ** len(required)
            law = _binomial(n, weights[k] * own + (1 - weights[k]) * by_noise)
            yield Test("mixture", f"reports with policy {k}", int(matches[:, k].sum()), law)
            for h, c in enumerate(ones):
                q, name = weights[k] * self.means[k, h], f"reward bits at step {h} of policy {k}"
                law = np.convolve(_binomial(n, q), _binomial(n * bits, p))
                law = _binomial(n, q + p - 2 * q * p) if local else law
                yield Test("rewards", name, int(counts[:, c].sum()), law)
            if not local:
                sure, cells = matches[:, k] & (matches.sum(axis=1) == 1), np.concatenate(required)
                extra = int((counts[sure][:, cells].sum(axis=1) - len(required)).sum())
                law = _binomial(int(sure.sum()) * bits * cells.size, p)
                yield Test("counters", "messages beside one episode's on its counters", extra, law)
