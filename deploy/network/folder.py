"""A folder of results and of a network is one command's at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from riffle.common.protocol.errors import LocalError

LOCK = ".lock"
PROC = Path("/proc")


def made(folder: Path) -> Path:
    """The folder, made where it is missing.

    Raises:
        LocalError: ``wrong-state``, a file has its name, or that of a folder around it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        around = (folder, *folder.parents)
        file = next((one for one in around if os.path.lexists(one) and not one.is_dir()), folder)
        raise LocalError(
            "wrong-state",
            f"{file} is a file where a folder is needed; move it away, or choose another folder",
        ) from None
    return folder


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """Keep ``folder``, made where it is missing, from everybody else while the block lasts.

    Yields the descriptor of the lock. Processes that inherit it hold the lock too: the kernel lets
    go of it when the last of them is gone, however it ended. The empty file `LOCK` stays.

    Raises:
        LocalError: ``unavailable``, it is somebody else's; nothing in it was touched. As `made`.
    """
    lock = made(folder) / LOCK
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LocalError(
                "unavailable",
                f"{folder} is in use: a network is up in it, or another command writes there"
                f"{_holders(lock)}; stop it, or choose another --out",
            ) from None
        yield file.fileno()


def held(folder: Path) -> bool:
    """Whether somebody keeps ``folder``, as by `claimed`, now; no file is made or changed."""
    try:
        with (folder / LOCK).open("rb") as file:  # shared: two that look do not see each other
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody ever did, or it is not for us to see
        return False
    return False


def _holders(lock: Path) -> str:
    """The processes to stop, where we may see them: a network outlives a command that is killed."""
    found = set()
    for held in PROC.glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if held.samefile(lock):
                found.add(int(held.parts[2]))
    numbers = ", ".join(map(str, sorted(found - {os.getpid()})))
    return f" (processes {numbers})" if numbers else ""
