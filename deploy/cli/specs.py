"""Options that several commands share, and how they become a run's spec."""

from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from common.counters import Families
from common.descriptor import first_fault
from coordinator.specs import RunSpec
from deploy.presets import Preset, preset
from node_client.environments.environment import Modelled
from node_client.environments.registry import Parameter, make

Environment = Annotated[str | None, typer.Option("--env", help="environment id, as RiverSwim-v0")]
Param = Annotated[
    list[str] | None, typer.Option("--param", help="environment parameter, NAME=VALUE; repeatable")
]
Horizon = Annotated[int | None, typer.Option(help="H, steps of an episode")]
Episodes = Annotated[int | None, typer.Option(help="K, episodes of the run")]
Epsilon = Annotated[float | None, typer.Option(help="epsilon of every user")]
Beta = Annotated[float | None, typer.Option(help="beta of every user")]
FamiliesOption = Annotated[Families | None, typer.Option(help="what is counted")]
Constants = Annotated[
    Literal["practical", "paper"] | None, typer.Option(help="the learner's declared constants")
]
Option = Annotated[
    list[str] | None, typer.Option("--option", help="learner constant, NAME=VALUE; repeatable")
]
PresetName = Annotated[str, typer.Option("--preset", help="demo or paper: what to start from")]


def resolve(
    name: str,
    env: str | None = None,
    params: list[str] | None = None,
    horizon: int | None = None,
    options: list[str] | None = None,
    **changes: float | str | None,
) -> Preset:
    """A preset with what the command line changes; sizes come from the environment itself.

    Raises:
        ValueError: a value is out of range; the message names the field.
        LocalError: ``invalid-spec``, the environment does not exist or refuses a parameter.
    """
    base = preset(name)
    environment_id = env or base.spec.environment
    parameters: dict[str, Parameter] = dict(base.environment) if env is None else {}
    parameters |= pairs(params)
    if horizon is not None:
        parameters["horizon"] = horizon
    environment = make(environment_id, **parameters)
    low, high = environment.reward_range
    fields = base.spec.model_dump() | {
        "environment": environment_id,
        "states": environment.sizes.X,
        "actions": environment.sizes.A,
        "horizon": environment.sizes.H,
        "reward_low": low,
        "reward_high": high,
        "start": tuple(environment.mdp.d1) if isinstance(environment, Modelled) else None,
        # What a preset declares of its environment holds for no other one.
        "options": (dict(base.spec.options) if env is None else {}) | pairs(options),
    }
    fields |= {key: value for key, value in changes.items() if value is not None}
    try:
        spec = RunSpec.model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error
    return Preset(spec, parameters, base.nodes)


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
