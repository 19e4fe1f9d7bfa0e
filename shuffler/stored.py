"""Reports as they lie in the store: out of their outer seals, under a key of their batch's secret.

A report's outer seal is opened once, when it comes, so that none is kept that does not open. The
reports kept of an upload are then encrypted together, AES-256-GCM, under a key that follows from
the batch's secret. So erasing the secret leaves what a database's pages and logs hold as unreadable
as the outer seals would be, and the hand-over has no elliptic-curve work left.
"""

from collections.abc import Sequence

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from riffle.common.at_rest import AtRest, is_sealed
from riffle.common.errors import LocalError
from riffle.common.hpke import OVERHEAD, SealBroken, open_sealed
from riffle.shuffler.vault import KEY_BYTES, BatchSecret

LABEL_STORED = b"riffle v1 stored reports\x00"


class Stored:
    """Encrypts and decrypts what the store keeps of one batch's reports.

    Its key is HKDF-SHA256 of the whole secret under a label of its own, so that it says nothing of
    the keys that open outer seals and draw the permutation, nor they of it.
    """

    def __init__(self, batch_id: str, secret: BatchSecret) -> None:
        derive = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=LABEL_STORED)
        self._at_rest = AtRest(derive.derive(secret.outer.private + secret.permutation))
        self._batch_id = batch_id
        self._outer = secret.outer.private

    def encrypt(self, slots: Sequence[int], reports: bytes) -> bytes:
        """What to store for the reports on these slots, end to end."""
        return self._at_rest.seal(reports, self._name(slots))

    def decrypt(self, slots: Sequence[int], kept: bytes, info: bytes) -> bytes:
        """The reports; one that a version before `stored` keeps is under its outer seal.

        Raises:
            LocalError: they are damaged, or not of these slots.
        """
        try:
            if not is_sealed(kept) and len(slots) == 1 and len(kept) > OVERHEAD:
                return open_sealed(self._outer, info, kept)
            return self._at_rest.open(kept, self._name(slots))
        except (LocalError, SealBroken) as error:
            detail = "stored reports, or their secret, are damaged; none is released"
            raise LocalError("internal", detail) from error

    def _name(self, slots: Sequence[int]) -> str:
        return f"reports of batch {self._batch_id} on slots {slots[0]} to {slots[-1]}"
