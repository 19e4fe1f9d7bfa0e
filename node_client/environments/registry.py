"""An environment that somebody brought: made, and looked at, so that a mistake is told in one line.

What goes wrong later, in `reset` and `step`, is an episode that failed (`node_client.episode`).

Environments by id: ``make("RiverSwim-v0", states=4, horizon=6)``.

Ids are ``Name-v0``; ``gymnasium:<id>`` reaches any Gymnasium environment with discrete spaces.
Another package adds one with an entry point in the group ``riffle.environments``, a callable that
returns an `Environment`; ``file.py:make`` is such a callable in a Python file, which stands in the
parameter ``folder`` (default: the working directory), so that no id tells where. The sizes
``states``, ``actions``, ``horizon`` may be given for every id: where an environment does not let
them be chosen, they must be what it has.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, ValidationError, validate_call

from riffle.common.mechanism.counters import Sizes
from riffle.common.process.plugins import (
    Constructor,
    describe_error,
    entry_points_of,
    is_file_reference,
    load_entry_point,
    load_file,
    parameter_names,
    source_file,
    unknown_name,
)
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.node_client.environments.builtin import (
    BanditEnvironment,
    global_means,
    layered_mdp,
    load,
    random_mdp,
    spectrum_access,
)
from riffle.node_client.environments.gymnasium import make_gymnasium
from riffle.node_client.environments.tabular import (
    Environment,
    Modelled,
    TabularEnvironment,
    TabularMDP,
    riverswim,
)

MEMBERS = ("sizes", "reward_range", "absorbing", "reset", "step")


def make_external(name: str, maker: Constructor, given: Mapping[str, object]) -> Environment:
    """What ``maker`` makes of the parameters given.

    Raises:
        LocalError: ``invalid-spec``: it raised, and where, or what it returned is no environment.
    """
    try:
        made: Environment = maker(**given)
        fault = _fault(made)
    except (RiffleError, MemoryError):  # they say themselves what is wrong
        raise
    except Exception as error:
        said = describe_error(error, source_file(maker))
        raise LocalError("invalid-spec", f"{name}: {said}") from error
    if fault:
        raise LocalError("invalid-spec", f"{name} returned a {type(made).__name__}{fault}")
    return made


def _fault(made: Environment) -> str | None:
    """What keeps this from being an `Environment`, if anything."""
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        advice = "; see GymnasiumEnvironment" if hasattr(made, "observation_space") else ""
        return f", which is no environment: it has no {', no '.join(missing)}{advice}"
    sizes, absorbing = made.sizes, made.absorbing
    for fits, wanted in (
        (isinstance(sizes, Sizes), "sizes must be Sizes(X, A, H)"),
        (_is_range(made.reward_range), "reward_range must be (low, high), numbers and low < high"),
    ):
        if not fits:
            return f": its {wanted}"
    if absorbing is not None and absorbing != sizes.X - 1:
        return f": its absorbing must be None or the last state, {sizes.X - 1}, not {absorbing!r}"
    if isinstance(made, Modelled) and not _is_mdp(made.mdp, sizes):
        return f": its mdp must be a TabularMDP of {sizes}"
    return None


def _is_range(found: object) -> bool:
    if not isinstance(found, tuple | list) or len(found) != 2:
        return False
    if not all(isinstance(end, int | float) and math.isfinite(end) for end in found):
        return False
    return bool(found[0] < found[1])


def _is_mdp(found: object, sizes: Sizes) -> bool:
    return isinstance(found, TabularMDP) and found.sizes == sizes


GROUP = "riffle.environments"
GYMNASIUM = "gymnasium:"
FOLDER = "folder"
_SIZES = frozenset({"states", "actions", "horizon"})
Parameter = int | float | str | list[float]


def make(name: str, **wanted: Parameter | None) -> Environment:
    """A fresh environment; parameters that are None are as if not given.

    Raises:
        LocalError: ``invalid-spec``: unknown id or parameter (with the nearest that exists), a
            value out of range, sizes that this environment does not have, or one that was brought
            and is wrong (with the line).
    """
    given = {key: value for key, value in wanted.items() if value is not None}
    builder = _builder(name, str(given.pop(FOLDER, ".")) if is_file_reference(name) else ".")
    accepted = parameter_names(builder)
    sizes = {key: value for key, value in given.items() if key in _SIZES}
    chosen = {key: value for key, value in given.items() if key in accepted}
    for key in given.keys() - accepted - sizes.keys():
        raise LocalError("invalid-spec", f"{name}: {unknown_name('parameter', key, accepted)}")
    known = name in BUILDERS or name.startswith(GYMNASIUM)
    environment = (_make_known if known else make_external)(name, builder, chosen)
    _check_sizes(name, environment.sizes, sizes)
    return environment


def _make_known(name: str, builder: Constructor, given: dict[str, Parameter]) -> Environment:
    """One of Riffle's own; its builders check the types, and refuse values in words."""
    try:
        if name in BUILDERS:
            builder = validate_call(config=ConfigDict(strict=True))(builder)
        made: Environment = builder(**given)
    except ValidationError as error:
        raise LocalError("invalid-spec", f"{name}: {_wrong(error, given)}") from error
    except (TypeError, ValueError) as error:
        raise LocalError("invalid-spec", f"{name}: {error}") from error
    return made


