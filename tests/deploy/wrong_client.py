"""A small client with one switch for each mistake, for the tests of ``riffle conformance``."""

import hashlib
import hmac
import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import CounterLayout, Episode, Ints, Support
from riffle.common.mechanism.parameters import Guarantee, Noise
from riffle.common.mechanism.randomness import SystemRandomness, draw_counts, word
from riffle.common.mechanism.workflow import encode
from riffle.common.process.endpoint import server_verification
from riffle.common.protocol import hpke
from riffle.common.protocol.descriptor import (
    LABEL_DIGEST,
    LABEL_MASK,
    BatchDescriptor,
    SignedDescriptor,
    parse,
)
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.hpke import LABEL_MESSAGE, LABEL_REPORT
from riffle.common.protocol.signatures import LABEL_KEY_ID, key_id
from riffle.deploy import offers, owner
from riffle.node_client.environments.tabular import MDPDocument, TabularEnvironment
from riffle.node_client.episode import run_episode
from riffle.node_client.trust import Demands, accept

MDP = MDPDocument.model_validate_json(json.dumps(owner.environment())).mdp()
RANDOM, USUAL = SystemRandomness(), server_verification(None)


def seal(public: bytes, info: bytes, text: bytes, aad: bytes = b"", private: bytes = b"") -> bytes:
    """HPKE with everything that a client may get wrong as an argument."""
    if not aad and not private:
        return hpke.seal(public, info, text)
    kem, suite = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x01"

    def extract(name: bytes, salt: bytes, label: bytes, secret: bytes) -> bytes:
        return hmac.digest(salt or bytes(32), b"HPKE-v1" + name + label + secret, "sha256")

    def expand(name: bytes, secret: bytes, label: bytes, info: bytes, size: int) -> bytes:
        text = size.to_bytes(2, "big") + b"HPKE-v1" + name + label + info
        return hmac.digest(secret, text + b"\x01", "sha256")[:size]

    own = X25519PrivateKey.from_private_bytes(private or os.urandom(32))
    enc = own.public_key().public_bytes_raw()
    dh = own.exchange(X25519PublicKey.from_public_bytes(public))
    shared = expand(kem, extract(kem, b"", b"eae_prk", dh), b"shared_secret", enc + public, 32)
    ids = extract(suite, b"", b"psk_id_hash", b""), extract(suite, b"", b"info_hash", info)
    secret, context = extract(suite, shared, b"secret", b""), b"\x00" + b"".join(ids)
    key, nonce = (
        expand(suite, secret, name, context, n) for name, n in ((b"key", 16), (b"base_nonce", 12))
    )
    return enc + AESGCM(key).encrypt(nonce, text, aad)


