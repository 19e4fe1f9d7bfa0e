"""The signatures of a descriptor (Ed25519), and the ids of public keys and batches."""

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from riffle.common.protocol.errors import RemoteError

LABEL_DEPOSIT = b"riffle v1 deposit\x00"
LABEL_COUNTERSIGN = b"riffle v1 countersign\x00"
LABEL_KEY_ID = b"riffle v1 key id\x00"
LABEL_BATCH_ID = b"riffle v1 batch id\x00"


def key_id(public: bytes) -> str:
    """Returns a public key's id: 16 bytes of SHA-256 over a label and the key, hex."""
    return hashlib.sha256(LABEL_KEY_ID + public).hexdigest()[:32]


def batch_id(run_id: str, deployment: int) -> str:
    """Returns a deployment's batch id. The id never changes, so a retry makes no second batch."""
    data = LABEL_BATCH_ID + bytes.fromhex(run_id) + deployment.to_bytes(8, "big")
    return hashlib.sha256(data).hexdigest()[:32]


def public_key(private_key: bytes) -> bytes:
    """Returns the public half of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def sign(private_key: bytes, message: bytes) -> str:
    """Returns the hexadecimal signature of a message that already begins with its label."""
    return Ed25519PrivateKey.from_private_bytes(private_key).sign(message).hex()


def sign_deposit(private_key: bytes, data: bytes) -> str:
    """Returns the coordinator's signature over a descriptor's bytes, hex."""
    return sign(private_key, LABEL_DEPOSIT + data)


def countersign(private_key: bytes, digest: bytes, batch_key: bytes) -> str:
    """Returns the shuffler's signature over a descriptor's digest and its batch key, hex."""
    return sign(private_key, LABEL_COUNTERSIGN + digest + batch_key)


def verify_deposit(public_key: bytes, data: bytes, signature: str) -> None:
    """Raises RemoteError ``bad-signature`` unless the coordinator signed ``data``."""
    _verify(public_key, LABEL_DEPOSIT + data, signature, "coordinator")


def verify_countersign(public_key: bytes, digest: bytes, batch_key: bytes, signature: str) -> None:
    """Raises RemoteError ``bad-signature`` unless the shuffler signed this digest and batch key."""
    _verify(public_key, LABEL_COUNTERSIGN + digest + batch_key, signature, "shuffler")


def _verify(public_key: bytes, message: bytes, signature: str, role: str) -> None:
    try:
        data = bytes.fromhex(signature)
        # `bytes.fromhex` also accepts blanks and capitals. Such text becomes b"" and is refused.
        data = data if data.hex() == signature else b""
        Ed25519PublicKey.from_public_bytes(public_key).verify(data, message)
    except (InvalidSignature, ValueError) as error:
        detail = f"the {role}'s signature of the descriptor does not verify"
        raise RemoteError("bad-signature", detail) from error
