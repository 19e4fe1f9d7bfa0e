"""The two preset runs of Riffle, and runs that differ from them in some respects.

Both presets are RiverSwim-v0 as in paper 000, section VI (X=4, A=2, H=6). ``demo`` has K = 10,000,
enough to end near the optimum (docs/demo.md). ``riverswim`` has K = 20,000, as paper 000 does.
"""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from riffle.common.mechanism.counters import possible_cells
from riffle.common.mechanism.parameters import Aggregation
from riffle.common.process import plugins
from riffle.common.protocol.descriptor import first_fault
from riffle.coordinator.learners.registry import Registry, choose
from riffle.coordinator.specs import RunSpec, declaring
from riffle.node_client.environments.registry import Parameter, declaration_of, make
from riffle.node_client.environments.tabular import (
    Declaration,
    Environment,
    Modelled,
    riverswim,
)

AUTO = "auto"
"""Stands for a learner's name: Riffle chooses the learner by the environment's sizes."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A run, its environment's parameters, the number of nodes, and learners from files.

    ``learners`` maps names to ``path/file.py:Class``. ``because`` says why `AUTO` chose the
    learner. In simulations, learner and environment may also be Python objects: ``own_learner`` is
    a class, and ``own_environment`` is an environment, or a function or class that makes one.
    """

    spec: RunSpec
    environment: dict[str, Parameter]
    nodes: int = 20
    learners: dict[str, str] = field(default_factory=dict)
    because: str = ""
    own_learner: plugins.Constructor | None = None
    own_environment: object = None

    def make(self) -> Environment:
        """Makes a fresh environment. Raises the errors of `environments.registry.make`."""
        own = self.own_environment
        return make(self.spec.environment if own is None else own, **self.environment)

    def registry(self) -> Registry:
        """Returns the learners by name, with those from files and the caller's own class."""
        own = {} if self.own_learner is None else {self.spec.learner: self.own_learner}
        return Registry(files={**self.learners, **own})


def riverswim_run(name: str, horizon: int, episodes: int, epsilon: float) -> Preset:
    """Returns a run on RiverSwim-v0 with X=4, A=2."""
    declared = riverswim(4, horizon).declaration
    spec = RunSpec(
        name=name,
        environment="RiverSwim-v0",
        states=4,
        actions=2,
        horizon=horizon,
        episodes=episodes,
        epsilon=epsilon,
        beta=1e-5,
        **declaring({}, declared.support, declared.homogeneous),
    )
    return Preset(spec, {"states": 4, "horizon": horizon})


PRESETS = {
    "demo": riverswim_run("demo", horizon=6, episodes=10_000, epsilon=1.0),
    "riverswim": riverswim_run("riverswim", horizon=6, episodes=20_000, epsilon=1.0),
}


def preset(name: str) -> Preset:
    """Returns the preset with this name. Raises ValueError if there is none."""
    if name not in PRESETS:
        raise ValueError(plugins.unknown_name("preset", name, sorted(PRESETS)))
    return PRESETS[name]


def with_aggregation(chosen: Preset, aggregation: Aggregation) -> Preset:
    """Returns the preset with another aggregation of its counts."""
    return replace(chosen, spec=chosen.spec.model_copy(update={"aggregation": aggregation}))


