"""Options that commands share. Importing this module imports neither NumPy nor a service."""

import inspect
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from riffle.common.mechanism.parameters import Aggregation, Trust

if TYPE_CHECKING:
    from riffle.experiments.presets import Preset

Families = Literal["paper", "lean", "joint"]
"""The same names as in `common.mechanism.counters`, which imports NumPy."""

SECRETS = Path("network")
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d{1,3})?")
Network = Annotated[Path, typer.Option("--network", help="folder of the network's secrets")]
CoordinatorUrl = Annotated[
    str | None,
    typer.Option(
        "--coordinator-url",
        help="coordinator's address; default: the folder's, or port 8400 of this machine",
    ),
]
ShufflerUrl = Annotated[
    str | None,
    typer.Option(help="shuffler's address; default: the folder's, or port 8401 of this machine"),
]
Out = Annotated[Path, typer.Option(help="folder for the results")]
Force = Annotated[bool, typer.Option("--force", help="replace results that are already there")]
Nodes = Annotated[int, typer.Option(min=1, help="nodes to start")]
Workers = Annotated[int, typer.Option(min=1, help="processes for cryptography")]


def whole_number(text: str) -> int:
    """Reads an integer, such as 20000 or 2e4. Raises typer.BadParameter for any other text."""
    try:
        return int(text)
    except ValueError:
        number = float(text) if NUMBER.fullmatch(text) else math.nan
        if not number.is_integer():
            raise typer.BadParameter(f"{text!r} is no whole number such as 20000 or 2e4") from None
        return int(number)


def whole(help_text: str) -> Any:  # noqa: ANN401  (Typer's own types)
    """Returns an option for an integer, such as 20000 or 2e4."""
    return typer.Option(parser=whole_number, metavar="INTEGER", help=help_text)


def _preset_names() -> list[str]:
    from riffle.experiments.presets import PRESETS  # noqa: PLC0415  (only a completing shell needs it)

    return list(PRESETS)


def _learner_names() -> list[str]:
    from riffle.coordinator.learners.registry import Registry  # noqa: PLC0415

    return ["auto", *Registry().names]