def exact_mdp(environment: Environment) -> TabularMDP:
    """The population's MDP, for exact values and population-level simulation.

    Raises:
        LocalError: ``invalid-spec``: this environment can be sampled only.
    """
    if not isinstance(environment, Modelled):
        raise LocalError(
            "invalid-spec",
            "this environment has no known MDP: it can be simulated with --per-user, not by "
            "population",
        )
    return environment.mdp


def names() -> list[str]:
    """Ids of the built-in environments, and of those that other packages offer."""
    return sorted({*BUILDERS, *entry_points_of(GROUP)})


def _riverswim(states: int = 4, horizon: int = 6) -> Environment:
    """RiverSwim: a current to the left, a small reward there, a large one at the right end."""
    return TabularEnvironment(riverswim(states, horizon))


def _bandit(
    actions: int = 20, sigma: float = 0.1, seed: int = 0, means: list[float] | None = None
) -> Environment:
    """A bandit whose users' means differ around those of the arms (`000`, section VI)."""
    arms = global_means(actions, seed) if means is None else np.array(means, dtype=np.float64)
    return BanditEnvironment(arms, sigma)


def _spectrum(channels: int = 2, horizon: int = 6) -> Environment:
    """Dynamic spectrum access: which channel to tune to next; others come to them and go."""
    return TabularEnvironment(spectrum_access(channels, horizon))


def _random(states: int = 4, actions: int = 2, horizon: int = 6, seed: int = 0) -> Environment:
    """A random MDP, drawn from its seed."""
    return TabularEnvironment(random_mdp(Sizes(states, actions, horizon), seed))


def _layered(widths: str = "1-3-3-3-1", actions: int = 2, seed: int = 0) -> Environment:
    """A loop-free MDP of layers of the given sizes, drawn from its seed (`004`)."""
    try:
        sizes = tuple(map(int, widths.split("-")))
    except ValueError as error:
        raise ValueError(f"widths must be as 1-3-3-1, not {widths!r}") from error
    return TabularEnvironment(layered_mdp(sizes, actions, seed))


def _file(path: str) -> Environment:
    """An MDP from a JSON file."""
    return TabularEnvironment(load(path))


BUILDERS: dict[str, Callable[..., Environment]] = {
    "RiverSwim-v0": _riverswim,
    "Bandit-v0": _bandit,
    "SpectrumAccess-v0": _spectrum,
    "RandomMDP-v0": _random,
    "LayeredMDP-v0": _layered,
    "File-v0": _file,
}


def _builder(name: str, folder: str) -> Constructor:
    if name.startswith(GYMNASIUM):
        return partial(make_gymnasium, name.removeprefix(GYMNASIUM))
    if is_file_reference(name):
        return load_file(str(Path(folder) / name))
    if name in BUILDERS:
        return BUILDERS[name]
    if name in (others := entry_points_of(GROUP)):
        return load_entry_point(others[name])
    raise LocalError(
        "invalid-spec",
        f"{unknown_name('environment', name, names())}; and of Gymnasium, as "
        f"{GYMNASIUM}FrozenLake-v1; and of one's own, as file.py:make",
    )


def _wrong(error: ValidationError, given: dict[str, Parameter]) -> str:
    """Which parameter is not of its type, and what was given for it."""
    fault = first_fault(error)
    name = fault.partition(":")[0].partition(".")[0]
    return f"{fault}, not {given[name]!r}" if name in given else fault


def _check_sizes(name: str, sizes: Sizes, wanted: dict[str, Parameter]) -> None:
    has: dict[str, int] = {"states": sizes.X, "actions": sizes.A, "horizon": sizes.H}
    for key, value in wanted.items():
        if has[key] != value:
            raise LocalError("invalid-spec", f"{name} has {has[key]} {key} here, not {value}")
