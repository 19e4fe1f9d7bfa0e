"""An environment that somebody brought: made, and looked at, so that a mistake is told in one line.

What goes wrong later, in `reset` and `step`, is an episode that failed (`node_client.episode`).
"""

import math
from collections.abc import Mapping

from riffle.common.counters import Sizes
from riffle.common.errors import LocalError, RiffleError
from riffle.common.plugins import Maker, file_of, where
from riffle.node_client.environments.environment import Environment, Modelled
from riffle.node_client.environments.tabular import TabularMDP

MEMBERS = ("sizes", "reward_range", "absorbing", "reset", "step")


def make_brought(name: str, maker: Maker, given: Mapping[str, object]) -> Environment:
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
        said = where(error, file_of(maker))
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
