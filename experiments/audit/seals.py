"""Sealing that hides nothing and costs nothing, so that an audit can afford 1e5 trials.

Encryption has no part in the guarantee against the analyzer, who opens every message. Only the
HPKE suite behind `common.hpke` is replaced; sizes, framing, batching and opening stay the
product's. Trials with real sealing must agree (`attack.agreement`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from riffle.common import hpke

_TAG = bytes(hpke.OVERHEAD)


class IdentitySuite:
    """Stands for an HPKE suite: the plaintext, and as many zero bytes as a seal adds."""

    def encrypt(self, plaintext: bytes, key: object, info: bytes) -> bytes:
        """The plaintext and OVERHEAD zero bytes."""
        del key, info
        return plaintext + _TAG

    def decrypt(self, ciphertext: bytes, key: object, info: bytes) -> bytes:
        """The plaintext back."""
        del key, info
        return ciphertext[: -hpke.OVERHEAD]


@contextmanager
def identity_seals() -> Iterator[None]:
    """Within this context nothing is encrypted. Never within a process that serves."""
    with patch.object(hpke, "_SUITE", IdentitySuite()):
        yield
