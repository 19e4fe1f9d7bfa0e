"""Dependencies of routes: the check of the caller's token, and the coordinator with its parts."""

from operator import attrgetter
from typing import Annotated

from fastapi import Depends, Request

from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit, only
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import ShufflerClient
from riffle.coordinator.metrics import CoordinatorMetrics
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.settings import Settings
from riffle.coordinator.store.events import ChangeSignals
from riffle.coordinator.store.transactions import Store

OPERATOR = RateLimit(requests=200.0, reports=1.0, at_once=256)
"""The limits of each token. ``reports`` has no effect, because coordinators get no reports."""

OperatorOnly = only("operator")
MetricsOnly = only("operator", "metrics")


def make_authenticator(settings: Settings) -> Authenticator:
    """Returns an authenticator that knows the operator's token and, if set, the metrics token."""
    keys = {
        "operator": Credential(settings.operator_hash(), OPERATOR, "operator/coordinator_token")
    }
    if (reader := settings.metrics_hash()) is not None:
        keys["metrics"] = Credential(reader, OPERATOR, "operator/coordinator_metrics_token")
    return Authenticator(FailedAttempts(), keys)


def _part(path: str) -> object:
    """Returns the dependency that gives a route the attribute ``path`` of the app's state."""

    async def part(request: Request) -> object:
        return attrgetter(path)(request.app.state)

    return Depends(part)


CoordinatorPart = Annotated[Coordinator, _part("coordinator")]
StorePart = Annotated[Store, _part("coordinator.store")]
ShufflerPart = Annotated[ShufflerClient, _part("coordinator.exchange.shuffler")]
KeysPart = Annotated[KeyRing, _part("coordinator.keys")]
SignalsPart = Annotated[ChangeSignals, _part("coordinator.signals")]
MetricsPart = Annotated[CoordinatorMetrics, _part("coordinator.metrics")]
