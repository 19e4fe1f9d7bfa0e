"""File-v0: an MDP from a JSON file.

The file is one object: ``P`` (H, X, A, X), ``r`` (H, X, A), ``d1`` (X,) as nested lists. With
``horizon`` in it, ``P`` (X, A, X) and ``r`` (X, A) are repeated at every step. Unknown fields are
refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from riffle.common.descriptor import MAX_HORIZON, Document, first_fault
from riffle.common.errors import LocalError
from riffle.node_client.environments.tabular import TabularMDP

MAX_FILE_BYTES = 256 << 20


class MDPDocument(Document):
    """The file as read; `TabularMDP` checks shapes and sums."""

    horizon: int | None = Field(default=None, ge=1, le=MAX_HORIZON)
    P: list[Any]
    r: list[Any]
    d1: list[float]

    def mdp(self) -> TabularMDP:
        """The MDP.

        Raises:
            ValueError: lists are ragged, shapes disagree, or a distribution does not sum to one.
        """
        P, r = np.array(self.P, dtype=np.float64), np.array(self.r, dtype=np.float64)
        if self.horizon is not None:
            P, r = (np.repeat(part[None], self.horizon, axis=0) for part in (P, r))
        if P.ndim != 4:
            raise ValueError(f"P has {P.ndim} dimensions, not 4; a stationary MDP needs 'horizon'")
        return TabularMDP(P, r, np.array(self.d1))


def load(path: str | Path) -> TabularMDP:
    """Read an MDP.

    Raises:
        LocalError: ``invalid-spec``: the file is missing, too large, or not such an MDP.
    """
    file = Path(path)
    try:
        return MDPDocument.model_validate_json(_bounded(file)).mdp()
    except ValidationError as error:
        raise LocalError("invalid-spec", f"MDP file {file}: {first_fault(error)}") from error
    except (MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
        raise LocalError("invalid-spec", f"MDP file {file}: {error}") from error


def _bounded(file: Path) -> bytes:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return file.read_bytes()
