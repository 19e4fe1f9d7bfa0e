"""The head of a database: a number outside it that reveals an outdated copy.

A transaction that must not be forgotten raises a number in the database. After the commit, and
before anybody relies on the transaction, the number is written into a folder outside the database.
The folder therefore never has a number that the database may still lose. If the database's number
is below the number in the folder, somebody emptied the database or replaced it by an older copy.
If a process is killed between commit and write, its next start writes the number.

The folder holds each number as the name of an empty file, and the highest number counts. Several
processes may therefore share the folder without a lock. A process may have a folder of its own
instead. If changes by other processes after that folder's last number are lost, the folder does not
reveal the loss.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from riffle.common.protocol.errors import LocalError


@dataclass
class HeadFolder:
    """The folder that holds the head of the database ``name``."""

    folder: Path
    name: str

    def written(self) -> int:
        """Returns the highest number in the folder, 0 if there is none. Raises LocalError."""
        try:
            return max(self._numbers(), default=0)
        except OSError as error:
            raise LocalError("unavailable", f"cannot read the head: {error.strerror}") from error

    def write(self, number: int) -> None:
        """Writes a number durably, even if the folder has a higher one. Raises LocalError."""
        try:
            self.file(number).touch(mode=0o600)
            sync_directory(self.folder)
            for lower in [each for each in self._numbers() if each < number]:
                self.file(lower).unlink(missing_ok=True)  # another process may remove it too
        except OSError as error:
            raise LocalError("unavailable", f"cannot write the head: {error.strerror}") from error

    def file(self, number: object) -> Path:
        """Returns the file whose name holds a number."""
        return self.folder / f"{quote(self.name, safe='')}.head.{number}"

    def _numbers(self) -> list[int]:
        files = self.folder.iterdir()
        ends = [file.suffix[1:] for file in files if file == self.file(file.suffix[1:])]
        return [int(end) for end in ends if end.isdecimal()]


def sync_directory(directory: Path) -> None:
    """Makes earlier renames and removals in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
