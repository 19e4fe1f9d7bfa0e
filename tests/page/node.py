"""A node worked by hand: it leases and uploads just what a test says, and not always what is right.

Its reports are padding only (an episode that failed), or, `garbled`, sealed to the shuffler as they
must be while the analyzer can open none of their messages.
"""

import json
import os
import secrets
from collections.abc import Sequence
from typing import Self

import httpx
import numpy as np

from riffle.common.protocol.descriptor import SignedDescriptor, parse
from riffle.common.protocol.hpke import OVERHEAD, seal
from riffle.common.protocol.wire import OCTETS, LeaseReply, LeaseRequest, UploadReply, frame
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.node_client.sealing import SealKeys, seal_reports


class HandNode:
    """One enrolled node's credential, and what it sends to one batch."""

    def __init__(self, network: LoopbackNetwork, batch_id: str) -> None:
        credentials = json.loads((network.secrets / "nodes" / "credentials.json").read_text())
        bearer = {"Authorization": f"Bearer {credentials[0]['token']}"}
        self._client = httpx.Client(base_url=network.shuffler_url, headers=bearer, trust_env=False)
        self._path = f"/v1/batches/{batch_id}"
        signed = SignedDescriptor.model_validate_json(self._get(self._path))
        self._context = parse(signed.descriptor.encode())
        self._keys = SealKeys.of(self._context, bytes.fromhex(signed.batch_key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def lease(self, count: int) -> list[str]:
        """Lease ids of so many invented users."""
        users = tuple(secrets.token_hex(16) for _ in range(count))
        body = LeaseRequest(users=users).model_dump_json()
        answer = self._client.post(f"{self._path}/leases", content=body).raise_for_status()
        return [one.lease for one in LeaseReply.model_validate_json(answer.content).leases]

    def report(self) -> bytes:
        """A sealed report of dummies."""
        dummies = np.full(self._keys.messages, self._context.descriptor.layout.counters)
        return seal_reports(self._keys, dummies[None])

    def garbled(self) -> bytes:
        """A report of the right size whose messages nobody can open."""
        size = self._keys.messages * (self._keys.symbols.width + OVERHEAD)
        return seal(self._keys.batch_key, self._keys.report_info, os.urandom(size))

    def noise(self) -> bytes:
        """Bytes of a report's size that are sealed to nobody."""
        return os.urandom(len(self.garbled()))

    def send(self, frames: Sequence[tuple[str, bytes]]) -> list[str]:
        """Upload; the outcome of each frame."""
        body = b"".join(frame(lease, sealed) for lease, sealed in frames)
        kind = {"Content-Type": OCTETS}
        answer = self._client.post(f"{self._path}/reports", content=body, headers=kind)
        reply = UploadReply.model_validate_json(answer.raise_for_status().content)
        return [one.outcome for one in reply.results]

    def _get(self, path: str) -> bytes:
        return self._client.get(path).raise_for_status().content
