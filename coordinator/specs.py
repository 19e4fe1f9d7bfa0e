"""The documents that an operator may send: run spec, manual deployment, true values.

A document with an unknown field, a wrong type or a value out of range is refused. Faults that only
the learner or the accounting can find are refused when the run is created.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, ValidationError, model_validator

from riffle.common.accounting.calibrate import CalibrationName
from riffle.common.mechanism.counters import MAX_COUNTERS, CounterLayout, Families, Sizes, Support
from riffle.common.mechanism.parameters import Aggregation, Guarantee, Trust
from riffle.common.mechanism.policy import Mixture
from riffle.common.protocol.descriptor import (
    MAX_ACTIONS,
    MAX_EPISODE_SECONDS,
    MAX_EXACT,
    MAX_HORIZON,
    MAX_MESSAGES,
    MAX_POLICIES,
    MAX_STATES,
    Document,
    Hex16,
    Name,
    first_fault,
)
from riffle.common.protocol.errors import RemoteError

# Floats have the integers' bounds; otherwise a too large integer would pass as a float.
Option = (
    Annotated[int, Field(ge=-MAX_EXACT, le=MAX_EXACT)]
    | Annotated[float, Field(ge=-MAX_EXACT, le=MAX_EXACT, allow_inf_nan=False)]
    | bool
    | str
)
Action = Annotated[int, Field(ge=0, lt=MAX_ACTIONS)]
PolicyRows = tuple[tuple[Action, ...], ...]
LearnerName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,49}$")]
MANUAL = "manual"
MAX_EPISODES = 1 << 40


class RunSpec(Document):
    """A run: its learner, its environment's sizes, its episodes and its guarantee."""

    run_id: Hex16 | None = Field(
        default=None, description="chosen by the client to make a retry safe; default: a random id"
    )
    name: Name
    learner: LearnerName = Field(default="sdp-pe", description="see the learners' reference")
    environment: Name = Field(description="id of the nodes' environment")
    states: int = Field(ge=1, le=MAX_STATES, description="X")
    actions: int = Field(ge=1, le=MAX_ACTIONS, description="A")
    horizon: int = Field(ge=1, le=MAX_HORIZON, description="H")
    start: tuple[float, ...] | None = Field(
        default=None, description="probability of every state at step 0; default: state 0"
    )
    support: Support | None = Field(
        default=None,
        description="possible states at step 0, and successors of every state and action, for all "
        "steps or for each; other transitions are not counted. Never take it from users' episodes",
    )
    homogeneous: bool = Field(default=False, description="the environment's steps are all alike")
    reward_low: float = Field(default=0.0, allow_inf_nan=False)
    reward_high: float = Field(default=1.0, allow_inf_nan=False)
    episodes: int = Field(ge=1, le=MAX_EPISODES, description="K")
    epsilon: float = Field(gt=0, le=100)
    beta: float = Field(gt=0, lt=1)
    delta: float = Field(default=0.05, gt=0, lt=1)
    dishonest_fraction: float = Field(default=0.05, ge=0, lt=1, description="gamma")
    trust: Trust = Field(
        default="shuffle", description="who adds the noise; nodes' owners must allow this model"
    )
    aggregation: Aggregation = Field(
        default="messages",
        description="how counts are sent: messages, or sums where owners and operators allow them",
    )
    families: Families = "joint"
    calibration: CalibrationName = "exact"
    constants: Literal["practical", "paper"] = "practical"
    options: dict[str, Option] = Field(
        default_factory=dict, description="replace some of the learner's constants"
    )
    max_messages: int = Field(
        default=4_096, ge=1, le=MAX_MESSAGES, description="largest L, messages of one report"
    )
    batch_seconds: int = Field(default=900, ge=1, le=30 * 86_400, description="life of a batch")
    episode_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EPISODE_SECONDS,
        description="how long a person's episode may take, at most half of batch_seconds",
    )
    reissues: int = Field(
        default=2,
        ge=0,
        le=100,
        description="how often a deployment whose batch was abandoned, lost or rejected is issued "
        "again as a whole; episodes_executed (in regret and result) may then exceed K",
    )
    seed: int = Field(default=0, ge=0, le=MAX_EXACT, description="seed of the learner's own draws")
    test_seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_EXACT,
        description="test entry only: seeds noise; the ledger records epsilon = infinity",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.reward_low >= self.reward_high:
            raise ValueError("reward_low must be below reward_high")
        if math.isinf(self.reward_high - self.reward_low):
            raise ValueError("reward_high - reward_low is too large: every reward would be zero")
        if 2 * (self.episode_seconds or 0) > self.batch_seconds:
            raise ValueError("batch_seconds must be at least twice episode_seconds")
        # Learners hold an entry for every transition, whether it is possible or not.
        entries = max(self.layout().counters, self.states**2 * self.actions * self.horizon)
        if entries > MAX_COUNTERS:
            raise ValueError(f"{entries} counters exceed {MAX_COUNTERS}; use fewer states")
        if self.trust != "shuffle" and (self.calibration != "exact" or self.constants == "paper"):
            raise ValueError("the papers' calibrations and constants are for trust 'shuffle' only")
        if self.trust != "shuffle" and self.aggregation == "sums":
            raise ValueError("aggregation 'sums' is for trust 'shuffle' only")
        if self.start is not None:
            _check_start(self.start, self.states)
        if self.support and set(np.flatnonzero(self.d1)) - set(self.support.start):
            raise ValueError("start has a state that the support rules out")
        return self

    @property
    def sizes(self) -> Sizes:
        """The number of states X, of actions A and of steps H."""
        return Sizes(X=self.states, A=self.actions, H=self.horizon)

    def layout(self, layer: int | None = None) -> CounterLayout:
        """Returns the counters of a batch that counts step ``layer`` or, by default, all steps."""
        return CounterLayout(self.sizes, self.families, layer, self.support)

    @property
    def d1(self) -> npt.NDArray[np.float64]:
        """The start distribution (X,), which sums to one up to rounding."""
        start = self.start or (1.0, *[0.0] * (self.states - 1))
        return np.array([p / math.fsum(start) for p in start], dtype=np.float64)

    @property
    def budget(self) -> Guarantee:
        """The guarantee that this run promises every user."""
        return Guarantee(self.epsilon, self.beta, self.dishonest_fraction)


