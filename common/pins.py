"""Public keys that an owner pinned in a file: 64 hex digits a line, ``#`` begins a comment."""

import re
from pathlib import Path

from riffle.common.errors import LocalError

_KEY = re.compile(r"[0-9a-f]{64}")


def pinned(file: Path | None) -> frozenset[str] | None:
    """The keys in a file as it is now; None without a file: nothing is pinned.

    Raises:
        LocalError: ``invalid-spec``: it cannot be read, has no key or a line that is none.
    """
    if file is None:
        return None
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError("invalid-spec", f"cannot read the pins in {file}: {error}") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    keys = frozenset(line for line in lines if line)
    if not keys or not all(_KEY.fullmatch(key) for key in keys):
        raise LocalError("invalid-spec", f"{file} must hold public keys, 64 hex digits a line")
    return keys
