"""Environments by id: sizes, did-you-mean, files, Gymnasium's interface."""

import json
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.gymnasium import GymnasiumEnvironment
from riffle.node_client.environments.registry import environment_names, exact_mdp, make
from riffle.node_client.environments.tabular import layered_mdp, riverswim
from riffle.node_client.episode import play


@pytest.mark.parametrize("name", [name for name in environment_names() if name != "File-v0"])
def test_every_environment_runs_with_its_defaults(name: str) -> None:
    environment = make(name)
    s = environment.sizes
    policy = np.zeros((s.H, s.X), dtype=np.int64)
    episode = play(environment, policy, environment.reward_range, SystemRandomness())
    assert episode.states.shape == (s.H + 1,)
    assert exact_mdp(environment).sizes == s


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("riverswim", {}, "did you mean 'RiverSwim-v0'?"),
        ("Bandit-v1", {}, "did you mean 'Bandit-v0'?"),
        ("Chess-v0", {}, "known are Bandit-v0"),
        ("Chess-v0", {}, "Gymnasium's, such as gymnasium:FrozenLake-v1"),
        ("FrozenLake-v1", {}, "did you mean 'gymnasium:FrozenLake-v1'?"),
        ("RiverSwim-v0", {"foo": 3}, "there is no parameter 'foo'; known are states, horizon"),
        ("gymnasium:FrozenLake-v1", {"map": 8}, "unexpected keyword argument 'map'"),
        ("gymnasium:CliffWalking-v1", {}, "from -100 to -1, which is outside [0, 1]: declare them"),
        ("gymnasium:CliffWalking-v1", {}, "--param reward_low=-100 --param reward_high=-1"),
        ("gymnasium:CartPole-v1", {}, "docs/own.md shows a wrapper that discretises a Box"),
        ("RiverSwim-v0", {"actions": 3}, "has 2 actions here, not 3"),
        ("RiverSwim-v0", {"states": 1}, "at least 2 states"),
        ("SpectrumAccess-v0", {"chanels": 2}, "did you mean 'channels'?"),
        ("SpectrumAccess-v0", {"channels": 1}, "2 to 6 channels"),
        ("Bandit-v0", {"horizon": 2}, "has 1 horizon here"),
        ("Bandit-v0", {"sigma": -1.0}, "sigma >= 0"),
        ("Bandit-v0", {"means": []}, "arms"),
        ("RandomMDP-v0", {"states": 0}, "at least 1"),
        ("LayeredMDP-v0", {"widths": "1-3"}, "layers must have sizes such as"),
        ("LayeredMDP-v0", {"widths": "one-3-1"}, "widths must be such as 1-3-3-1, not 'one-3-1'"),
        ("LayeredMDP-v0", {"widths": 5}, "widths: Input should be a valid string, not 5"),
        ("LayeredMDP-v0", {"horizon": 6}, "has 4 horizon here"),
        ("RiverSwim-v0", {"states": "four"}, "states: Input should be a valid integer, not 'four'"),
        ("RiverSwim-v0", {"states": 2.5}, "states: Input should be a valid integer, not 2.5"),
        ("Bandit-v0", {"means": [0.5, "x"]}, "means.1: Input should be a valid number"),
        ("File-v0", {}, "path: Missing required argument"),
        ("gymnasium:Nothing-v0", {}, "gymnasium"),
    ],
)
def test_a_wrong_request_is_explained(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(LocalError) as caught:
        make(name, **parameters)
    assert caught.value.slug == "invalid-spec"
    assert says in caught.value.detail


def test_sizes_may_be_repeated_and_none_counts_as_not_given() -> None:
    assert make("RiverSwim-v0", states=5, actions=2, horizon=None).sizes == Sizes(5, 2, 6)
    assert make("Bandit-v0", states=1, actions=3, horizon=1).sizes == Sizes(1, 3, 1)


def test_the_seed_determines_a_random_mdp() -> None:
    one, same, other = (exact_mdp(make("RandomMDP-v0", seed=seed)) for seed in (1, 1, 2))
    assert np.array_equal(one.P, same.P)
    assert not np.array_equal(one.P, other.P)


def test_layered_mdps_have_the_requested_layers() -> None:
    assert make("LayeredMDP-v0").sizes == Sizes(3, 2, 4)
    one = exact_mdp(make("LayeredMDP-v0", widths="1-2-4-1", actions=3, seed=5))
    assert np.array_equal(one.P, layered_mdp((1, 2, 4, 1), 3, 5).P)


def test_an_mdp_from_a_file(tmp_path: Path) -> None:
    mdp = riverswim(3, 4)
    whole = {"P": mdp.P.tolist(), "r": mdp.r.tolist(), "d1": mdp.d1.tolist()}
    short = {"horizon": 4, "P": mdp.P[0].tolist(), "r": mdp.r[0].tolist(), "d1": [1, 0, 0]}
    for document in (whole, short):
        (tmp_path / "mdp.json").write_text(json.dumps(document))
        loaded = exact_mdp(make("File-v0", path=str(tmp_path / "mdp.json"), states=3))
        assert np.array_equal(loaded.P, mdp.P)
        assert np.array_equal(loaded.r, mdp.r)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"extra": 1}, "extra"),
        ({"horizon": 0}, "horizon"),
        ({"horizon": 2**64}, "horizon"),
        ({"horizon": None}, "dimensions"),
        ({"P": [[1.0], [0.5, 0.5]]}, "mdp.json"),
        ({"d1": [0.5, 0.2, 0.2]}, "distribution"),
        ({"d1": "x"}, "d1"),
        ({"r": [[10**400, 0], [0, 0], [0, 0]]}, "too large"),
        (
            {"r": [[1, 2], [0, 0], [0, 0]]},
            r"r\[0, 0, 1\] is 2; reward means must lie in \[0, 1\]: scale",
        ),
        ({"P": [[[0.5, 0, 0]] * 2] * 3}, r"P\[0, 0, 0\] is \[0.5 0. 0. \]; a distribution has no"),
    ],
)
def test_a_wrong_file_is_explained(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    mdp = riverswim(3, 2)
    document = {"horizon": 2, "P": mdp.P[0].tolist(), "r": mdp.r[0].tolist(), "d1": [1, 0, 0]}
    (tmp_path / "mdp.json").write_text(json.dumps(document | changes))
    with pytest.raises(LocalError, match=says):
        make("File-v0", path=str(tmp_path / "mdp.json"))


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"nowhere\.json"):
        make("File-v0", path=str(tmp_path / "nowhere.json"))