def declaring(
    options: Mapping[str, Any], support: Support | None, homogeneous: bool | None
) -> dict[str, Any]:
    """Returns a spec's fields ``support``, ``homogeneous`` and ``options``, by name.

    ``support`` and ``homogeneous`` are what the environment declares. The option "homogeneous"
    replaces the declared value. If the option "support" is false, the declared support is dropped.
    All other options are the learner's.

    Raises ValueError if the option "support" is not true or false.
    """
    own = {"homogeneous": bool(homogeneous), "support": True, **options}
    counted = own.pop("support")
    if counted not in (True, False):
        raise ValueError(f"option support must be true or false, not {counted!r}")
    declared = {"homogeneous": own.pop("homogeneous"), "support": support if counted else None}
    return declared | {"options": own}


class ManualDeployment(Document):
    """A policy (H, X), or policies (M, H, X) with probabilities, to run for n episodes.

    ``step`` is the number of earlier deployments, reissues not counted. A request that gives
    ``step`` can be repeated and still deploys only once.
    """

    policy: PolicyRows | None = None
    policies: tuple[PolicyRows, ...] | None = Field(default=None, max_length=MAX_POLICIES)
    probabilities: tuple[float, ...] | None = None
    episodes: int = Field(ge=1, le=1 << 32)
    layer: int | None = Field(default=None, ge=0, description="count one step only; default all")
    step: int | None = Field(default=None, ge=0, le=MAX_EXACT)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.policy is None) == (self.policies is None):
            raise ValueError("give either policy or policies")
        if (self.policies is None) != (self.probabilities is None):
            raise ValueError("policies and probabilities belong together")
        return self

    def mixture(self, sizes: Sizes) -> Mixture:
        """Returns the mixture to deploy.

        Raises RemoteError ``invalid-spec`` if shapes, actions or probabilities are wrong.
        """
        try:
            mixture = self._mixture()
            mixture.check(sizes)
        except ValueError as error:
            raise RemoteError("invalid-spec", f"policy: {error}") from error
        return mixture

    def _mixture(self) -> Mixture:
        if self.policy is not None:
            return Mixture.single(self.policy)
        policies, probabilities = self.policies or (), self.probabilities or ()
        if len(probabilities) != len(policies):
            raise ValueError("there must be as many probabilities as policies")
        if not all(map(math.isfinite, probabilities)) or abs(math.fsum(probabilities) - 1) > 1e-6:
            raise ValueError("probabilities must sum to 1")
        return Mixture.from_probabilities(policies, probabilities)


class TrueValue(Document):
    """The value V of one deployment's mixture."""

    deployment: int = Field(ge=0, le=MAX_EXACT)
    value: float = Field(ge=0, allow_inf_nan=False)


class TrueValueSpec(Document):
    """The optimal value V* of a simulated environment and the values V of deployed mixtures.

    The values are for rewards scaled to [0, 1]. No learner reads them.
    """

    optimal_value: float = Field(ge=0, allow_inf_nan=False)
    values: tuple[TrueValue, ...] = Field(min_length=1)


DocumentType = TypeVar("DocumentType", bound=Document)


def read_document(kind: type[DocumentType], body: bytes) -> DocumentType:
    """Parses a request's body strictly.

    Raises RemoteError ``malformed`` if the body is not JSON, and ``invalid-spec`` if a field is
    wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]["type"]
        slug = "malformed" if fault == "json_invalid" else "invalid-spec"
        raise RemoteError(slug, first_fault(error)) from error


def _check_start(start: tuple[float, ...], states: int) -> None:
    if len(start) != states:
        raise ValueError(f"start has {len(start)} probabilities for {states} states")
    if not all(math.isfinite(p) and p >= 0 for p in start):
        raise ValueError("start must hold probabilities that are not negative")
    if abs(math.fsum(start) - 1.0) > 1e-9:
        raise ValueError(f"start must sum to 1, not {math.fsum(start):g}")
