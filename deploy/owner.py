"""The owner of a client under test: environment, demands, people, and keys for the test alone.

With the keys, `read_report` opens a report, and names mistakes by section of docs/protocol.md.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from riffle.common.mechanism import local_model, sums
from riffle.common.mechanism.counters import Ints, Support
from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.protocol import hpke as seals
from riffle.common.protocol.descriptor import LABEL_DIGEST, LABEL_MASK, BatchDescriptor, Context
from riffle.common.protocol.hpke import KEY_BYTES, LABEL_MESSAGE, LABEL_REPORT, KeyPair
from riffle.common.protocol.signatures import LABEL_DEPOSIT, LABEL_KEY_ID, public_key
from riffle.common.protocol.wire import LEASE_BYTES
from riffle.node_client.users import LABEL_USER

Words = npt.NDArray[np.unsignedinteger[Any]]
Tries = Sequence[tuple["BatchKeys", bytes]]
_AEADS = {"AES-256-GCM": hpke.AEAD.AES_256_GCM, "ChaCha20": hpke.AEAD.CHACHA20_POLY1305}
ENVIRONMENT, SHUFFLER_ID, NODE_ID = "File-v0", "conformance", "c0" * 16
X, A, H, USERS = 5, 2, 3, 5_000
EPSILON, BETA, GAMMA, OWNER_GAMMA = 4.0, 1e-2, 0.1, 0.08
"""Batches promise epsilon and beta at GAMMA. The owner demands them only at OWNER_GAMMA."""
LOW_ORDER = "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
"""A point of order 8. It is pinned as the third analyzer key, so that check 22 finds it."""

_h, _x, _a = np.indices((H, X, A))
NEXT, REWARDS = (2 * _x + _a + 1 + _h) % X, (_h + 2 * _x + 3 * _a + 2) % 5 / 4
"""The next state, which is certain, and the reward, a multiple of 1/4; both (H, X, A)."""


def environment() -> dict[str, Any]:
    """Returns the environment as the document of an MDP."""
    return {"P": np.eye(X)[NEXT].tolist(), "r": REWARDS.tolist(), "d1": [1.0] + [0.0] * (X - 1)}


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of the client: demands, people, and keys that only this test uses.

    The client pins the public halves of ``coordinator``, ``shuffler``, ``analyzer`` and ``second``.
    The client may ask ``users`` for episodes, and may hide their ids with ``users_key``.
    """

    trust: Sequence[Trust] = ("shuffle",)
    aggregations: Sequence[Aggregation] = ("messages",)
    users: Sequence[str] = field(
        default_factory=lambda: [os.urandom(16).hex() for _ in range(USERS)]
    )
    coordinator: bytes = field(default_factory=partial(os.urandom, 32), repr=False)
    shuffler: bytes = field(default_factory=partial(os.urandom, 32), repr=False)
    impostor: bytes = field(default_factory=partial(os.urandom, 32), repr=False)
    analyzer: KeyPair = field(default_factory=KeyPair.generate)
    second: KeyPair = field(default_factory=KeyPair.generate)
    token: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    users_key: bytes = field(default_factory=partial(os.urandom, 32), repr=False)

    def write_settings(self, folder: Path, url: str) -> None:
        """Writes settings.json and the files that settings.json names: all that a client needs."""
        files = {
            "environment.json": json.dumps(environment()),
            "users.json": json.dumps({NODE_ID: list(self.users)}),
            "users_key": self.users_key.hex(),
        }
        own: dict[str, Any] = {f"{n.partition('.')[0]}_file": str(folder / n) for n in files}
        own["environment_parameters"] = {"path": own.pop("environment_file")}
        own |= {"shuffler_url": url, "shuffler_id": SHUFFLER_ID, "environment": ENVIRONMENT}
        own |= {"shuffler_key": public_key(self.shuffler).hex(), "node_token": self.token}
        own |= {"coordinator_key": public_key(self.coordinator).hex(), "max_owner_share": GAMMA}
        own |= {"analyzer_keys": [self.analyzer.public.hex(), self.second.public.hex(), LOW_ORDER]}
        own |= {"max_epsilon": EPSILON, "max_beta": BETA, "min_dishonest_fraction": OWNER_GAMMA}
        own |= {"max_batch_seconds": 86_400, "max_episode_seconds": 604_800}
        own |= {"trust_models": [*self.trust], "aggregations": [*self.aggregations]}
        files["settings.json"] = json.dumps(own, indent=2)
        for name, text in files.items():
            (folder / name).write_text(text)

    def hiding_mistake(self, seen: str) -> str:
        """Names the mistake in a hidden user id (docs/protocol.md, section 14), or returns ""."""
        keys = {"": self.users_key, " and the key in hexadecimal": self.users_key.hex().encode()}
        for user in self.users:
            text, raw = user.encode(), bytes.fromhex(user)
            texts = {"the right text": LABEL_USER + text, "no label": text}
            texts |= {"the id's bytes": LABEL_USER + raw, "the label last": text + LABEL_USER}
            texts |= {"no zero byte after the label": LABEL_USER[:-1] + text}
            for (name, data), (kind, key) in product(texts.items(), keys.items()):
                digest = hmac.digest(key, data, "sha256").hex()
                other = hashlib.sha256(key + data).hexdigest()[:32]
                ends = {digest[:32]: "", digest[32:]: " and the last 16 bytes"}
                ends |= {other: " and SHA-256 in place of HMAC"}
                if seen in ends:
                    return f"; it is hidden with {name}{kind}{ends[seen]}"
        return ""

    def key_id_mistake(self, batch_keys: Sequence[bytes], seen: str) -> str:
        """Names the mistake in ``seen``, an id of the batch's newest key (13.2), or returns ""."""
        keys = {"": batch_keys[-1], "the first batch key": batch_keys[0]}
        keys |= {"the analyzer's key": self.analyzer.public}
        labels = {"": LABEL_KEY_ID, "no label": b"", "no zero byte": LABEL_KEY_ID[:-1]}
        forms = {"": bytes, "the key in hexadecimal": lambda key: key.hex().encode()}
        for key, label, form in product(keys, labels, forms):
            digest = hashlib.sha256(labels[label] + forms[form](keys[key])).hexdigest()
            ends = {digest[:32]: "", digest: "all 32 bytes", digest[32:]: "the last 16 bytes"}
            ends |= {digest[:16]: "8 bytes", keys[key].hex(): "the key itself, not its hash"}
            if (end := ends.get(seen.lower())) is not None:
                names = (key, label, form, end, "upper case" * (seen != seen.lower()))
                return f", which is made with {', '.join(filter(None, names))}"
        return ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one step. ``section`` names a section of docs/protocol.md."""

    ok: bool
    step: str
    section: str
    detail: str


class MistakeError(ValueError):
    """A client's mistake: a section of docs/protocol.md, and what was expected and seen."""


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """A batch's descriptor and private keys; ``earlier`` is the key that the batch had first."""

    context: Context
    data: bytes
    analyzer: bytes
    batch: bytes
    earlier: bytes = b""


