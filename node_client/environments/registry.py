"""Environments by id: ``make("RiverSwim-v0", states=4, horizon=6)``.

Ids are ``Name-v0``; ``gymnasium:<id>`` reaches any Gymnasium environment with discrete spaces. The
sizes ``states``, ``actions``, ``horizon`` may be given for every id: where an environment does not
let them be chosen, they must be what it has.
"""

import difflib
import inspect
from collections.abc import Callable
from functools import partial

import numpy as np

from common.counters import Sizes
from common.errors import LocalError
from node_client.environments.bandit import BanditEnvironment, global_means
from node_client.environments.environment import Environment, Modelled
from node_client.environments.file import load
from node_client.environments.gymnasium_adapter import make_gymnasium
from node_client.environments.random_mdp import random_mdp
from node_client.environments.spectrum import spectrum_access
from node_client.environments.tabular import TabularEnvironment, TabularMDP, riverswim

GYMNASIUM = "gymnasium:"
_SIZES = frozenset({"states", "actions", "horizon"})
Parameter = int | float | str | list[float]


def make(name: str, **parameters: Parameter | None) -> Environment:
    """A fresh environment; parameters that are None are as if not given.

    Raises:
        LocalError: ``invalid-spec``: unknown id or parameter (with the nearest that exists), a
            value out of range, or sizes that this environment does not have.
    """
    builder = _builder(name)
    given = {key: value for key, value in parameters.items() if value is not None}
    accepted = set(inspect.signature(builder).parameters)
    sizes = {key: value for key, value in given.items() if key in _SIZES}
    chosen = {key: value for key, value in given.items() if key in accepted}
    for key in given.keys() - accepted - sizes.keys():
        raise LocalError(
            "invalid-spec", f"{name} has no parameter {key!r}{_nearest(key, sorted(accepted))}"
        )
    try:
        environment: Environment = builder(**chosen)
    except (TypeError, ValueError) as error:
        raise LocalError("invalid-spec", f"{name}: {error}") from error
    _check_sizes(name, environment.sizes, sizes)
    return environment


def exact_mdp(environment: Environment) -> TabularMDP:
    """The population's MDP, for exact values and population-level simulation.

    Raises:
        LocalError: ``invalid-spec``: this environment can be sampled only.
    """
    if not isinstance(environment, Modelled):
        raise LocalError("invalid-spec", "this environment has no known MDP; it can be run only")
    return environment.mdp


def names() -> list[str]:
    """Ids of the built-in environments."""
    return sorted(_BUILDERS)


def _riverswim(states: int = 4, horizon: int = 6) -> Environment:
    return TabularEnvironment(riverswim(states, horizon))


def _bandit(
    actions: int = 20, sigma: float = 0.1, seed: int = 0, means: list[float] | None = None
) -> Environment:
    arms = global_means(actions, seed) if means is None else np.array(means, dtype=np.float64)
    return BanditEnvironment(arms, sigma)


def _spectrum(channels: int = 2, horizon: int = 6) -> Environment:
    return TabularEnvironment(spectrum_access(channels, horizon))


def _random(states: int = 4, actions: int = 2, horizon: int = 6, seed: int = 0) -> Environment:
    return TabularEnvironment(random_mdp(Sizes(states, actions, horizon), seed))


def _file(path: str) -> Environment:
    return TabularEnvironment(load(path))


_BUILDERS: dict[str, Callable[..., Environment]] = {
    "RiverSwim-v0": _riverswim,
    "Bandit-v0": _bandit,
    "SpectrumAccess-v0": _spectrum,
    "RandomMDP-v0": _random,
    "File-v0": _file,
}


def _builder(name: str) -> Callable[..., Environment]:
    if name.startswith(GYMNASIUM):
        return partial(make_gymnasium, name.removeprefix(GYMNASIUM))
    if name not in _BUILDERS:
        known = ", ".join(names())
        raise LocalError(
            "invalid-spec",
            f"there is no environment {name!r}{_nearest(name, names())} Known: {known}",
        )
    return _BUILDERS[name]


def _nearest(word: str, known: list[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f"; did you mean {lowered[close[0]]!r}?" if close else "."


def _check_sizes(name: str, sizes: Sizes, wanted: dict[str, Parameter]) -> None:
    has: dict[str, int] = {"states": sizes.X, "actions": sizes.A, "horizon": sizes.H}
    for key, value in wanted.items():
        if has[key] != value:
            raise LocalError("invalid-spec", f"{name} has {has[key]} {key} here, not {value}")
