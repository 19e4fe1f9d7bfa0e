"""One owner and the coordinator against a user (finding A8), under every configuration we ship.

A batch is refused by a role, or the ledger's epsilon is at least the true one: that of the noise
which the others leave when all nodes of the largest owner add none, or tell the coordinator theirs.
The truth is brute force: every pair of outcomes of the two counters that a user moves; for the
twelve that a user of the presets moves, the losses are convolved, each rounded down to a grid.

Configurations come from the files that ship them. Those for loopback are tried elsewhere, since on
loopback all nodes are one person's.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from riffle.common.mechanism.parameters import Guarantee, Noise
from riffle.common.mechanism.policy import Mixture
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.signatures import sign_deposit
from riffle.common.protocol.verification import check_guarantee
from riffle.coordinator.batches.issue import Issue, Issuer
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.coordinator.specs import RunSpec
from riffle.deploy.load.run import LoadConfig, Target, assign
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.settings_files import OWNER, settings_of
from riffle.experiments.presets import PRESETS, preset
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.rules import Demands, accept_deposit
from riffle.shuffler.settings import Settings as ShufflerSettings
from tests.deploy.test_compose import COMPOSE, POSTGRES, environment
from tests.shuffler.world import COORDINATOR_KEY, public

DOCS = Path(__file__).parents[2] / "docs"
SECURITY = (DOCS / "security.md").read_text()
ROW = re.compile(r"^\| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
Row = tuple[float, float, int, int, int]
TABLE: list[Row] = [
    (float(gamma), float(share), int(smallest), int(owners), int(more))
    for gamma, share, smallest, owners, more in ROW.findall(SECURITY)
]
RUN, NOW = "ab" * 16, 1_800_000_000
BATCHES = (2, 20, 1_000)
ROLES = {
    "SHUFFLER": {"HOST": "shuffler.example", "DATA_DIR": "d", "SIGNING_KEY_FILE": "k"},
    "COORDINATOR": {
        "SHUFFLER_URL": "https://shuffler.example:8401",
        "DATA_DIR": "d",
        "SIGNING_KEY_FILE": "k",
        "ANALYZER_KEYS_DIR": "k",
        "SHUFFLER_TOKEN_FILE": "t",
        "OPERATOR_TOKEN_HASH_FILE": "t",
    },
    "NODE": {
        "SHUFFLER_URL": "https://shuffler.example:8401",
        "SHUFFLER_KEY_FILE": "k",
        "COORDINATOR_KEY_FILE": "k",
        "CREDENTIALS_FILE": "c",
        "STATE_DIR": "s",
        "SIMULATED_USERS": "true",
        "MAX_EPSILON": "1",
        "MAX_BETA": "1e-5",
        "MIN_DISHONEST_FRACTION": "0.05",
    },
}
"""Off loopback, everything that has a default left to it."""


def chosen(gamma: float, share: float, smallest_n: int) -> dict[str, str]:
    roles: dict[str, dict[str, float]] = {
        "SHUFFLER": {"SMALLEST_N": smallest_n},
        "COORDINATOR": {},
        "NODE": {},
    }
    for role, values in roles.items():
        values["MAX_OWNER_SHARE"] = share
        if role != "COORDINATOR":
            values["MIN_DISHONEST_FRACTION"] = gamma
    return {
        f"RIFFLE_{role}_{name}": str(value)
        for role, values in roles.items()
        for name, value in values.items()
    }


def loopback(config: LoopbackConfig) -> dict[str, str]:
    """The variables of a loopback network, without those that keep it on loopback."""
    network = LoopbackNetwork(config)
    roles = [network.environment(role) for role in ("shuffler", "coordinator", "node")]
    places = re.compile(r"_(HOST|PORT|SHUFFLER_URL)$")
    return {k: v for role in roles for k, v in role.items() if not places.search(k)}


COMPOSED = environment("shuffler") | environment("coordinator") | environment("nodes")
OVERLAY = re.findall(r"^ +(RIFFLE_\w+): ([^*\n]+)$", POSTGRES, re.MULTILINE)
ELSEWHERE = "https://shuffler.example:8401"
WRITTEN = {
    f"RIFFLE_{prefix}_{name}": value
    for role, prefix in (
        ("shuffler", "SHUFFLER"),
        ("coordinator", "COORDINATOR"),
        ("nodes", "NODE"),
    )
    for name, value in settings_of(role, ELSEWHERE, ELSEWHERE, Path()).items()
} | {f"RIFFLE_NODE_{name}": value for name, value in OWNER.items() if "USERS" not in name}
"""What `riffle network init` writes."""
GAMMA = RunSpec.model_fields["dishonest_fraction"].default
SHIPPED: dict[str, tuple[Mapping[str, str], float]] = {
    "compose": (COMPOSED, preset("demo").spec.dishonest_fraction),
    "compose with replicas": (COMPOSED | dict(OVERLAY), preset("demo").spec.dishonest_fraction),
    "defaults": ({}, GAMMA),
    "by hand": (WRITTEN, GAMMA),
    **{f"table {row}": (chosen(row[0], row[1], row[2]), row[0]) for row in TABLE},
    **{
        f"up {name}": (
            loopback(LoopbackConfig.of(each, Path(), each.nodes, 2, ("shuffle",))),
            each.spec.dishonest_fraction,
        )
        for name, each in PRESETS.items()
    },
}
SMALL = RunSpec(
    name="a8", environment="E", states=2, actions=1, horizon=1, episodes=1, epsilon=1.0, beta=1e-5,
    max_messages=1 << 16,
)  # fmt: skip
"""In its batches a user moves one counter up and one down: brute force is exact."""


def issued(gamma: float, share: float, n: int, base: RunSpec = SMALL) -> Issue:
    spec = base.model_copy(update={"dishonest_fraction": gamma, "max_messages": 1 << 16})
    policy = np.zeros((spec.horizon, spec.states), dtype=int)
    deployment = Deployment(0, "manual", Mixture.single(policy), n, None)
    issuer = Issuer("shuffler-1", lambda: "11" * 32, lambda: NOW, share)
    return issuer.issue(RUN, spec, deployment, index=0, step=0)


@dataclass(frozen=True)
class Roles:
    """The settings of one configuration."""

    shuffler: ShufflerSettings
    coordinator: CoordinatorSettings
    node: NodeSettings

    @classmethod
    def load(cls, variables: Mapping[str, str], patch: pytest.MonkeyPatch) -> "Roles":
        for role, needed in ROLES.items():
            for name, value in ({"SHUFFLER_ID": "shuffler-1"} | needed).items():
                patch.setenv(f"RIFFLE_{role}_{name}", value)
        for name, value in variables.items():
            patch.setenv(name, value)
        return cls(ShufflerSettings.load(), CoordinatorSettings.load(), NodeSettings.load())

    def issue(self, gamma: float, n: int, base: RunSpec = SMALL) -> tuple[BatchDescriptor, float]:
        """The descriptor that all roles accept, and the ledger's epsilon; else RemoteError."""
        issue = issued(gamma, self.coordinator.max_owner_share, n, base)
        s = self.shuffler
        demands = Demands(
            shuffler_id="shuffler-1",
            coordinator_key=public(COORDINATOR_KEY),
            guarantee=Guarantee(s.max_epsilon, s.max_beta, s.min_dishonest_fraction),
            trust_models=s.trust_models,
            smallest_n=s.smallest_n,
            test_entry=False,
            max_batch_bytes=s.max_batch_bytes,
            max_owner_share=s.max_owner_share,
        )
        signature = sign_deposit(COORDINATOR_KEY, issue.data)
        d = accept_deposit(issue.data, signature, issue.descriptor.batch_id, demands, NOW)
        node = self.node
        required = Guarantee(node.max_epsilon, node.max_beta, node.min_dishonest_fraction)
        check_guarantee(d.descriptor, required, node.max_owner_share)
        return d.descriptor, issue.spend.epsilon_upper


