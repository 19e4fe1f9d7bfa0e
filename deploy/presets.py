"""The two runs that Riffle ships: what ``riffle up --preset NAME`` does.

Both are RiverSwim-v0 as in `000`, section VI (X=4, A=2, H=6) at epsilon = 1, beta = 1e-5, with one
symbol a step (`joint`), which takes the fewest messages. The environment is declared homogeneous:
RiverSwim is the same at every step, so counts are pooled over steps after they were made private.

``demo`` has K = 10,000, at which 40 of 40 simulated seeds end within 5 % of the optimum, the worst
at 99 % (docs/demo.md), and about 322,000 sealed messages. ``paper`` has the paper's K = 20,000.
"""

from dataclasses import dataclass, field

from riffle.common.process.plugins import unknown_name
from riffle.coordinator.specs import RunSpec
from riffle.node_client.environments.registry import Parameter


@dataclass(frozen=True, slots=True)
class Preset:
    """A run, its environment's parameters, the number of nodes, and learners from files.

    ``learners`` is name -> ``path/file.py:Class``.
    """

    spec: RunSpec
    environment: dict[str, Parameter]
    nodes: int = 20
    learners: dict[str, str] = field(default_factory=dict)


def preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, sorted(PRESETS)))
    return PRESETS[name]


def riverswim_run(name: str, horizon: int, episodes: int, epsilon: float) -> Preset:
    """RiverSwim-v0 with X=4, A=2."""
    spec = RunSpec(
        name=name,
        environment="RiverSwim-v0",
        states=4,
        actions=2,
        horizon=horizon,
        episodes=episodes,
        epsilon=epsilon,
        beta=1e-5,
        options={"homogeneous": True},
    )
    return Preset(spec, {"states": 4, "horizon": horizon})


PRESETS = {
    "demo": riverswim_run("demo", horizon=6, episodes=10_000, epsilon=1.0),
    "paper": riverswim_run("paper", horizon=6, episodes=20_000, epsilon=1.0),
}
