"""Options that several commands share, and how they become a run's spec.

Options that say which network an operator's command speaks to.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from riffle.common.mechanism.counters import Families
from riffle.common.mechanism.noise import Trust
from riffle.common.process.plugins import is_file_reference, short_name
from riffle.common.protocol.descriptor import first_fault
from riffle.coordinator.learners.registry import BUILT_IN, Registry
from riffle.coordinator.specs import MANUAL, RunSpec
from riffle.deploy.presets import PRESETS, Preset, preset
from riffle.node_client.environments.registry import Parameter, make, names
from riffle.node_client.environments.tabular import Modelled

Environment = Annotated[
    str | None,
    typer.Option(
        "--env",
        "--environment",
        help="environment id, as RiverSwim-v0; or file.py:make",
        autocompletion=names,
    ),
]
Learner = Annotated[
    str,
    typer.Option(
        "--learner",
        help="who learns: its name, or path/file.py:Class",
        autocompletion=lambda: Registry().names,
    ),
]
Param = Annotated[
    list[str] | None, typer.Option("--param", help="environment parameter, NAME=VALUE; repeatable")
]
Horizon = Annotated[int | None, typer.Option(help="H, steps of an episode")]
Episodes = Annotated[int | None, typer.Option(help="K, episodes of the run")]
Epsilon = Annotated[float | None, typer.Option(help="epsilon of every user")]
Beta = Annotated[float | None, typer.Option(help="beta of every user")]
TrustOption = Annotated[
    Trust | None, typer.Option("--trust", help="who adds the noise: all users, each, coordinator")
]
FamiliesOption = Annotated[Families | None, typer.Option(help="what is counted")]
Constants = Annotated[
    Literal["practical", "paper"] | None, typer.Option(help="the learner's declared constants")
]
Option = Annotated[
    list[str] | None, typer.Option("--option", help="learner constant, NAME=VALUE; repeatable")
]
PresetName = Annotated[
    str,
    typer.Option(
        "--preset",
        help="demo or paper: what to start from",
        autocompletion=lambda: list(PRESETS),
    ),
]
DECLARED = BUILT_IN.keys() - {MANUAL}
"""Learners that understand what a preset declares of its environment."""


def resolve(
    base_name: str,
    env: str | None = None,
    params: list[str] | None = None,
    horizon: int | None = None,
    options: list[str] | None = None,
    learner: str = "sdp-pe",
    **changes: float | str | None,
) -> Preset:
    """A preset with what the command line changes; sizes come from the environment itself.

    Raises:
        ValueError: a value is out of range; the message names the field.
        LocalError: ``invalid-spec``, the environment does not exist or refuses a parameter.
    """
    base = preset(base_name)
    environment_id, parameters = _environment(env, base)
    parameters |= pairs(params)
    if horizon is not None:
        parameters["horizon"] = horizon
    environment = make(environment_id, **parameters)
    learner_name, learners = _learner(learner)
    low, high = environment.reward_range
    fields = base.spec.model_dump() | {
        "environment": environment_id,
        "learner": learner_name,
        "states": environment.sizes.X,
        "actions": environment.sizes.A,
        "horizon": environment.sizes.H,
        "reward_low": low,
        "reward_high": high,
        "start": tuple(environment.mdp.d1) if isinstance(environment, Modelled) else None,
        # What a preset declares to SDP-PE of its environment holds for no other one.
        "options": (dict(base.spec.options) if env is None and learner_name in DECLARED else {})
        | pairs(options),
    }
    fields |= {key: value for key, value in changes.items() if value is not None}
    try:
        spec = RunSpec.model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error
    return Preset(spec, parameters, base.nodes, learners)


def _environment(asked: str | None, base: Preset) -> tuple[str, dict[str, Parameter]]:
    """Id and parameters; of a file the id has the name only, and a parameter the folder."""
    if asked is None:
        return base.spec.environment, dict(base.environment)
    if not is_file_reference(asked):
        return asked, {}
    path, _, name = asked.rpartition(":")
    return f"{Path(path).name}:{name}", {"folder": str(Path(path).resolve().parent)}


def _learner(asked: str) -> tuple[str, dict[str, str]]:
    """Name of a learner and, if it is in a file, where."""
    if not is_file_reference(asked):
        return asked, {}
    path, _, name = asked.rpartition(":")
    return short_name(asked), {short_name(asked): f"{Path(path).resolve()}:{name}"}


def check(chosen: Preset, spec: RunSpec) -> None:
    """Refuse a spec that no network started here could run, before anything is started.

    Raises:
        ValueError: its learner is on the simulator only.
        RemoteError: as the coordinator would refuse it.
    """
    registry = Registry(files=chosen.learners)
    if spec.learner not in registry.names:
        # Loaded for this sentence only.
        from riffle.experiments.adversarial import ALGORITHMS  # noqa: PLC0415
        from riffle.experiments.per_episode import PER_EPISODE  # noqa: PLC0415

        if spec.learner in {*PER_EPISODE, *ALGORITHMS}:
            words = f"riffle simulate --learner {spec.learner}"
            raise ValueError(f"{spec.learner} is on the simulator only: {words}")
    registry.build(spec)


def said(context: typer.Context, name: str) -> bool:
    """Whether whoever called gave the parameter of this name, and not its default."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def pairs(texts: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE texts as a dictionary, values read as bool, int, float or text.

    Raises:
        ValueError: a text has no ``=``.
    """
    found: dict[str, Any] = {}
    for text in texts or []:
        key, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{text!r} is not NAME=VALUE")
        found[key] = _value(value)
    return found


def _value(text: str) -> bool | int | float | str:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


NETWORK = Path("network")
Network = Annotated[Path, typer.Option("--network", help="folder of the network's secrets")]
CoordinatorUrl = Annotated[
    str | None,
    typer.Option(
        "--coordinator-url",
        help="where the coordinator answers; default: as the folder says, or port 8400 here",
    ),
]