def read_report(keys: BatchKeys, sealed: bytes) -> tuple[Ints, list[bytes]]:
    """Opens an uploaded report. Raises MistakeError for the first thing that is wrong.

    Returns the counts (C + 1,) of all indices, with the dummy's count last, and the ephemeral keys.
    """
    d = keys.context.descriptor
    if len(sealed) != d.report_bytes:
        raise MistakeError("4.6", wrong_size(d, len(sealed)))
    try:
        opened = seals.open_sealed(keys.batch, keys.context.report_info, sealed)
    except seals.OpenError:
        raise MistakeError("3.4", _explain(keys, [sealed], outer=True)) from None
    counts, ephemeral = _read_inner(keys, opened)
    return counts, [sealed[:KEY_BYTES], *ephemeral]


def _read_inner(keys: BatchKeys, opened: bytes) -> tuple[Ints, list[bytes]]:
    d, info = keys.context.descriptor, keys.context.message_info
    if d.word_bits:
        return _unmask(keys, opened), [opened[:KEY_BYTES]]
    messages = [opened[i : i + d.message_bytes] for i in range(0, len(opened), d.message_bytes)]
    plain = list(seals.open_each(keys.analyzer, info, messages))
    own = [m[:KEY_BYTES] for m in messages]
    if closed := [m for m, text in zip(messages, plain, strict=True) if text is None]:
        why = _explain(keys, closed, outer=False)
        why += "; is one ephemeral key or HPKE context used twice?" * (len({*own}) < len(own))
        why += "; the others open: is a dummy sealed like them?" * (len(closed) < len(own))
        raise MistakeError("3.4", f"{len(closed)} of {len(messages)} messages do not open: {why}")
    return _histogram(d, b"".join(filter(None, plain))), own