def true_epsilon(noise: Noise, honest: int, beta: float) -> float:
    """The epsilon of one counter up and one down under the noise of the honest reports."""
    N = noise.bits * honest
    if N == 0:
        return math.inf
    low, high = (int(stats.binom.ppf(q, N, noise.p)) for q in (1e-16, 1 - 1e-16))
    pmf = np.pad(stats.binom.pmf(np.arange(max(0, low - 30), min(N, high + 30) + 1), N, noise.p), 1)
    here, there = pmf[:-1], pmf[1:]  # P of c + Z and of c + 1 + Z at the same outcomes
    P, Q = np.outer(here, there), np.outer(there, here)

    def excess(epsilon: float) -> float:
        return float(np.maximum(P - math.exp(epsilon) * Q, 0.0).sum()) - beta

    if excess(0.0) <= 0.0:
        return 0.0
    return math.inf if excess(50.0) > 0.0 else float(optimize.brentq(excess, 0.0, 50.0))


def least_epsilon(noise: Noise, honest: int, beta: float, cells: int, grid: float = 1e-4) -> float:
    """A lower bound of the epsilon of ``cells`` counters up and as many down, by convolution."""
    N = noise.bits * honest
    low, high = (int(stats.binom.ppf(q, N, noise.p)) for q in (1e-16, 1 - 1e-16))
    P = stats.binom.pmf(np.arange(low, high + 1), N, noise.p)  # c + Z, where c + 1 + Z may be
    losses = np.floor(np.log(P[1:] / P[:-1]) / grid).astype(int)
    edge = int(np.abs(losses).max()) + 1
    up = np.bincount(losses + edge, P[1:], 2 * edge + 1)
    down = np.bincount(edge - losses - 1, P[:-1], 2 * edge + 1)
    size = 2 * cells * 2 * edge + 1
    power = np.fft.rfft(up, size) ** cells * np.fft.rfft(down, size) ** cells
    pmf = np.maximum(np.fft.irfft(power, size), 0.0)
    at = grid * (np.arange(size) - 2 * cells * edge)

    def excess(epsilon: float) -> float:
        above = at > epsilon
        return float((pmf[above] * -np.expm1(epsilon - at[above])).sum()) - beta

    return float(optimize.brentq(excess, 0.0, 50.0))


