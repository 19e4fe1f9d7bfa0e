"""A folder of results and of a network is one command's at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import LocalError

LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """Keep ``folder``, made where it is missing, from everybody else while the block lasts.

    Yields the descriptor of the lock. Processes that inherit it hold the lock too: the kernel lets
    go of it when the last of them is gone, however it ended. The empty file `LOCK` stays.

    Raises:
        LocalError: ``unavailable``, it is somebody else's; nothing in it was touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LocalError(
                "unavailable",
                f"{folder} is in use: a network is up in it, or another command writes there; "
                "stop it, or choose another --out",
            ) from None
        yield file.fileno()
