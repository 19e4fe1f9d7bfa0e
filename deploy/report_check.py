"""Opens reports with the private keys, and names a client's mistakes. No I/O.

`read_report` opens one report. `BatchLaw` compares all reports of a batch with their law, which is
their distribution for a correct client. Every statistical test is exact: in a whole session, a
correct client fails with probability at most `ERROR_RATE`. Sections are in docs/protocol.md.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import permutations, product

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import special

from riffle.common.mechanism import local_model, sums
from riffle.common.mechanism.counters import Episode, Ints
from riffle.common.mechanism.parameters import Flips, Noise
from riffle.common.protocol import hpke as seals
from riffle.common.protocol.descriptor import LABEL_DIGEST, LABEL_MASK, BatchDescriptor, Context
from riffle.common.protocol.hpke import KEY_BYTES, LABEL_MESSAGE, LABEL_REPORT

ERROR_RATE, TESTS = 1e-6, 4_000
"""A session has fewer than `TESTS` tests; each errs with probability at most `LEVEL`."""
LEVEL = ERROR_RATE / TESTS
AXES = ("family", "h", "x", "a", "x'", "r")
Floats = npt.NDArray[np.float64]
Tries = Sequence[tuple["BatchKeys", bytes]]
_AEADS = {"": hpke.AEAD.AES_128_GCM, "AES-256-GCM": hpke.AEAD.AES_256_GCM}
_AEADS["ChaCha20"] = hpke.AEAD.CHACHA20_POLY1305


class MistakeError(ValueError):
    """A client's mistake: a section of docs/protocol.md, and what was expected and seen."""


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """A batch's descriptor, its bytes, and the private keys of analyzer and batch."""

    context: Context
    data: bytes
    analyzer: bytes
    batch: bytes


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
    if closed := [m for m, text in zip(messages, plain, strict=True) if text is None]:
        why = _explain(keys, closed, outer=False)
        raise MistakeError("3.4", f"{len(closed)} of {len(messages)} messages do not open: {why}")
    return _histogram(d, b"".join(filter(None, plain))), [m[:KEY_BYTES] for m in messages]


def wrong_size(d: BatchDescriptor, size: int) -> str:
    """Returns a sentence that names the expected size of a sealed report and this wrong size."""
    whole, rest = divmod(size - seals.OVERHEAD, d.message_bytes)
    seen = "no whole number of messages" if rest else f"those of {whole} messages"
    expected = f"{d.padding.messages} messages of {d.message_bytes} bytes in a seal of 48"
    expected += "; with dummies, see 10" * (d.trust == "central")
    return f"expected {d.report_bytes} bytes ({expected}); seen {size} bytes, {seen}"


def _histogram(d: BatchDescriptor, plain: bytes) -> Ints:
    C, symbols = d.layout.counters, d.symbols.read(plain)
    if d.trust == "local":
        counts, wrong = local_model.count(d.layout, symbols)
        if wrong.size:
            other = np.unpackbits(symbols.astype(np.uint8), axis=1, bitorder="little")[:, C:]
            why = "" if other.any() else "; all are zeros if a byte's lowest bit is the first"
            raise MistakeError("9", f"expected zeros after the last of {C} bits; seen a 1{why}")
        return counts
    if symbols.max() <= C:
        return np.bincount(symbols.ravel(), minlength=C + 1)
    why = "; read as little-endian, all exist" * bool(d.symbols.read(plain[::-1]).max() <= C)
    detail = f"expected big-endian indices up to {C}, the dummy's; seen {symbols.max()}"
    raise MistakeError("7", detail + why)