def batches(roles: Roles, gamma: float, base: RunSpec) -> dict[int, tuple[BatchDescriptor, float]]:
    """What all roles accept; the others are refused for their size, or their share above gamma."""
    accepted = {}
    for n in BATCHES:
        try:
            accepted[n] = roles.issue(gamma, n, base)
        except RemoteError as error:
            assert error.slug in ("batch-too-small", "invalid-spec", "weak-guarantee"), error
    return accepted


@pytest.mark.parametrize("name", SHIPPED)
def test_the_ledger_tells_the_truth_when_one_owner_is_silent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, gamma = SHIPPED[name]
    roles = Roles.load(variables, monkeypatch)
    below = 0.9 * roles.coordinator.max_owner_share
    assert batches(roles, below, SMALL) == {}, "a share above gamma was taken"
    accepted = batches(roles, gamma, SMALL)
    for n, (d, ledger) in accepted.items():
        noise = d.batch_noise
        assert isinstance(noise, Noise)
        silent = d.owner_slots  # what the shuffler lets one owner hold (tests/shuffler)
        assert silent >= 1
        assert true_epsilon(noise, n - silent, d.guarantee.beta) <= ledger * (1 + 1e-9) <= 1.0
    assert 1_000 in accepted, "a configuration that takes no batch is none"
    assert 2 not in accepted, "one owner's slot is half of a batch"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("silent", [True, False])
def test_the_ledger_of_a_preset_tells_the_truth(
    name: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = preset(name).spec
    roles = Roles.load(SHIPPED[f"up {name}"][0], monkeypatch)
    for n, (d, ledger) in batches(roles, spec.dishonest_fraction, spec).items():
        noise = d.batch_noise
        assert isinstance(noise, Noise)
        honest = n - d.owner_slots * silent
        truth = least_epsilon(noise, honest, d.guarantee.beta, spec.horizon)
        assert (0.97 if silent else 0.9) * ledger <= truth <= ledger <= 1.0


def test_what_a_load_test_starts_is_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = preset("riverswim").spec
    with pytest.raises(LocalError, match="off loopback"):
        Roles.load(loopback(LoopbackConfig(tmp_path, spec.environment)), monkeypatch)
    target = Target(tmp_path, "https://shuffler.example:8401", "https://coordinator.example:8400")
    (assigned,) = assign(LoadConfig(tmp_path, 1, 1.0, 1.0), target, spec, [])
    node = assigned.settings
    assert node.max_owner_share <= node.min_dishonest_fraction == spec.dishonest_fraction


def test_brute_force_finds_the_old_defaults() -> None:
    """Compose shipped a share of 0.25 above gamma 0; a batch of 2 let one node have one slot."""
    found = []
    for n, silent in ((2, 1), (20, 5), (1_000, 250)):
        issue = issued(0.0, 1.0, n)
        noise = issue.descriptor.batch_noise
        assert isinstance(noise, Noise)
        found.append(true_epsilon(noise, n - silent, 1e-5) / issue.spend.epsilon_upper)
    assert found[0] > 1.3 and min(found) > 1.1


@pytest.mark.parametrize("unsafe", [(0.05, 0.1, 20), (0.1, 1.0, 10), (0.1, 0.1, 9), (0.0, 0.1, 20)])
def test_an_unsafe_row_would_be_refused(
    unsafe: tuple[float, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LocalError, match="off loopback"):
        Roles.load(chosen(*unsafe), monkeypatch)


def owners_for(share: float, smallest: int) -> int:
    """The fewest owners that fill a batch of every size from ``smallest`` on."""
    changes: dict[str, Any] = {"owner_share": share, "guarantee": Guarantee(1.0, 0.1, share)}
    slots = {
        n: BatchDescriptor.model_construct(n=n, **changes).owner_slots
        for n in range(smallest, smallest + math.ceil(2 / share))
    }
    return max(-(-n // held) for n, held in slots.items())


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_owners_of_the_table_fill_every_batch(row: Row) -> None:
    gamma, share, smallest, owners, at_a_thousand = row
    assert share <= gamma
    assert owners == owners_for(share, smallest)
    assert at_a_thousand == owners_for(share, 1_000)


def test_compose_has_owners_enough() -> None:
    nodes = re.search(r"--owners, \"\$\{RIFFLE_NODES:-(\d+)\}\"", COMPOSE)
    assert nodes is not None
    shuffler = environment("shuffler")
    share, smallest = (
        float(shuffler["RIFFLE_SHUFFLER_MAX_OWNER_SHARE"]),
        int(shuffler["RIFFLE_SHUFFLER_SMALLEST_N"]),
    )
    assert int(nodes[1]) >= owners_for(share, smallest)
    assert len(TABLE) >= 4