def wrong_size(d: BatchDescriptor, size: int) -> str:
    """Returns a sentence that names the expected size of a sealed report and this wrong size."""
    whole, rest = divmod(size - seals.OVERHEAD, d.message_bytes)
    seen = "no whole number of messages" if rest else f"those of {whole} messages"
    each, more = divmod(size - seals.OVERHEAD, d.padding.messages)
    if rest and not more and d.padding.messages > 1 and each > seals.OVERHEAD:
        seen = f"messages of {each} bytes (is an index as wide as the dummy needs? 4.6)"
    expected = f"{d.padding.messages} messages of {d.message_bytes} bytes in a seal of 48"
    expected += "; with dummies, see 10" * (d.trust == "central")
    if d.word_bits:
        own = (d.message_bytes - KEY_BYTES) * 8 // d.word_bits
        seen = f"{(d.message_bytes - KEY_BYTES + size - d.report_bytes) * 8 // d.word_bits} words"
        expected = f"E and {own} words, in a seal of 48" + "; see 5.4" * (d.support is not None)
    why = (f", as {name}" for name, other in misread(d) if other.report_bytes == size)
    return f"expected {d.report_bytes} bytes ({expected}); seen {size} bytes, {seen}{next(why, '')}"


def misread(d: BatchDescriptor) -> Iterator[tuple[str, BatchDescriptor]]:
    """Yields what clients make of a descriptor if they mistake its ``layer`` or ``support``."""
    changes: dict[str, dict[str, object]] = {"in a batch of all steps": {"layer": None}}
    changes["without the support"] = {"support": None}
    if d.support:
        every = Support(tuple(range(d.states)), d.support.next)
        changes["if states that cannot be reached had counters (5.4)"] = {"support": every}
    if d.support and d.layer:
        stay = tuple(((x,),) * d.actions for x in range(d.states))
        late = Support(d.support.start, (stay,) * d.layer + d.support.next[d.layer :])
        changes[f"if `start` had the states of step {d.layer} (5.4)"] = {"support": late}
    for name, members in changes.items():
        other = BatchDescriptor.model_construct(**dict(d) | members)
        with suppress(ValueError):  # such a support may lack successors
            if other.layout.counters != d.layout.counters:
                yield name, other


def wrong_frames(d: BatchDescriptor, body: bytes, leases: Collection[str]) -> str:
    """Returns the text of `wrong_size` for the first report of a wrong size in ``body``, or "".

    Reports lie between the ids of their leases. Ids that ``body`` does not contain are skipped.
    """
    ids = [form for lease in leases for form in (bytes.fromhex(lease), lease.encode())]
    places = sorted(at for each in ids if (at := body.find(each)) >= 0)
    starts = places if places[:1] == [0] else [0]  # otherwise, no id begins the first frame
    frame = LEASE_BYTES + d.report_bytes
    sizes = [end - at for at, end in pairwise([*starts, len(body)])]
    wrong = (size - LEASE_BYTES for size in sizes if size == 0 or size % frame)
    return next((wrong_size(d, max(size, 0)) for size in wrong), "")


def _histogram(d: BatchDescriptor, plain: bytes) -> Ints:
    C, symbols = d.layout.counters, d.symbols.read(plain)
    if d.trust == "local":
        counts, wrong = local_model.count(d.layout, symbols)
        if wrong.size:
            other = np.unpackbits(symbols.astype(np.uint8), axis=1, bitorder="little")[:, C:]
            why = "" if other.any() else "; all are zeros if a byte's lowest bit is the first"
            raise MistakeError("9", f"expected zeros after the last of {C} bits; seen a 1{why}")
        return counts
    if (most := symbols.max()) <= C:
        return np.bincount(symbols.ravel(), minlength=C + 1)
    why = "; read as little-endian, all exist" * bool(d.symbols.read(plain[::-1]).max() <= C)
    why += "; is it a dummy? Not all ones, but C (10)" * bool(most == 256**d.symbols.width - 1)
    raise MistakeError("7", f"expected big-endian indices up to {C}, the dummy's; seen {most}{why}")


