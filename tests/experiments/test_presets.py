"""Presets: an environment in a file is its name and, as a parameter, its folder."""

from pathlib import Path

import gymnasium
import pytest

from riffle.experiments import presets
from riffle.node_client.environments.registry import make
from tests.deploy.cli.calls import document, riffle

ENVIRONMENT = Path(__file__).parents[2] / "examples" / "own_environment.py"


def test_an_environment_s_file_may_be_in_the_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "make", lambda *_, **__: make("RiverSwim-v0"))
    assert environment_of("/env.py:make") == ("env.py:make", {"folder": "/"})


def test_an_environment_s_id_is_the_name_given_not_a_link_s_target(tmp_path: Path) -> None:
    (tmp_path / "env.py").symlink_to(ENVIRONMENT)
    expected = ("env.py:make", {"folder": str(tmp_path.resolve())})
    assert environment_of(f"{tmp_path}/env.py:make") == expected


def test_an_object_of_gymnasium_has_the_name_of_its_environment() -> None:
    """The outermost class is a wrapper's, which limits the time."""
    assert presets.label_of(gymnasium.make("FrozenLake-v1")) == "FrozenLake-v1"


def environment_of(reference: str) -> tuple[str, dict[str, object]]:
    """Returns the id and the parameters of a preset with this environment."""
    base = presets.preset("demo")
    chosen = presets.customize(base, "sdp-pe", reference, parameters={}, options={}, changes={})
    return chosen.spec.environment, dict(chosen.environment)


@pytest.mark.parametrize(
    ("environment", "learner"), [("Bandit-v0", "sdp-pe"), ("RiverSwim-v0", "ucbvi-shuffle")]
)
def test_auto_chooses_a_learner_by_the_sizes_and_says_why(environment: str, learner: str) -> None:
    base = presets.preset("demo")
    chosen = presets.customize(
        base, presets.AUTO, environment, parameters={}, options={}, changes={}
    )
    assert chosen.spec.learner == learner
    assert "state" in chosen.because
    named = presets.customize(base, learner, environment, parameters={}, options={}, changes={})
    assert named.because == ""
    assert named.spec == chosen.spec


def test_the_papers_constants_declare_nothing_and_run_in_a_simulation() -> None:
    result = riffle("simulate", "--constants", "paper", "--seeds", "1", "--format", "json")
    found = document(result)["constants"]
    assert (found["name"], found["homogeneous"], found["support"]) == ("paper", False, "none")
