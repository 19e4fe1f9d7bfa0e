"""Pinned keys in a file."""

from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import read_pins

ONE, TWO = "ab" * 32, "cd" * 32


def test_without_a_file_nothing_is_pinned() -> None:
    assert read_pins(None) is None


def test_pins_are_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "pins"
    file.write_text(f"# keys\n{ONE}\n\n")
    assert read_pins(file) == frozenset({ONE})
    file.write_text(f"{ONE} # old\n {TWO}")
    assert read_pins(file) == frozenset({ONE, TWO})


@pytest.mark.parametrize("text", ["", "# none\n", "ab", ONE.upper(), f"{ONE} {TWO}", "\xe9" * 64])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pins"
    file.write_text(text)
    with pytest.raises(LocalError, match=r"pins|64 hex digits"):
        read_pins(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot read the pins"):
        read_pins(tmp_path / "nowhere")
