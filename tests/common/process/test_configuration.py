"""Settings from a file: the environment wins, and no line is ignored."""

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from riffle.common.process.configuration import RoleSettings
from riffle.common.protocol.errors import LocalError


class Settings(RoleSettings):
    model_config = SettingsConfigDict(env_prefix="P_", frozen=True, extra="forbid")

    port: int = Field(default=1, ge=1)
    names: tuple[str, ...] = ()
    token: str = ""


def load(folder: Path, patch: pytest.MonkeyPatch, text: str) -> Settings:
    file = folder / "settings.env"
    file.write_text(text)
    patch.setenv("P_SETTINGS_FILE", str(file))
    return Settings.load()


def test_a_file_sets_variables_that_the_environment_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P_PORT", "7")
    text = '# ours\n\nP_PORT=5\nexport P_TOKEN="a b"\np_names=["x", "y"]\n'
    result = load(tmp_path, monkeypatch, text)
    assert (result.port, result.token, result.names) == (7, "a b", ("x", "y"))
    monkeypatch.delenv("P_PORT")
    assert load(tmp_path, monkeypatch, text).port == 5
    assert load(tmp_path, monkeypatch, "").port == 1


def test_the_variable_that_names_the_file_ignores_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.env"
    file.write_text("P_PORT=5\n")
    monkeypatch.setenv("p_settings_file", str(file))
    assert Settings.load().port == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("P_TOKEN=x\nP_TOKN=5\n", "line 2: there is no setting P_TOKN; did you mean P_TOKEN"),
        ("\n\nOTHER=5\n", "line 3: there is no setting OTHER$"),
        ("P_SETTINGS_FILE=more\n", "line 1: there is no setting P_SETTINGS_FILE"),
        ("P_PORT\n", "line 1: not understood; give NAME=value"),
        ("= 5\n", "line 1: not understood"),
        ("P_PORT=none\n", "port"),
        ("P_NAMES=x\n", "give JSON"),
    ],
)
def test_wrong_lines_of_a_file_are_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LocalError, match=message) as caught:
        load(tmp_path, monkeypatch, text)
    assert caught.value.slug == "invalid-spec"


def test_an_unreadable_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P_SETTINGS_FILE", "/nowhere")
    with pytest.raises(LocalError, match="cannot read settings file /nowhere"):
        Settings.load()
