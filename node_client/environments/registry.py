"""Environments by id: ``make("RiverSwim-v0", states=4, horizon=6)``.

- ``Name-v0`` is one of Riffle's own environments, or another package's entry point in the group
  ``riffle.environments``: a callable that returns an `Environment`.
- ``gymnasium:<id>`` is any Gymnasium environment with discrete spaces.
- ``file.py:make`` is a callable in a Python file. The callable returns an `Environment`. The file's
  folder is not part of the id, because ids are public. The parameter ``folder`` names the folder
  (default: the working directory).
"""

import importlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call

from riffle.common.mechanism.counters import Sizes, Support, possible_cells
from riffle.common.process import plugins
from riffle.common.process.plugins import Constructor
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.node_client.environments.gymnasium import adapt, make_gymnasium
from riffle.node_client.environments.tabular import (
    BanditEnvironment,
    Declaration,
    Declared,
    Environment,
    EpisodeShape,
    Modelled,
    TabularEnvironment,
    TabularMDP,
    global_means,
    layered_mdp,
    load_mdp,
    random_mdp,
    riverswim,
    spectrum_access,
)

Parameter = int | float | str | list[float]
GROUP = "riffle.environments"
GYMNASIUM = "gymnasium:"
FOLDER = "folder"
MEMBERS = ("sizes", "reward_range", "absorbing", "reset", "step")
_SIZES = frozenset({"states", "actions", "horizon"})


def make(reference: object, **values: Parameter | None) -> Environment:
    """Makes a fresh environment. Parameters that are None count as not given.

    ``reference`` is an id. In simulations, it may also be an environment with Riffle's or
    Gymnasium's interface, or a function or class that makes such an environment.

    Raises LocalError ``invalid-spec`` if an id, a parameter or its value is wrong, if the
    environment's sizes are not the given ones, or if an external environment has a mistake.
    """
    given = {key: value for key, value in values.items() if value is not None}
    if isinstance(reference, str):
        name, file = reference, plugins.is_file_reference(reference)
        builder = _builder(name, str(given.pop(FOLDER, ".")) if file else ".")
    else:
        name = str(getattr(reference, "__name__", type(reference).__name__))
        builder = _object_builder(reference)
    accepted = plugins.parameter_names(builder)
    sizes = {key: value for key, value in given.items() if key in _SIZES}
    extra = given.keys() - sizes.keys() if plugins.takes_any_name(builder) else set()
    chosen = {key: value for key, value in given.items() if key in {*accepted, *extra}}
    for key in given.keys() - chosen.keys() - sizes.keys():
        raise LocalError(
            "invalid-spec", f"{name}: {plugins.unknown_name('parameter', key, accepted)}"
        )
    if name in BUILDERS or name.startswith(GYMNASIUM):
        environment = _make_own(name, builder, chosen)
    else:
        environment = make_external(name, builder, chosen)
    X, A, H = environment.sizes.X, environment.sizes.A, environment.sizes.H
    for key, actual in {"states": X, "actions": A, "horizon": H}.items():
        if sizes.get(key, actual) != actual:
            detail = f"{name} has {actual} {key} here, not {sizes[key]}"
            raise LocalError("invalid-spec", detail)
    return environment


def exact_mdp(environment: Environment) -> TabularMDP:
    """Returns an environment's known MDP. Raises LocalError ``invalid-spec`` if there is none."""
    if not isinstance(environment, Modelled):
        raise LocalError(
            "invalid-spec",
            "this environment has no known MDP: it can be simulated with --per-user, not by "
            "population",
        )
    return environment.mdp


def declaration_of(environment: EpisodeShape) -> Declaration:
    """Returns an environment's own declaration or, without one, the declaration of its MDP."""
    if isinstance(environment, Declared):
        return environment.declaration
    return environment.mdp.declaration if isinstance(environment, Modelled) else Declaration()


def environment_names() -> list[str]:
    """Returns the ids of Riffle's own environments and of other packages' environments."""
    return sorted({*BUILDERS, *plugins.entry_points_of(GROUP)})


def _builder(name: str, folder: str) -> Constructor:
    if name.startswith(GYMNASIUM):
        return partial(make_gymnasium, name.removeprefix(GYMNASIUM))
    if plugins.is_file_reference(name):
        return plugins.load_file(str(Path(folder) / name))
    if name in BUILDERS:
        return BUILDERS[name]
    if name in (others := plugins.entry_points_of(GROUP)):
        return plugins.load_entry_point(others[name])
    with suppress(ImportError):
        if name in importlib.import_module("gymnasium").registry:
            text = f"there is no environment {name!r}; did you mean '{GYMNASIUM}{name}'?"
            raise LocalError("invalid-spec", text)
    raise LocalError(
        "invalid-spec",
        f"{plugins.unknown_name('environment', name, environment_names())}; Gymnasium's, such as "
        f"{GYMNASIUM}FrozenLake-v1; and your own, such as file.py:make",
    )


def _object_builder(code: Any) -> Constructor:  # noqa: ANN401
    """Returns a builder around an environment, or around a function or class that makes one."""
    if not callable(code):
        return partial(adapt, code) if hasattr(code, "observation_space") else lambda: code
    if not hasattr(code, "observation_space") and not hasattr(code, "render_mode"):
        return code  # type: ignore[no-any-return]
    return lambda horizon=20, reward_low=0.0, reward_high=1.0, **own: adapt(
        code(**own), horizon, reward_low, reward_high
    )