def _environment_names() -> list[str]:
    from riffle.node_client.environments.registry import environment_names  # noqa: PLC0415

    return environment_names()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that describe a run: one for each field, in this order."""

    preset: Annotated[
        str,
        typer.Option(help="preset to start from: demo or riverswim", autocompletion=_preset_names),
    ] = "demo"
    learner: Annotated[
        str,
        typer.Option(
            help="learner: a name, auto, or path/file.py:Class", autocompletion=_learner_names
        ),
    ] = "sdp-pe"
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            "--environment",
            help="environment: an id such as RiverSwim-v0, or file.py:make",
            autocompletion=_environment_names,
        ),
    ] = None
    param: Annotated[
        list[str] | None, typer.Option(help="environment parameter, NAME=VALUE; repeatable")
    ] = None
    horizon: Annotated[int | None, typer.Option(help="H, steps of an episode")] = None
    episodes: Annotated[int | None, whole("K, episodes of the run")] = None
    epsilon: Annotated[float | None, typer.Option(help="epsilon of every user")] = None
    beta: Annotated[float | None, typer.Option(help="beta of every user")] = None
    dishonest_fraction: Annotated[
        float | None,
        typer.Option(help="gamma, share of dishonest reports; 0 in simulations by population"),
    ] = None
    trust: Annotated[
        Trust | None, typer.Option(help="who adds noise: users together, each user, or coordinator")
    ] = None
    aggregation: Annotated[
        Aggregation | None,
        typer.Option(help="how counts are sent: sealed messages, or one masked sum"),
    ] = None
    families: Annotated[Families | None, typer.Option(help="what is counted")] = None
    constants: Annotated[
        Literal["practical", "paper"] | None, typer.Option(help="set of the learner's constants")
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="constant of the learner, NAME=VALUE; support= and homogeneous= change what the "
            "environment declares"
        ),
    ] = None
    batch_seconds: Annotated[
        int | None, typer.Option(help="life of a batch, in which it must get all its reports")
    ] = None
    episode_seconds: Annotated[
        int | None, typer.Option(help="how long a person's episode may take; leases last longer")
    ] = None
    reissues: Annotated[
        int | None, typer.Option(help="how often a lost batch is issued again, to other users")
    ] = None

    def apply(self, **changes: float | str | None) -> "Preset":
        """Returns the preset with these options and further ``changes`` to its spec.

        If Riffle chooses the learner, prints the choice and the reason. Raises the errors of
        `experiments.presets.customize`, and ValueError if a text is not NAME=VALUE.
        """
        from riffle.coordinator.specs import RunSpec  # noqa: PLC0415  (these import NumPy)
        from riffle.experiments.presets import customize, preset  # noqa: PLC0415

        horizon = {} if self.horizon is None else {"horizon": self.horizon}
        names = {field.name for field in fields(self)} & RunSpec.model_fields.keys()
        own = {name: getattr(self, name) for name in names - {"learner", "horizon"}}
        chosen = customize(
            preset(self.preset),
            self.learner,
            self.env,
            parameters=read_pairs(self.param) | horizon,
            options=read_pairs(self.option),
            changes=own | changes,
        )
        if chosen.because:
            typer.echo(f"learner {chosen.spec.learner}: {chosen.because}", err=True)
        return chosen


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The options of a simulation."""

    calibration: Annotated[
        Literal["exact", "paper", "conference"] | None,
        typer.Option(help="noise: exact (the least proved), paper, or conference (of paper 003)"),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, help="independent runs")] = 10
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 2
    per_user: Annotated[
        bool,
        typer.Option(
            "--per-user",
            help="simulate one user after another with the nodes' code: slower, any environment",
        ),
    ] = False
    run_id: Annotated[
        str | None, typer.Option(help="with --per-user: id of the live run to repeat")
    ] = None
    test_seed: Annotated[
        int | None, typer.Option(help="with --per-user: test seed of the first run; default 0")
    ] = None


Command = Callable[..., None]
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def expand_options(
    *, without: Collection[str] = (), **defaults: object
) -> Callable[[Command], Command]:
    """Replaces each dataclass parameter of a command by an option for each of its fields.

    The fields have Typer's annotations. Fields in ``without`` keep their defaults and have no
    option. ``defaults`` replace fields' defaults.
    """

    def decorate(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
        for own in inspect.signature(command).parameters.values():
            if is_dataclass(own.annotation) and isinstance(own.annotation, type):
                options = [
                    field.replace(kind=KEYWORD, default=defaults.get(field.name, field.default))
                    for field in inspect.signature(own.annotation).parameters.values()
                    if field.name not in without
                ]
                groups[own.name] = own.annotation, [option.name for option in options]
                parameters += options
            else:
                parameters.append(own.replace(kind=KEYWORD))

        @wraps(command)
        def run(**given: Any) -> None:  # noqa: ANN401  (each has its option's type)
            for name, (build, options) in groups.items():
                given[name] = build(**{option: given.pop(option) for option in options})
            command(**given)

        run.__dict__["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def is_given(context: typer.Context, name: str) -> bool:
    """Returns whether the caller gave the parameter of this name, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def read_pairs(texts: list[str] | None) -> dict[str, Any]:
    """Reads NAME=VALUE texts, by `_value`. Raises ValueError if a text has no ``=``."""
    pairs: dict[str, Any] = {}
    for text in texts or []:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{text!r} is not NAME=VALUE")
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> bool | int | float | str | list[float]:
    """Reads a value: true or false, an integer (also as 2e4), a number, [numbers], or text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if re.fullmatch(r"\d+[eE]\+?\d", text):
        return whole_number(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    numbers = text.removeprefix("[").removesuffix("]").split(",")
    if text.startswith("[") and text.endswith("]") and all(map(NUMBER.fullmatch, numbers)):
        return [float(number) for number in numbers]
    return text