def customize(
    base: Preset,
    learner: str | plugins.Constructor,
    environment: object = None,
    *,
    parameters: Mapping[str, Parameter],
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Preset:
    """Returns a preset with another learner, environment, or fields of the spec.

    ``parameters`` are for the environment. ``options`` replace constants of the learner; the
    options ``homogeneous`` and ``support`` change the declaration. ``changes`` are fields of the
    spec, and None leaves a field as it is. A learner or environment may be in a file, as
    ``path/file.py:name``, or a Python object. With the papers' constants, a preset ignores the
    environment's declared support and homogeneity.

    Raises ValueError, with the field's name, if a value is out of range. Raises LocalError
    ``invalid-spec`` if the environment does not exist or refuses a parameter.
    """
    environment_id, own_parameters = _environment(environment, base)
    chosen_parameters = own_parameters | dict(parameters)
    own = None if environment is None or isinstance(environment, str) else environment
    made = make(environment_id if own is None else own, **chosen_parameters)
    name = label_of(learner)
    name, because = choose(made.sizes) if name == AUTO else (name, "")
    declared = declaration_of(made)
    if changes.get("constants") == "paper":
        declared = Declaration()
    support, (X, A, H) = declared.support, astuple(made.sizes)
    if support and possible_cells(support, X, A, H).size == H * X * A * X:
        support = None  # it excludes no transition, and so saves nothing
    low, high = made.reward_range
    values = base.spec.model_dump() | {
        "environment": environment_id,
        "learner": name,
        "states": X,
        "actions": A,
        "horizon": H,
        "reward_low": low,
        "reward_high": high,
        "start": tuple(made.mdp.d1) if isinstance(made, Modelled) else None,
        **declaring({**base.spec.options, **options}, support, declared.homogeneous),
    }
    values |= {field: value for field, value in changes.items() if value is not None}
    try:
        spec = RunSpec.model_validate(values)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error
    preset = Preset(spec, chosen_parameters, base.nodes, {}, because, own_environment=own)
    if not isinstance(learner, str):
        return replace(preset, own_learner=learner)
    files = {name: absolute(learner)} if plugins.is_file_reference(learner) else {}
    return replace(preset, learners=files)


def label_of(part: object) -> str:
    """Returns a short name for a learner or environment: a name, a file reference or an object."""
    if isinstance(part, str):
        return plugins.short_name(part) if plugins.is_file_reference(part) else part
    if known := getattr(getattr(part, "spec", None), "id", None):  # a Gymnasium environment
        return str(known).replace("/", "-")
    named = getattr(part, "__name__", None) or type(part).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", str(named).strip("_<>")).lower()


def _pair(item: Any) -> tuple[Any, tuple[tuple[str, Any], ...]]:  # noqa: ANN401
    """Splits ``item`` into an environment or learner and its parameters, by default none."""
    code, parameters = item if isinstance(item, tuple) else (item, {})
    if isinstance(code, str) and plugins.is_file_reference(code):
        code = absolute(code)
    return code, tuple(parameters.items())


def labelled(items: Any) -> dict[str, tuple[Any, tuple[tuple[str, Any], ...]]]:  # noqa: ANN401
    """Returns environments or learners by label."""
    if isinstance(items, Mapping):
        return {str(label): _pair(item) for label, item in items.items()}
    pairs = [_pair(item) for item in (items if isinstance(items, list) else [items])]
    kinds = [isinstance(code, str) and plugins.is_file_reference(code) for code, _ in pairs]
    labels = [  # a file may have several classes
        ", ".join([Path(code).name if own else label_of(code), *(f"{k} = {v}" for k, v in given)])
        for own, (code, given) in zip(kinds, pairs, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two have the same label among {labels}: give a dictionary of labels")
    return dict(zip(labels, pairs, strict=True))


def _environment(reference: object, base: Preset) -> tuple[str, dict[str, Parameter]]:
    """Returns an environment's id and parameters. For a file, the parameter ``folder`` is added."""
    if reference is None:
        return base.spec.environment, dict(base.environment)
    if not isinstance(reference, str) or not plugins.is_file_reference(reference):
        return label_of(reference), {}
    path, _, name = reference.rpartition(":")
    file = Path(path)
    return f"{file.name}:{name}", {"folder": str(file.parent.resolve())}


def absolute(reference: str) -> str:
    """Returns ``path/file.py:name`` with an absolute path."""
    path, _, name = reference.rpartition(":")
    return f"{Path(path).resolve()}:{name}"
