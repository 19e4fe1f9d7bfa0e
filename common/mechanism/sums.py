"""The sums mechanism: the shuffler adds masked vectors, and the analyzer removes the masks.

Data and noise are as in `shuffle_model`. But a report is one masked vector, which costs one key
agreement instead of one for each message. Words have w bits, and all additions are modulo 2^w.

- A user writes data plus noise as a vector of C words, one for each counter. A fresh X25519 key
  pair (private e, public E) gives the user a secret in common with the analyzer. HKDF turns this
  secret into a key, and AES-CTR turns the key into a mask of C words. The report is E, then vector
  plus mask.
- The shuffler adds the masked vectors of all n users and permutes their n keys E.
- The analyzer computes the mask of each E and subtracts it from the sum. The sum of the users'
  vectors remains.

Privacy. The analyzer sees n random keys and one sum. The sum is a function of the C noisy counts,
so the accountant's (epsilon, beta) for these counts holds. The shuffler sees masked vectors, which
are pseudorandom to it. Shuffler and analyzer together can read every vector. The proof needs four
facts:

1. *One sum a batch*, over all n reports. Two sums over sets that differ in one user would reveal
   that user's vector. The analyzer can use a sum even if some reports are bad, because any 32 bytes
   count as a key E and have a mask.
2. *A fresh key pair for every report*. Two vectors under one mask would show their difference.
3. *No copies.* The shuffler refuses a second report with the same E, because a copied report would
   count a user twice.
4. *Independent binomial noise*, as in `shuffle_model`. No padding drops any of it.

The sum of n users' data and noise must stay below 2^w. Words have room for noise of up to
`DEVIATIONS` standard deviations above its mean; beta pays for larger noise.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from riffle.common.mechanism.counters import CounterLayout, Episode
from riffle.common.mechanism.parameters import Noise
from riffle.common.mechanism.randomness import Randomness, draw_counts

Vector = npt.NDArray[np.integer[Any]]
Words = npt.NDArray[np.unsignedinteger[Any]]
Octets = bytes | bytearray | memoryview

KEY_BYTES = 32
AES_KEY_BYTES = 16
DEVIATIONS = 12


def word_bits(n: int, noise: Noise) -> int:
    """Returns the word size w: 16 bits if n users' data and noise fit, and otherwise 32 bits.

    The comparison is exact, so all roles agree. Raises ValueError if 32 bits are too few.
    """
    scale = 1 << noise.p_log2
    mean = n * noise.bits * noise.p_numerator  # all in units of 1 / scale
    variance = mean * (scale - noise.p_numerator)
    for bits in (16, 32):
        room = (((1 << bits) - 1 - n) << noise.p_log2) - mean
        if room >= 0 and room**2 >= DEVIATIONS**2 * variance:
            return bits
    raise ValueError(f"the counts of n={n} reports with this noise do not fit 32-bit words")


def report_bytes(counters: int, bits: int) -> int:
    """Returns the size of a report without its outer seal: the key E and one word per counter."""
    return KEY_BYTES + counters * bits // 8


def release_bytes(n: int, counters: int, bits: int) -> int:
    """Returns the size of what the shuffler hands over: a sum of `counters` words, then n keys."""
    return counters * bits // 8 + n * KEY_BYTES


def encode(
    layout: CounterLayout, noise: Noise, bits: int, episode: Episode | None, randomness: Randomness
) -> Words:
    """The user's part, first step: returns data plus noise as a vector of one word per counter.

    If the environment failed, ``episode`` is None, and the vector is noise only.
    """
    vector = draw_counts(layout.counters, noise, randomness)
    if episode is not None:
        vector[layout.encode(episode)] += 1
    return vector.astype(_words(bits))


def mask(vector: Vector, private_key: bytes, analyzer_key: bytes, info: bytes) -> bytes:
    """The user's second step: returns the report, which is the public key E and the masked vector.

    ``private_key`` (32 bytes) is fresh from the CSPRNG. ``info`` names the batch. Raises ValueError
    if the analyzer's key is a point of low order: then the mask would hide nothing.
    """
    private = X25519PrivateKey.from_private_bytes(private_key)
    own = private.public_key().public_bytes_raw()
    secret = private.exchange(X25519PublicKey.from_public_bytes(analyzer_key))
    return own + (vector + _mask(secret, info + own, vector)).tobytes()


def add(total: Words, reports: Octets) -> bytes:
    """The shuffler's part, first step: adds concatenated reports to ``total`` (C,) in place.

    Returns the reports' keys E, concatenated. Raises ValueError if the last report is not whole.
    """
    rows = np.frombuffer(reports, dtype=np.uint8).reshape(-1, KEY_BYTES + total.nbytes)
    vectors = rows[:, KEY_BYTES:].view(total.dtype)
    total += np.add.reduce(vectors, axis=0, dtype=total.dtype)
    return rows[:, :KEY_BYTES].tobytes()


def empty_sum(counters: int, bits: int) -> Words:
    """Returns a sum (C,) to which no vector was added yet: zeros."""
    return np.zeros(counters, dtype=_words(bits))


def split_release(released: Octets, counters: int, bits: int) -> tuple[Words, memoryview]:
    """Splits what the shuffler handed over: the sum (counters,) and the users' public keys."""
    view, size = memoryview(released), counters * bits // 8
    return np.frombuffer(view[:size], dtype=_words(bits)), view[size:]


def add_masks(private_key: bytes, info: bytes, keys: Octets, counters: int, bits: int) -> Words:
    """The analyzer's part: returns the summed masks of users whose public keys are in ``keys``.

    Every key has a mask, even a point of low order. Raises ValueError if the last key is not whole.
    """
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are not a whole number of {KEY_BYTES}-byte keys")
    private, total = X25519PrivateKey.from_private_bytes(private_key), empty_sum(counters, bits)
    for start in range(0, len(keys), KEY_BYTES):
        key = bytes(keys[start : start + KEY_BYTES])
        try:
            secret = private.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError:  # a point of low order
            secret = bytes(KEY_BYTES)
        total += _mask(secret, info + key, total)
    return total


def _mask(secret: bytes, info: bytes, like: Vector) -> Vector:
    """Returns a secret's mask, shaped like ``like``. ``info`` names batch and user key."""
    key = HKDF(SHA256(), AES_KEY_BYTES, None, info).derive(secret)
    keystream = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(keystream.update(bytes(like.nbytes)), dtype=like.dtype)


def _words(bits: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"<u{bits // 8}")