def _unmask(keys: BatchKeys, opened: bytes) -> Ints:
    d, own = keys.context.descriptor, opened[:KEY_BYTES]
    C, bits, most = d.layout.counters, d.word_bits or 16, d.noise.bits + 1
    words = np.frombuffer(opened[KEY_BYTES:], dtype=f"<u{bits // 8}")
    infos = _infos(keys, LABEL_MASK, LABEL_MESSAGE)
    masks = ((name, sums.add_masks(keys.analyzer, info, own, C, bits)) for name, info in infos)
    _, mask = next(masks)
    right = words - mask
    if right.max() <= most:
        return np.append(right, 0).astype(np.int64)
    vectors = [(f"a mask with {name}", words - other) for name, other in masks]
    vectors += [("no mask", words), ("big-endian words before the mask", right.byteswap())]
    vectors += [("big-endian words", words.byteswap() - mask), ("a subtracted mask", words + mask)]
    vectors += [("a stream of big-endian words", words - mask.byteswap())]
    other = "another mistake (label, digest and E in the info; AES-128; counter from 0)"
    found = next((name for name, vector in vectors if vector.max() <= most), other)
    raise MistakeError("8.3", f"expected words of at most {most} under the mask; seen {found}")


def _infos(keys: BatchKeys, right: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields ("", right info), then (mistake, info) for each mistake that a client may make."""
    digest, data = keys.context.digest, keys.data
    labels = [("", right), (f"the label {other!r}", other), ("no label", b"")]
    labels += [("a label without its final zero byte", right[:-1])]
    digests = [("", digest), ("a digest without its label", hashlib.sha256(data).digest())]
    digests += [("the digest in hexadecimal", digest.hex().encode()), ("no digest", b"")]
    name = "the digest of a descriptor that was parsed and written again"
    for short, ordered, blanks in product((0, 1), (False, True), ((",", ":"), (", ", ": "))):
        document = json.loads(data, parse_float=(float, shortened)[short])
        text = json.dumps(document, sort_keys=ordered, separators=blanks).encode()
        digests.append((name, hashlib.sha256(LABEL_DIGEST + text).digest()))
    for (one, label), (two, end) in product(labels, digests):
        yield ", ".join(filter(None, (one, two))), label + end


def shortened(number: str) -> float:
    """Reads a JSON number. Turns 1.0 into 1, as languages without integers do."""
    return int(float(number)) if float(number).is_integer() else float(number)


def _explain(keys: BatchKeys, sealed: Sequence[bytes], *, outer: bool) -> str:
    """Names the mistake that keeps all these seals from opening."""
    labels = (LABEL_REPORT, LABEL_MESSAGE) if outer else (LABEL_MESSAGE, LABEL_REPORT)
    private, wrong = (keys.batch, keys.analyzer) if outer else (keys.analyzer, keys.batch)
    expected = f"expected the info {labels[0]!r} and the 32 bytes of the digest, and no aad; seen "
    infos = list(_infos(keys, *labels))
    whose = [("", private), (f"the {'analyzer' if outer else 'batch'}'s key", wrong)]
    for (one, aead), (two, key), (three, info) in product(_AEADS.items(), whose, infos):
        suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, aead)
        with suppress(InvalidTag, ValueError):
            suite.decrypt(sealed[0], X25519PrivateKey.from_private_bytes(key), info)
            return expected + ", ".join(filter(None, (one, two, three)))
    try:
        plain = b"".join(_decrypt_unchecked(private, infos[0][1], each) for each in sealed)
        _ = _read_inner(keys, plain) if outer else _histogram(keys.context.descriptor, plain)
    except ValueError:  # also a point of low order
        return f"{expected}another mistake"
    return f"{expected}a text that decrypts, with a wrong tag: is the aad not empty?"


def _decrypt_unchecked(private: bytes, info: bytes, sealed: bytes) -> bytes:
    """Opens a seal without checking its tag (RFC 9180, sections 4.1 and 5.1; base mode).

    Raises ValueError if the seal's ephemeral key is a point of low order.
    """
    kem, suite = b"HPKE-v1KEM\x00\x20", b"HPKE-v1HPKE\x00\x20\x00\x01\x00\x01"
    mac, key = partial(hmac.digest, digest="sha256"), X25519PrivateKey.from_private_bytes(private)
    dh = key.exchange(X25519PublicKey.from_public_bytes(enc := sealed[:KEY_BYTES]))
    kem_context = enc + key.public_key().public_bytes_raw()
    eae_prk = mac(bytes(32), kem + b"eae_prk" + dh)
    shared_secret = mac(eae_prk, b"\x00\x20" + kem + b"shared_secret" + kem_context + b"\x01")
    context = mac(bytes(32), suite + b"psk_id_hash") + mac(bytes(32), suite + b"info_hash" + info)
    secret, end = mac(shared_secret, suite + b"secret"), b"\x00" + context + b"\x01"
    aes = mac(secret, b"\x00\x10" + suite + b"key" + end)[:16]
    nonce = mac(secret, b"\x00\x0c" + suite + b"base_nonce" + end)[:12]
    stream = Cipher(algorithms.AES128(aes), modes.CTR(nonce + b"\x00\x00\x00\x02")).decryptor()
    return stream.update(sealed[KEY_BYTES : -seals.TAG_BYTES])


def noise_bits(d: BatchDescriptor) -> tuple[int, float]:
    """Returns how many noise bits a report has for each counter, and the probability of a 1."""
    noise = d.batch_noise
    bits = (noise.bits, noise.p) if isinstance(noise, Noise) else (0, 0.0)
    return (1, noise.f) if isinstance(noise, Flips) else bits


@dataclass(frozen=True, slots=True)
class Test:
    """An observed number; ``law[k]`` is the probability that a correct client's number is k."""

    section: str
    name: str
    observed: int
    law: Floats

    def __add__(self, other: "Test") -> "Test":
        law = np.convolve(self.law, other.law)
        return Test(self.section, self.name, self.observed + other.observed, law)

    @property
    def is_pooled(self) -> bool:
        """Returns whether the test is made only once, on the sum over all batches."""
        return self.section[0] == "6" or self.name.startswith("noise of the ")

    @property
    def fault(self) -> MistakeError | None:
        """The mistake if `observed` is too small or too large (two-sided, at `LEVEL`), or None."""
        below, above = self.law[: self.observed + 1].sum(), self.law[self.observed :].sum()
        if min(below, above) > LEVEL / 2:
            return None
        exact = "" if self.section[0] in {"5", "6"} else " (drawn exactly, without approximation?)"
        mean = float(self.law @ np.arange(self.law.size))
        detail = f"{self.name}: expected about {mean:.4g}, seen {self.observed}{exact}"
        return MistakeError(self.section, detail)


@lru_cache(maxsize=512)
def binomial(N: int, p: float) -> Floats:
    """Returns the probabilities of 0 to N ones among N bits."""
    return np.diff(special.bdtr(np.arange(N + 1.0), N, p), prepend=0)


@dataclass(frozen=True)
class BatchLaw:
    """The law of a batch's reports. Episodes begin in state 0, and transitions are certain.

    ``next_states`` and ``rewards`` (H, X, A) have the next state and the mean reward.
    """

    descriptor: BatchDescriptor
    next_states: Ints
    rewards: Floats

    @cached_property
    def paths(self) -> list[tuple[list[Ints], Ints, Floats]]:
        """For each policy: sets of counters (an episode raises one counter of each set); for each
        step, the counter that a reward bit of 1 raises; for each step, the mean reward bit."""
        d, h, found = self.descriptor, np.arange(self.descriptor.horizon), []
        for policy in d.mixture.policies:
            x = np.zeros(d.horizon + 1, dtype=np.int64)
            for step in h:
                x[step + 1] = self.next_states[step, x[step], policy[step, x[step]]]
            a = policy[h, x[:-1]]
            means = (self.rewards[h, x[:-1], a] - d.reward_low) / (d.reward_high - d.reward_low)
            zero, one = (d.layout.encode(Episode(x, a, np.full_like(a, bit))) for bit in (0, 1))
            sets = [np.unique(pair) for pair in zip(zero, one, strict=False)]
            found.append((sets, one if "joint" in d.layout.shapes else one[zero.size :], means))
        return found

    def matches(self, counts: Ints) -> npt.NDArray[np.bool_]:
        """Returns (n, M): whether report i, a row of counts, may hold an episode of policy m."""
        found = [[counts[:, c].any(axis=1) for c in required] for required, *_ in self.paths]
        return np.asarray(np.array(found).all(axis=1).T)

    def mistakes(
        self, counts: Ints, seen: set[bytes], pooled: dict[str, Test]
    ) -> Iterator[MistakeError]:
        """Yields mistakes in the reports of a batch; ``counts`` is (n, C + 1).

        ``seen`` has the noise of earlier batches; ``pooled`` adds up tests over batches.
        """
        yield from (certain := list(self._certain(counts)))
        p, noise = noise_bits(self.descriptor)[1], counts[:, self._never].astype(np.uint8)
        chance = len(noise) ** 2 * (p * p + (1 - p) ** 2) ** noise.shape[1]
        rows = [row.tobytes() for row in noise if row.any()] if TESTS * chance < LEVEL else []
        if len({*rows} - seen) < len(rows):
            detail = "expected fresh noise in every report; seen the same in several"
            yield MistakeError(self._section, detail)
        seen |= {*rows}
        tests = [] if certain else [*self._noise_tests(counts), *self._episode_tests(counts)]
        for test in (test for test in tests if test.is_pooled):
            key = f"{test.section} {test.name}"
            pooled[key] = pooled[key] + test if key in pooled else test
        failed = [test for test in tests if not test.is_pooled and test.fault]
        # Too little noise fails many tests. The first shows how little; one that saw 0 shows where.
        where = [test for test in failed[1:] if not test.observed]
        yield from (test.fault for test in failed[:1] + where[:1] if test.fault)

    def _certain(self, counts: Ints) -> Iterator[MistakeError]:
        """Yields mistakes that no random draw of a correct client can explain."""
        bits, most = noise_bits(self.descriptor)[0], int(counts[:, :-1].max())
        lost = int((~self.matches(counts).any(axis=1)).sum())
        if lost and self.descriptor.trust != "local":
            detail = f"{lost} of {len(counts)} reports hold no episode of the batch's mixture"
            detail += f" at step {self.descriptor.layer}" * (self.descriptor.layer is not None)
            yield MistakeError("5.3", f"{detail}{self._other_order(counts)}")
        elif most > bits + 1:
            limit = f"expected at most {bits + 1} ones of a counter in a report, {bits} of noise"
            seen = f"{most} of index {counts[:, :-1].max(axis=0).argmax()}"
            yield MistakeError(self._section if bits else "10", f"{limit}; seen {seen}")

    @property
    def _section(self) -> str:
        """The section on the noise of this batch."""
        d = self.descriptor
        return "8.2" if d.word_bits else "9" if d.trust == "local" else "7"

    @cached_property
    def _never(self) -> Ints:
        """The counters that no episode raises, and that therefore hold only noise."""
        raised = [np.concatenate([*required, ones]) for required, ones, _ in self.paths]
        return np.setdiff1d(np.arange(self.descriptor.layout.counters), np.concatenate(raised))

    @cached_property
    def _coordinates(self) -> npt.NDArray[np.int64]:
        """The family (by number), h, x, a, x', r of every counter; -1 for a missing coordinate."""
        layout, start = self.descriptor.layout, 0
        table = np.full((layout.counters, len(AXES)), -1)
        for number, block in enumerate(layout.split(np.ones(layout.counters)).values()):
            at = np.argwhere(block)
            rows = table[start : (start := start + len(at))]
            rows[:, 0], rows[:, 1 : at.shape[1] + 1] = number, at
        return table

    def _other_order(self, counts: Ints) -> str:
        """Names another counter order, or another step, in which all reports hold an episode."""
        if self.matches(np.roll(counts[:, :-1], -1, axis=1)).any(axis=1).all():
            return "; all hold one with 1 added to every index"
        names, (*inner, family) = tuple(self.descriptor.layout.shapes), self._coordinates[:, ::-1].T
        for order in permutations(range(len(names))):
            place = np.argsort(np.lexsort((*inner, np.argsort(order)[family])))
            if self.matches(counts[:, place]).any(axis=1).all():
                return f"; all hold one in the order (5.2) {', '.join(names[k] for k in order)}"
        for axes in permutations(range(len(AXES))):
            place = np.argsort(np.lexsort(self._coordinates[:, axes[::-1]].T))
            if self.matches(counts[:, place]).any(axis=1).all():
                return f"; all hold one in the order ({', '.join(AXES[axis] for axis in axes)})"
        d = self.descriptor
        for h in range(d.horizon) if d.layer is not None and not d.support else ():
            other = BatchDescriptor.model_construct(**dict(d) | {"layer": h})
            if replace(self, descriptor=other).matches(counts).any(axis=1).all():
                return f"; all hold one of step {h}"
        return ""

    def _noise_tests(self, counts: Ints) -> Iterator[Test]:
        """Yields tests of the noise in reports (n, C + 1), on counters that no episode raises."""
        (bits, p), n, noise = noise_bits(self.descriptor), len(counts), counts[:, self._never]
        N, size, totals = n * bits, self._never.size, noise.sum(axis=0)
        test = partial(Test, self._section)
        for end, c in (("first", 0), ("last", self.descriptor.layout.counters - 1)):
            if c in self._never:
                yield test(f"noise of the {end} counter", int(counts[:, c].sum()), binomial(N, p))
        groups = {"all counters without data": np.ones(size, dtype=np.bool_)}
        for axis, values in zip(AXES, self._coordinates[self._never].T, strict=True):
            for value in np.unique(values[values >= 0]):
                groups[f"counters with {axis} = {value}"] = values == value
        for name, group in groups.items():
            ones = int(totals[group].sum())
            yield test(f"noise of {name}", ones, binomial(N * int(group.sum()), p))
        law = binomial(size, (1 - p) ** N)
        yield test("counters that no report gave noise", int((totals == 0).sum()), law)
        law = np.diff(np.cumsum(binomial(N, p)) ** size, prepend=0)
        yield test("most noise of one counter", int(totals.max()), law)
        above = np.cumsum(binomial(bits * size, p)[::-1])[::-1] ** n
        least = int(noise.sum(axis=1).min())
        yield test("least noise of one report", least, -np.diff(above, append=0))

    def _episode_tests(self, counts: Ints) -> Iterator[Test]:
        (bits, p), n, matches = noise_bits(self.descriptor), len(counts), self.matches(counts)
        weights, local = self.descriptor.mixture.probabilities, self.descriptor.trust == "local"
        for k, (required, ones, means) in enumerate(self.paths):
            hidden = p * (1 - p) ** (required[0].size - 1) if local else 0.0
            own = (1 - hidden) ** len(required)
            by_noise = (1 - (1 - p) ** (bits * required[0].size)) ** len(required)
            law = binomial(n, weights[k] * own + (1 - weights[k]) * by_noise)
            yield Test("6.1", f"reports with policy {k}", int(matches[:, k].sum()), law)
            for h, c in enumerate(ones):
                q, name = weights[k] * means[h], f"reward bits at step {h} of policy {k}, sent if 1"
                law = np.convolve(binomial(n, q), binomial(n * bits, p))
                law = binomial(n, q + p - 2 * q * p) if local else law
                yield Test("6.2", name, int(counts[:, c].sum()), law)
            if not local:
                sure, cells = matches[:, k] & (matches.sum(axis=1) == 1), np.concatenate(required)
                extra = int((counts[sure][:, cells].sum(axis=1) - len(required)).sum())
                law = binomial(int(sure.sum()) * bits * cells.size, p)
                yield Test("5.3", "messages beside one episode's on its counters", extra, law)


def open_report(tries: Tries, seen: set[bytes]) -> Ints:
    """Opens all uploads of a report. Raises MistakeError if counts differ, or a key repeats."""
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