def _make_own(name: str, builder: Constructor, values: dict[str, Parameter]) -> Environment:
    """Makes an environment of Riffle or Gymnasium; refuses parameters of a wrong type or value."""
    try:
        if name in BUILDERS:
            builder = validate_call(config=ConfigDict(strict=True))(builder)
        environment: Environment = builder(**values)
    except ValidationError as error:
        fault = first_fault(error)
        key = fault.partition(":")[0].partition(".")[0]
        value = f", not {values[key]!r}" if key in values else ""
        raise LocalError("invalid-spec", f"{name}: {fault}{value}") from error
    except (TypeError, ValueError) as error:
        raise LocalError("invalid-spec", f"{name}: {error}") from error
    return environment


def make_external(name: str, maker: Constructor, values: Mapping[str, object]) -> Environment:
    """Makes and checks an external environment.

    Raises LocalError ``invalid-spec`` if ``maker`` raises, or returns no environment.
    """
    try:
        environment: Environment = maker(**values)
        fault = _fault(environment)
    except (RiffleError, MemoryError):  # their texts already say what is wrong
        raise
    except Exception as error:
        place = plugins.describe_error(error, plugins.source_file(maker))
        raise LocalError("invalid-spec", f"{name}: {place}") from error
    if fault:
        raise LocalError("invalid-spec", f"{name} returned a {type(environment).__name__}{fault}")
    return environment


def _fault(environment: Any) -> str | None:  # noqa: ANN401
    """Returns the reason why an object is not an `Environment`, or None if it is one."""
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        advice = "; see GymnasiumEnvironment" if hasattr(environment, "observation_space") else ""
        return f", which is no environment: it has no {', no '.join(missing)}{advice}"
    sizes, absorbing = environment.sizes, environment.absorbing
    if not isinstance(sizes, Sizes):
        return ": its sizes must be Sizes(X, A, H)"
    if not _is_range(environment.reward_range):
        return ": its reward_range must be (low, high), numbers and low < high"
    if absorbing is not None and absorbing != sizes.X - 1:
        return f": its absorbing must be None or the last state, {sizes.X - 1}, not {absorbing!r}"
    if isinstance(environment, Modelled):
        mdp: Any = environment.mdp
        if not isinstance(mdp, TabularMDP) or mdp.sizes != sizes:
            return f": its mdp must be a TabularMDP of {sizes}"
    return _declaration_fault(environment) if isinstance(environment, Declared) else None


def _declaration_fault(environment: Any) -> str | None:  # noqa: ANN401
    """Returns what is wrong with a declaration, or None. Raises the errors of `possible_cells`."""
    declaration: Any = declaration_of(environment)
    if not isinstance(declaration, Declaration):
        return f": its declaration must be a Declaration, not {declaration!r}"
    if declaration.homogeneous not in (True, False, None):
        said = declaration.homogeneous
        return f": its declaration's homogeneous must be True, False or None, not {said!r}"
    if declaration.support is not None:
        try:
            TypeAdapter(Support).validate_python(declaration.support)
        except ValidationError as error:
            return f": its declaration's support: {first_fault(error)}"
        sizes = environment.sizes
        possible_cells(declaration.support, sizes.X, sizes.A, sizes.H)
    return None


def _is_range(ends: object) -> bool:
    match ends:
        case (int() | float() as low, int() | float() as high):
            return -math.inf < low < high < math.inf
    return False


def _riverswim(states: int = 4, horizon: int = 6) -> Environment:
    """RiverSwim: a current to the left; a small reward at the left end, a large one at the
    right."""
    return TabularEnvironment(riverswim(states, horizon), ("left", "right"))


def _bandit(
    actions: int = 20, sigma: float = 0.1, seed: int = 0, means: list[float] | None = None
) -> Environment:
    """A bandit. Each user's mean rewards vary around the arms' means (paper 000, section VI)."""
    arms = global_means(actions, seed) if means is None else np.array(means, np.float64)
    return BanditEnvironment(arms, sigma)


def _spectrum(channels: int = 2, horizon: int = 6) -> Environment:
    """Dynamic spectrum access: a radio chooses its next channel; channels turn busy and idle."""
    return TabularEnvironment(spectrum_access(channels, horizon))


def _random(states: int = 4, actions: int = 2, horizon: int = 6, seed: int = 0) -> Environment:
    """A random MDP, drawn from ``seed``."""
    return TabularEnvironment(random_mdp(Sizes(states, actions, horizon), seed))


def _layered(widths: str = "1-3-3-3-1", actions: int = 2, seed: int = 0) -> Environment:
    """A loop-free MDP with layers of ``widths`` states, drawn from ``seed`` (paper 004)."""
    try:
        sizes = tuple(map(int, widths.split("-")))
    except ValueError as error:
        raise ValueError(f"widths must be such as 1-3-3-1, not {widths!r}") from error
    return TabularEnvironment(layered_mdp(sizes, actions, seed))


def _file(path: str) -> Environment:
    """An MDP from a JSON file."""
    return TabularEnvironment(load_mdp(path))


BUILDERS: dict[str, Callable[..., Environment]] = {
    "RiverSwim-v0": _riverswim,
    "Bandit-v0": _bandit,
    "SpectrumAccess-v0": _spectrum,
    "RandomMDP-v0": _random,
    "LayeredMDP-v0": _layered,
    "File-v0": _file,
}
