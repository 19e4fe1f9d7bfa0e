"""A folder belongs to one command, and its processes, at a time."""

import subprocess
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import LOCK, is_locked, lock_folder
from tests.deploy.cli.calls import riffle

WORDS = (
    ("up",),
    ("compare",),
    ("load", "--nodes", "1", "--rate", "1", "--duration", "1"),
    ("sweep", "adversarial-full", "--quick"),
)


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_a_folder_in_use_is_not_touched(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with lock_folder(tmp_path):
        before = contents(tmp_path)
        result = riffle(*words, "--out", str(tmp_path), "--force")
        assert contents(tmp_path) == before
    assert result.exit_code == 4
    assert f"{tmp_path} is in use" in result.stderr
    assert "choose another --out" in result.stderr


@pytest.mark.parametrize("below", [".", "deeper/yet"])
@pytest.mark.parametrize("words", [*WORDS, ("network", "init")], ids=lambda words: words[0])
def test_a_file_where_a_folder_is_needed_is_reported(
    tmp_path: Path, words: tuple[str, ...], below: str
) -> None:
    file = tmp_path / "afile"
    file.write_text("mine")
    folder = str(file / below)
    result = riffle(*words, *([folder] if words[0] == "network" else ["--out", folder]))
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1] == (
        f"riffle: {file} is a file where a folder is needed; move it away, or choose another folder"
    )
    assert file.read_text() == "mine"


def test_a_second_network_leaves_the_first_as_it_is(tmp_path: Path) -> None:
    config = LoopbackConfig(tmp_path, "RiverSwim-v0", nodes=0, workers=1)
    with LoopbackNetwork(config) as network:
        secrets = str(network.secrets)
        (tmp_path / "summary.json").write_text("{}")
        before = contents(network.secrets)
        forced = ("--out", str(tmp_path), "--force")
        for words in (("up",), ("run", "--network", secrets)):
            result = riffle(*words, *forced)
            assert result.exit_code == 4
            assert "is in use" in result.stderr
        assert contents(network.secrets) == before
        assert (tmp_path / "summary.json").exists()
        assert riffle("list", "--network", secrets).exit_code == 0
    with lock_folder(tmp_path):
        pass


def test_a_lock_lasts_as_long_as_a_process_that_holds_it(tmp_path: Path) -> None:
    with lock_folder(tmp_path) as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    try:
        with pytest.raises(LocalError, match="is in use") as caught, lock_folder(tmp_path):
            pass
        assert caught.value.slug == "unavailable"
        assert f"(processes {child.pid})" in caught.value.detail
    finally:
        child.kill()
        child.wait()
    with lock_folder(tmp_path):
        assert contents(tmp_path) == {tmp_path / LOCK: b""}


def test_a_locked_folder_is_recognized_without_touching_it(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "missing")
    assert contents(tmp_path) == {}
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path), "the file stays, the lock does not"