@dataclass
class WrongClient:
    """Serves batches until `serve` finds none; ``mistake`` is its one mistake ("" for none)."""

    settings: dict[str, Any]
    users: list[str]
    mistake: str = ""
    asked: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    kept: dict[str, Ints] = field(default_factory=dict)
    policies: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.settings['node_token']}"}
        headers["Accept-Encoding"] = "gzip" if self.mistake == "compressed answers" else "identity"
        s, follows = self.settings, self.mistake == "redirection followed"
        base = s["shuffler_url"]
        self.http = httpx.Client(
            base_url=base, headers=headers, timeout=9, follow_redirects=follows, verify=USUAL
        )
        pins = s["analyzer_keys"][: 1 if self.mistake == "first pin only" else None]
        self.demands = Demands(
            coordinator_key=bytes.fromhex(s["coordinator_key"]),
            shuffler_key=bytes.fromhex(s["shuffler_key"]),
            shuffler_id=s["shuffler_id"],
            required=Guarantee(s["max_epsilon"], s["max_beta"], s["min_dishonest_fraction"]),
            environment=s["environment"],
            sizes=MDP.sizes,
            reward_range=(0.0, 1.0),
            declaration=MDP.declaration,
            trust_models=tuple(s["trust_models"]),
            aggregations=tuple(s["aggregations"]),
            max_owner_share=s["max_owner_share"],
            analyzer_keys=frozenset(pins),
            max_seconds=s["max_batch_seconds"],
            max_episode_seconds=s["max_episode_seconds"],
        )

    @classmethod
    def offline(cls, owner: owner.Owner, folder: Path) -> "WrongClient":
        """A client that talks to nobody."""
        owner.write_settings(folder, "http://127.0.0.1")
        return cls(json.loads((folder / "settings.json").read_text()), [])

    def turn(self) -> bool:
        """Serves every listed batch that it has not served; returns whether there was any."""
        listed = self.http.get("/v1/batches?accepting=1").json()["batches"]
        fresh = [row["batch_id"] for row in listed if row["batch_id"] not in self.done]
        for batch_id in fresh:
            self.done.add(batch_id)
            self._serve(batch_id)
        return bool(fresh)

    def _serve(self, batch_id: str) -> None:
        try:
            signed = self._signed(batch_id)
            accept(signed, batch_id, self.demands, time.time())
        except RemoteError as error:
            if not self.mistake.startswith("unchecked ") or self.mistake[10:] not in error.detail:
                return
        except ValueError:  # an envelope of the wrong form
            return
        written = json.dumps(json.loads(signed.descriptor))
        if self.mistake == "signatures of rewritten bytes" and written != signed.descriptor:
            return
        descriptor, forgetful = json.loads(signed.descriptor), {"unchecked ", "unchecked time left"}
        end = time.time() + (descriptor.get("episode_seconds") or 0)
        if descriptor["expires_at"] <= end and self.mistake not in forgetful:
            return
        leases = self._lease(batch_id, int(descriptor["n"]), descriptor.get("episode_seconds") or 0)
        if self.mistake == "no report of a failed episode":
            leases = leases[1:]
        if leases:
            self._report(batch_id, signed, leases)

    def _parse(self, signed: SignedDescriptor) -> BatchDescriptor:
        return parse(signed.descriptor.encode()).descriptor

    def _signed(self, batch_id: str) -> SignedDescriptor:
        answer = self.http.get(f"/v1/batches/{batch_id}")
        if answer.status_code == 307:
            return self._signed(batch_id)
        return SignedDescriptor.model_validate_json(answer.content)

    def _lease(self, batch_id: str, n: int, seconds: int) -> list[dict[str, Any]]:
        if self.mistake == "user asked twice" and self.asked:
            users = self.asked[:1] + self.users[: n - 1]
        else:
            users = self.users[: min(n, offers.REPORTS)]
        body = json.dumps({"users": users}).encode()
        reply = self._post(f"{batch_id}/leases", body).json()
        named = {each["user"] for each in reply["leases"] + reply["refused"]}
        beyond = any(each["slot"] >= n for each in reply["leases"])
        if (named != {*users} or beyond) and self.mistake != "leases by position":
            reply = self._post(f"{batch_id}/leases", body).json()
        end = time.time() + (0 if self.mistake == "lease shorter than an episode" else seconds)
        over = any(each["expires_at"] <= end for each in reply["leases"])
        if over and self.mistake != "report after the lease":
            time.sleep(seconds)
            return self._lease(batch_id, n, seconds)
        taken = {each["user"] for each in reply["leases"]}
        self.asked += taken
        aside = {r["user"] for r in reply["refused"] if r["problem"] == "user-unavailable"}
        self.users = [user for user in self.users if user not in taken | aside]
        if aside:
            self.done.discard(batch_id)
        return list(reply["leases"])

    def _post(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | headers
        return self.http.post(f"/v1/batches/{path}", content=body, headers=headers)

    def _report(
        self, batch_id: str, signed: SignedDescriptor, leases: list[dict[str, Any]]
    ) -> None:
        d = self._parse(signed)
        plain = [self._encode(d, lease["slot"]) for lease in leases]
        finals = {"no retry", "every 404 is final"}
        for attempt in range(3):
            again = attempt and self.mistake in {"redraws on a new key", "reseals on a retry"}
            if again and self.mistake == "redraws on a new key":
                plain = [self._encode(d, lease["slot"]) for lease in leases]
            if not attempt or again:
                body = self._body(signed, leases, plain)
            try:
                answer = self._upload(batch_id, signed, body)
            except httpx.HTTPError:
                if self.mistake == "no retry":
                    return
                continue
            if answer.status_code == 409 and "outdated-key" in answer.text:
                if self.mistake == "old key again":
                    return
                signed = self._signed(batch_id)
                body = self._body(signed, leases, plain)
            elif self._is_final(answer):
                self._settle(batch_id, answer, leases)
                return
            elif self.mistake in finals:
                return
            if self.mistake != "retry at once":
                time.sleep(float(answer.headers.get("Retry-After", 0)))

    def _is_final(self, answer: httpx.Response) -> bool:
        is_plain = "Content-Encoding" not in answer.headers
        return answer.status_code == 200 and is_plain and bool(answer.json()["results"])

    def _settle(self, batch_id: str, answer: httpx.Response, leases: list[dict[str, Any]]) -> None:
        """Serves the batch again if the shuffler refused a report for good."""
        for lease, result in zip(leases, answer.json()["results"], strict=True):
            if result["outcome"] not in {"accepted", "replayed"}:
                self.done.discard(batch_id)
                if self.mistake == "refused user asked again":
                    self.users.insert(0, lease["user"])

    def _upload(self, batch_id: str, signed: SignedDescriptor, body: bytes) -> httpx.Response:
        used = key_id(bytes.fromhex(signed.batch_key))
        headers = {"Riffle-Batch-Key": batch_id if self.mistake == "wrong header" else used}
        headers["Content-Type"] = "application/octet-stream"
        key = bytes.fromhex(signed.batch_key)
        if self.mistake == "whole hash":
            headers["Riffle-Batch-Key"] = hashlib.sha256(LABEL_KEY_ID + key).hexdigest()
        if self.mistake == "hash of hexadecimal":
            headers["Riffle-Batch-Key"] = key_id(signed.batch_key.encode())
        if self.mistake == "no header":
            del headers["Riffle-Batch-Key"]
        return self._post(f"{batch_id}/reports", body, **headers)

    # What is sent

    def _episode(self, d: BatchDescriptor) -> Episode | None:
        mixture, draw = d.mixture, word(RANDOM)
        if self.mistake == "weights of 31 bits":
            draw >>= 1
        policy = mixture.pick(draw)
        if self.mistake == "policy of a batch":
            policy = mixture.pick(self.policies.setdefault(d.batch_id, draw))
        if self.mistake == "another policy":
            policy = 0 * policy
        if self.mistake == "a policy for each step":
            policy = np.array([mixture.pick(word(RANDOM))[h] for h in range(d.horizon)])
        low, high = d.reward_low, d.reward_high
        if self.mistake == "reward range ignored":
            low, high = 0.0, 1.0
        episode = run_episode(TabularEnvironment(MDP), policy, (low, high), RANDOM)
        assert episode is not None
        if self.mistake == "reward rounded":
            steps = zip(range(d.horizon), episode.states, episode.actions, strict=False)
            means = np.array([(MDP.r[h, x, a] - low) / (high - low) for h, x, a in steps])
            episode = replace(episode, rewards=np.rint(means).astype(np.int64))
        return None if self.mistake == "no episode" else episode

    def _encode(self, d: BatchDescriptor, slot: int) -> np.typing.NDArray[np.integer[Any]]:
        """Returns a report's symbols, or its vector."""
        layout, noise, episode = d.layout, d.batch_noise, self._episode(d)
        wrong = self.mistake
        if wrong == "step 0 for every step" and d.layer is not None:
            layout = CounterLayout(d.sizes, d.families, 0, d.support)
        if wrong.startswith("start at the") and d.support:
            support = Support(d.support.start, d.support.next[1:] + d.support.next[:1])
            layout, episode = CounterLayout(d.sizes, d.families, 0, support), None
        if wrong == "unreachable states counted" and d.support:
            support = Support(tuple(range(d.states)), d.support.next)
            layout = CounterLayout(d.sizes, d.families, d.layer, support)
        if d.word_bits or not isinstance(noise, Noise):
            return encode(layout, noise, d.padding, episode, RANDOM, d.word_bits)
        if wrong == "noise of half p":
            noise = replace(noise, p_numerator=noise.p_numerator // 2)
        data = np.zeros(0, dtype=np.int64) if episode is None else layout.encode(episode)
        data = self._order(layout, data)
        counts = self._noise(layout, noise, slot)
        dummy = layout.dummy + {"dummy one too large": 1, "dummy one too small": -1}.get(wrong, 0)
        ones = np.concatenate([data, np.repeat(np.arange(layout.counters), counts)])
        report = np.full(d.padding.messages, dummy, dtype=np.int64)
        report[: ones.size] = ones[: report.size]
        return report[:-1] if wrong == "one message fewer" else report

    def _order(self, layout: CounterLayout, data: Ints) -> Ints:
        if self.mistake == "episode sent twice":
            return np.concatenate([data, data])
        if self.mistake == "other order of families":
            sizes = [int(np.prod(shape)) for shape in layout.shapes.values()]
            blocks = np.split(np.arange(layout.counters), np.cumsum(sizes)[:-1])
            return np.concatenate(blocks[::-1]).argsort()[data]
        if self.mistake == "other order of counters":
            table = np.arange(layout.counters).reshape(*layout.shapes["joint"])
            return table.transpose(1, 0, 2, 3, 4).copy().reshape(-1).argsort()[data]
        if self.mistake == "slots filled at random":
            free = np.random.default_rng().integers(layout.counters, size=layout.data_slots)
            return np.concatenate([data, free[data.size :]])
        return data + 1 if self.mistake == "indices from 1" else data

    def _noise(self, layout: CounterLayout, noise: Noise, slot: int) -> Ints:
        C, wrong, seeded = layout.counters, self.mistake, np.random.default_rng(slot)
        counts = draw_counts(C, noise, RANDOM)
        if wrong == "noise reused":
            return self.kept.setdefault("noise", counts)
        if wrong == "noise of a fixed seed":
            return seeded.binomial(noise.bits, noise.p, C)
        if wrong == "poisson noise":
            return np.random.default_rng().poisson(noise.bits * noise.p, C)
        if wrong == "no noise in every other report":
            return counts * (slot % 2)
        zeros = {
            "no noise": slice(None),
            "noise on every other counter": slice(None, None, 2),
            "noise on some steps only": slice(C // 3),
            "no noise on the last counter": slice(C - 1, None),
        }
        counts[zeros.get(wrong, slice(0))] = 0
        if wrong == "noise shared by rewards":
            counts[1::2] = counts[::2]
        return counts

    def _body(
        self, signed: SignedDescriptor, leases: list[dict[str, Any]], plain: list[Any]
    ) -> bytes:
        sealed = [self._seal(signed, report) for report in plain]
        if self.mistake == "one seal for two slots":
            sealed[1] = sealed[0]
        ids = [bytes.fromhex(lease["lease"]) for lease in leases]
        if self.mistake == "lease ids in hexadecimal":
            ids = [lease.hex().encode() for lease in ids]
        if self.mistake == "lease ids of a Guid":
            ids = [UUID(bytes=lease).bytes_le for lease in ids]
        if self.mistake == "lease ids last":
            return b"".join(r + i for i, r in zip(ids, sealed, strict=True))
        return b"".join(i + r for i, r in zip(ids, sealed, strict=True))

    def _digest(self, signed: SignedDescriptor) -> bytes:
        data = signed.descriptor.encode()
        if self.mistake == "descriptor written again":
            data = json.dumps(json.loads(data), separators=(",", ":")).encode()
        label = b"" if self.mistake == "digest without label" else LABEL_DIGEST
        return hashlib.sha256(label + data).digest()

    def _seal(self, signed: SignedDescriptor, report: np.typing.NDArray[Any]) -> bytes:
        d, wrong, digest = self._parse(signed), self.mistake, self._digest(signed)
        batch_key, analyzer = bytes.fromhex(signed.batch_key), bytes.fromhex(d.analyzer_key)
        inner, outer = LABEL_MESSAGE + digest, LABEL_REPORT + digest
        if wrong == "labels exchanged":
            inner, outer = LABEL_REPORT + digest, LABEL_MESSAGE + digest
        if wrong == "label without zero byte":
            inner = LABEL_MESSAGE[:-1] + digest
        if wrong == "no info":
            inner = outer = b""
        if wrong == "inner seal to the batch key":
            analyzer = batch_key
        if wrong == "outer seal to the analyzer":
            batch_key = analyzer
        private = b"\x07" * 32 if wrong in {"one ephemeral key", "one key pair"} else b""
        if d.word_bits:
            vector = report.byteswap() if wrong == "words big-endian" else report
            label = LABEL_MESSAGE if wrong == "mask with another label" else LABEL_MASK
            mask_info = label + digest
            if wrong in {"mask without E", "mask key of 32 bytes", "mask reused"}:
                return seal(batch_key, outer, self._mask(vector, analyzer, mask_info))
            masked = sums.mask(vector, private or os.urandom(32), analyzer, mask_info)
            if wrong == "stream big-endian":
                stream = np.frombuffer(masked[32:], vector.dtype) - vector
                masked = masked[:32] + (vector + stream.byteswap()).tobytes()
            if wrong == "no mask":
                masked = masked[:32] + vector.tobytes()
            return seal(batch_key, outer, masked)
        order = "little" if wrong == "little-endian" else "big"
        count, width = d.symbols.count, d.symbols.width
        if wrong == "width of C - 1" and d.layout.counters == 256:
            width, report = 1, report % 256
        parts = [int(i).to_bytes(width, order) for i in report]  # type: ignore[arg-type]
        if wrong == "bits in the other order":
            parts = [int(f"{part[0]:08b}"[::-1], 2).to_bytes(1, "big") for part in parts]
        texts = [b"".join(parts[i : i + count]) for i in range(0, len(parts), count)]
        aad = b"" if wrong != "aad of messages" else digest
        messages = b"".join(seal(analyzer, inner, text, aad, private) for text in texts)
        return seal(batch_key, outer, messages, digest if wrong == "aad of the report" else b"")

    def _mask(self, vector: np.typing.NDArray[Any], analyzer: bytes, info: bytes) -> bytes:
        own = X25519PrivateKey.generate()
        E = own.public_key().public_bytes_raw()
        secret = own.exchange(X25519PublicKey.from_public_bytes(analyzer))
        size = 32 if self.mistake == "mask key of 32 bytes" else 16
        info += b"" if self.mistake == "mask without E" else E
        key = HKDF(SHA256(), size, None, info).derive(secret)
        cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        stream = np.frombuffer(cipher.update(bytes(vector.nbytes)), vector.dtype)
        if self.mistake == "mask reused":
            stream = np.resize(stream[:8], stream.shape)
        return E + bytes((vector + stream).tobytes())
