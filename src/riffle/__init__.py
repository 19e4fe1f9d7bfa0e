"""Riffle: reinforcement learning over people whose episodes stay private.

These names are the public API, documented in docs/python.md; everything else is private and may
change. The module of a name is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from riffle.common.accounting import BatchEvent as BatchEvent
    from riffle.common.accounting import account as account
    from riffle.common.accounting import calibrate as calibrate
    from riffle.common.mechanism.counters import CounterLayout as CounterLayout
    from riffle.common.mechanism.counters import Sizes as Sizes
    from riffle.common.mechanism.counters import Support as Support
    from riffle.common.mechanism.parameters import Guarantee as Guarantee
    from riffle.common.mechanism.parameters import Noise as Noise
    from riffle.common.mechanism.parameters import Padding as Padding
    from riffle.common.mechanism.policy import Mixture as Mixture
    from riffle.common.protocol.errors import RiffleError as RiffleError
    from riffle.coordinator.learners.own import OwnLearner as OwnLearner
    from riffle.coordinator.learners.own import estimate as estimate
    from riffle.coordinator.learning.learner import BatchCounts as BatchCounts
    from riffle.coordinator.learning.learner import Deployment as Deployment
    from riffle.coordinator.learning.learner import Learner as Learner
    from riffle.coordinator.learning.learner import LearnerSummary as LearnerSummary
    from riffle.coordinator.learning.learner import Problem as Problem
    from riffle.coordinator.learning.learner import StageResult as StageResult
    from riffle.deploy.operator import Operator as Operator
    from riffle.experiments.research import RegretCurve as RegretCurve
    from riffle.experiments.research import Result as Result
    from riffle.experiments.research import Sweep as Sweep
    from riffle.experiments.research import simulate as simulate
    from riffle.experiments.research import sweep as sweep
    from riffle.node_client.environments.gymnasium import (
        GymnasiumEnvironment as GymnasiumEnvironment,
    )
    from riffle.node_client.environments.registry import make as make
    from riffle.node_client.environments.tabular import Declaration as Declaration
    from riffle.node_client.environments.tabular import Environment as Environment
    from riffle.node_client.environments.tabular import Modelled as Modelled
    from riffle.node_client.environments.tabular import TabularEnvironment as TabularEnvironment
    from riffle.node_client.environments.tabular import TabularMDP as TabularMDP
    from riffle.node_client.environments.tabular import stationary as stationary
    from riffle.node_client.participant import Participant as Participant
    from riffle.node_client.participant import UserLease as UserLease

_MODULES = {
    "riffle.common.accounting": "BatchEvent account calibrate",
    "riffle.common.mechanism.counters": "CounterLayout Sizes Support",
    "riffle.common.mechanism.parameters": "Guarantee Noise Padding",
    "riffle.common.mechanism.policy": "Mixture",
    "riffle.common.protocol.errors": "RiffleError",
    "riffle.coordinator.learning.learner": (
        "BatchCounts Deployment Learner LearnerSummary Problem StageResult"
    ),
    "riffle.coordinator.learners.own": "OwnLearner estimate",
    "riffle.deploy.operator": "Operator",
    "riffle.experiments.research": "RegretCurve Result Sweep simulate sweep",
    "riffle.node_client.environments.gymnasium": "GymnasiumEnvironment",
    "riffle.node_client.environments.registry": "make",
    "riffle.node_client.participant": "Participant UserLease",
    "riffle.node_client.environments.tabular": (
        "Declaration Environment Modelled TabularEnvironment TabularMDP stationary"
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'riffle' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