class Corridor:
    """Has Gymnasium's interface: states 5..7, actions 1..2; action 2 moves on, state 7 ends."""

    observation_space = types.SimpleNamespace(n=np.int64(3), start=np.int64(5))
    action_space = types.SimpleNamespace(n=np.int64(2), start=np.int64(1))

    def __init__(self, truncate: bool = False) -> None:
        self.seeds: list[int | None] = []
        self._truncate = truncate
        self._x = 5

    def reset(self, *, seed: int | None = None) -> tuple[np.int64, dict[str, Any]]:
        self.seeds.append(seed)
        self._x = 5
        return np.int64(5), {}

    def step(self, action: int, /) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        self._x += action - 1
        over = self._x == 7
        return np.int64(self._x), 2.0, over and not self._truncate, over and self._truncate, {}


@pytest.mark.parametrize("truncate", [False, True])
def test_a_gymnasium_environment_is_adapted(truncate: bool) -> None:
    native = Corridor(truncate)
    environment = GymnasiumEnvironment(native, horizon=4, low=0.0, high=2.0)
    assert environment.sizes == Sizes(X=4, A=2, H=4)
    policy = np.ones((4, 4), dtype=np.int64)
    episode = play(environment, policy, (0.0, 2.0), SystemRandomness())
    assert episode.states.tolist() == [0, 1, 3, 3, 3]
    assert episode.rewards.tolist() == [1, 1, 0, 0]
    with pytest.raises(LocalError, match="no known MDP"):
        exact_mdp(environment)


def test_a_gymnasium_environment_is_seeded_by_the_randomness_given() -> None:
    native = Corridor()
    environment = GymnasiumEnvironment(native, 4, 0.0, 2.0)
    for source in (SystemRandomness(), SystemRandomness()):
        environment.reset(source)
    environment.reset(SeededRandomness.keyed(1, "a"))
    environment.reset(SeededRandomness.keyed(1, "a"))
    assert native.seeds[0] != native.seeds[1]
    assert native.seeds[2] == native.seeds[3]


def test_gymnasium_by_id_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> Corridor:
        if name != "Corridor-v0":
            raise KeyError(name)
        return Corridor()

    monkeypatch.setitem(sys.modules, "gymnasium", types.SimpleNamespace(make=unknown))
    environment = make("gymnasium:Corridor-v0", horizon=5, reward_high=2.0)
    assert environment.sizes.H == 5
    assert environment.reward_range == (0.0, 2.0)
    with pytest.raises(LocalError, match="cannot make 'Other-v0'"):
        make("gymnasium:Other-v0")
    native = Corridor()
    monkeypatch.setattr(native, "observation_space", "Box(3,)")
    with pytest.raises(LocalError, match="must be Discrete"):
        GymnasiumEnvironment(native, 4, 0.0, 1.0)


def test_an_environment_from_a_file_is_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from riffle.node_client.environments.registry import make as known\n"
        "def make(states=4):\n    return known('RiverSwim-v0', states=states, horizon=2)\n"
    )
    environment = make("mine.py:make", folder=str(tmp_path), states=3)
    assert environment.sizes == Sizes(X=3, A=2, H=2)
    with pytest.raises(
        LocalError, match=r"mine\.py:make: there is no parameter 'state'; did you mean"
    ):
        make("mine.py:make", folder=str(tmp_path), state=3)
    with pytest.raises(LocalError, match="has 2 horizon here, not 3"):
        make("mine.py:make", folder=str(tmp_path), horizon=3)
    with pytest.raises(LocalError, match="no Python file"):
        make("mine.py:make", folder=str(tmp_path / "other"))


def test_another_packages_environment_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = "riffle.node_client.environments.registry:_riverswim"
    offered = EntryPoint("Mine-v0", value, "riffle.environments")
    monkeypatch.setattr("riffle.common.process.plugins.entry_points", lambda group: [offered])
    assert make("Mine-v0", states=5).sizes.X == 5
    with pytest.raises(LocalError, match=r"did you mean 'Mine-v0'\? known are Bandit-v0"):
        make("Mime-v0")