def _unmask(keys: BatchKeys, opened: bytes) -> Ints:
    d, own = keys.context.descriptor, opened[:KEY_BYTES]
    bits, most = d.word_bits or 16, d.noise.bits + 1
    words = np.frombuffer(opened[KEY_BYTES:], f"<u{bits // 8}")
    mask = sums.add_masks(keys.analyzer, keys.context.mask_info, own, words.size, bits)
    fits = (right := words - mask) <= most
    if fits.all():
        return np.append(right, 0).astype(np.int64)
    last = np.frombuffer(opened[:-KEY_BYTES], words.dtype)
    vectors = [("no mask", words), ("big-endian words before the mask", right.byteswap())]
    vectors += [("big-endian words", words.byteswap() - mask), ("a subtracted mask", words + mask)]
    vectors += [("words subtracted from the mask", mask - words), ("an XOR", words ^ mask)]
    vectors += [("a stream of big-endian words", words - mask.byteswap())]
    vectors += [(f"a mask with {name}", words - other) for name, other in _masks(keys, own, words)]
    moved = next(_masks(keys, opened[-KEY_BYTES:], words), ("", mask))[1]
    vectors += [("E at the end", last - moved)]
    seen = "another mistake (label, digest and E in the info; AES-128; counter from 0)"
    if fits.sum() > max(2, fits.size // 8):
        first = fits.argmin()
        seen = f"{fits.sum()} of {fits.size} words right, and the first other one is {first}"
    seen = next((name for name, vector in vectors if vector.max() <= most), seen)
    raise MistakeError("8.3", f"expected words of at most {most} under the mask; seen {seen}")


def _masks(keys: BatchKeys, own: bytes, like: Words) -> Iterator[tuple[str, Words]]:
    """Yields the right mask as ("", mask), then (mistake, mask) for each mistake of a client."""
    public, digest = bytes.fromhex(keys.context.descriptor.analyzer_key), keys.context.digest
    private, wrong = map(X25519PrivateKey.from_private_bytes, (keys.analyzer, keys.batch))
    sender = X25519PublicKey.from_public_bytes(own)
    try:
        secret, other = private.exchange(sender), wrong.exchange(sender)
    except ValueError:  # a point of low order
        return
    right, sha = LABEL_MASK + digest + own, hashlib.sha256
    ends = {"": own, "no E in the info": b"", "E in hexadecimal": own.hex().encode()}
    ends["the analyzer's key in place of E"] = public
    infos = product(ends.items(), _infos(keys, LABEL_MASK, LABEL_MESSAGE))
    forms = [(", ".join(filter(None, (a, b))), info + end) for (a, end), (b, info) in infos]
    forms += [("E before the digest", LABEL_MASK + own + digest), ("an empty info", b"")]
    aes = {name: HKDF(SHA256(), 16, None, info).derive(secret) for name, info in forms}
    aes["AES-256"] = HKDF(SHA256(), 32, None, right).derive(secret)
    aes["the digest as salt"] = HKDF(SHA256(), 16, digest, right).derive(secret)
    aes["a secret with the batch key"] = HKDF(SHA256(), 16, None, right).derive(other)
    aes["HKDF-Expand alone"] = HKDFExpand(SHA256(), 16, right).derive(secret)
    aes["the X25519 secret as its key"] = secret[:16]
    aes["SHA-256 in place of HKDF"] = sha(secret + right).digest()[:16]
    starts = [(name, key, 0) for name, key in aes.items()] + [("a counter from 1", aes[""], 1)]
    for name, key, start in starts:
        cipher = Cipher(algorithms.AES(key), modes.CTR(start.to_bytes(16, "big"))).encryptor()
        yield name, np.frombuffer(cipher.update(bytes(like.nbytes)), like.dtype)


def _infos(keys: BatchKeys, right: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields ("", right info), then (mistake, info) for each mistake that a client may make."""
    digest, data, sha = keys.context.digest, keys.data, hashlib.sha256
    labels = [("", right), (f"the label {other!r}", other), ("no label", b"")]
    labels += [("a label without its final zero byte", right[:-1])]
    digests = [("", digest), ("a digest without its label", sha(data).digest())]
    digests += [("the digest in hexadecimal", digest.hex().encode()), ("no digest", b"")]
    digests += [("a digest whose label has no zero byte", sha(LABEL_DIGEST[:-1] + data).digest())]
    digests += [("a digest with the label of deposits", sha(LABEL_DEPOSIT + data).digest())]
    digests += [("16 bytes of the digest", digest[:16]), ("the descriptor, not its digest", data)]
    name = "the digest of a descriptor that was parsed and written again"
    for short, ordered, blanks in product((0, 1), (False, True), ((",", ":"), (", ", ": "))):
        document = json.loads(data, parse_float=(float, shortened)[short])
        text = json.dumps(document, sort_keys=ordered, separators=blanks).encode()
        digests.append((name, sha(LABEL_DIGEST + text).digest()))
    for (one, label), (two, end) in product(labels, digests):
        yield ", ".join(filter(None, (one, two))), label + end
    yield "the digest before the label", digest + right


def shortened(number: str) -> float:
    """Reads a JSON number. Turns 1.0 into 1, as languages without integers do."""
    return int(float(number)) if float(number).is_integer() else float(number)


def _explain(keys: BatchKeys, sealed: Sequence[bytes], *, outer: bool) -> str:
    """Names the mistake that keeps all these seals from opening."""
    labels = (LABEL_REPORT, LABEL_MESSAGE) if outer else (LABEL_MESSAGE, LABEL_REPORT)
    private, wrong = (keys.batch, keys.analyzer) if outer else (keys.analyzer, keys.batch)
    whose = [("", private), (f"the {'analyzer' if outer else 'batch'}'s key", wrong)]
    whose += [("the batch's earlier key", keys.earlier)] * bool(keys.earlier)
    infos, first, gcm = list(_infos(keys, *labels)), sealed[0], hpke.AEAD.AES_128_GCM
    right, tag = infos[0][1], seals.TAG_BYTES
    layouts = {"the tag before the text": first[:32] + first[32 + tag :] + first[32 : 32 + tag]}
    layouts |= {"enc at the end": first[-KEY_BYTES:] + first[:-KEY_BYTES]}
    layouts |= {"the tag first": first[tag:] + first[:tag]}
    tries = [
        (", ".join(filter(None, (one, two))), gcm, first, key, info)
        for (one, key), (two, info) in product(whose, infos)
    ]
    tries += [(name, aead, first, private, right) for name, aead in _AEADS.items()]
    tries += [(name, gcm, text, private, right) for name, text in layouts.items()]
    expected = f"expected the info {labels[0]!r} and the 32 bytes of the digest, and no aad; seen "
    for name, aead, text, key, info in tries:
        suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, aead)
        with suppress(InvalidTag, ValueError):
            suite.decrypt(text, X25519PrivateKey.from_private_bytes(key), info)
            return expected + name
    try:
        for number in range(1, 200):
            if _decrypt(private, right, first, number)[1]:
                return f"{expected}sequence number {number}, not 0"
        plain = b"".join(_decrypt(private, right, each)[0] for each in sealed)
        _ = _read_inner(keys, plain) if outer else _histogram(keys.context.descriptor, plain)
    except ValueError:  # also a point of low order
        return f"{expected}another mistake"
    return f"{expected}a text that decrypts, with a wrong tag: is the aad not empty?"


def open_report(tries: Tries, seen: set[bytes]) -> Ints:
    """Opens a report's uploads. Raises MistakeError if their counts differ, or a key repeats."""
    found = [read_report(keys, sealed) for keys, sealed in tries]
    opened, ephemeral = [counts for counts, _ in found], [keys for _, keys in found]
    if any((counts != opened[-1]).any() for counts in opened):
        detail = "expected the same messages, sealed to the new key; seen other messages"
        raise MistakeError("13.7", detail)
    if tries[0][0].context.descriptor.word_bits and seen & {keys[1] for keys in ephemeral}:
        raise MistakeError("8.3", "expected a fresh key pair in every report; seen one twice")
    if not all(map(seen.isdisjoint, ephemeral)) or len({*ephemeral[-1]}) < len(ephemeral[-1]):
        raise MistakeError("3.4", "expected a new ephemeral key in every seal; seen one twice")
    seen.update(*ephemeral)
    return opened[-1]


def _decrypt(private: bytes, info: bytes, sealed: bytes, number: int = 0) -> tuple[bytes, bool]:
    """Opens a seal with any sequence number (RFC 9180, sections 4.1, 5.1 and 5.2; base mode).

    Returns the text, and whether the tag is right. Raises ValueError if the seal's ephemeral key is
    a point of low order.
    """
    mac = partial(hmac.digest, digest="sha256")
    kem, suite = b"HPKE-v1KEM\x00\x20", b"HPKE-v1HPKE\x00\x20\x00\x01\x00\x01"
    extract, key = partial(mac, bytes(32)), X25519PrivateKey.from_private_bytes(private)
    enc, text = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
    dh = key.exchange(X25519PublicKey.from_public_bytes(enc))
    ends = b"shared_secret" + enc + key.public_key().public_bytes_raw() + b"\x01"
    shared = mac(extract(kem + b"eae_prk" + dh), b"\x00\x20" + kem + ends)
    ids = extract(suite + b"psk_id_hash") + extract(suite + b"info_hash" + info)
    secret, end = mac(shared, suite + b"secret"), b"\x00" + ids + b"\x01"
    aes = mac(secret, b"\x00\x10" + suite + b"key" + end)[:16]
    base = mac(secret, b"\x00\x0c" + suite + b"base_nonce" + end)[:12]
    nonce = (int.from_bytes(base, "big") ^ number).to_bytes(12, "big")
    with suppress(InvalidTag):
        return AESGCM(aes).decrypt(nonce, text, None), True
    stream = Cipher(algorithms.AES128(aes), modes.CTR(nonce + b"\x00\x00\x00\x02")).decryptor()
    return stream.update(text[: -seals.TAG_BYTES]), False
