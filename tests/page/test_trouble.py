"""Batches that do not go well, on the page: how each ended, and what a complete one lost."""

import signal
import time
from typing import Any

import pytest
from playwright.sync_api import expect

from riffle.coordinator.specs import ManualDeployment, RunSpec
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.operator import Operator
from tests.page.conftest import SMALL, Open
from tests.page.node import HandNode
from tests.page.test_page import cells

pytestmark = pytest.mark.long

N, SENT, LIARS = 100, 25, 6  # gamma is 5 %
SECONDS = 20  # for all that is done while a batch is open, on a busy machine


def test_a_short_and_a_rejected_batch_are_shown(
    opened: Open, network: LoopbackNetwork, operator: Operator
) -> None:
    """Deployment 0 stays short and expires; its second try, 1, has reports that nobody can open.

    The network's own nodes stand still meanwhile, so that no report comes but those sent here.
    """
    spec = {**SMALL, "name": "trouble", "learner": "manual", "episodes": N}
    spec |= {"batch_seconds": SECONDS, "reissues": 1}
    nodes = network.processes["node"]
    nodes.send_signal(signal.SIGSTOP)
    try:
        run = operator.create_run(RunSpec.model_validate(spec))
        policy = ((1, 1, 1), (1, 1, 1))
        row = operator.deploy(run["id"], ManualDeployment(policy=policy, episodes=N))
        wait_for(operator, run["id"], "open", 0)
        with HandNode(network, row["batch_id"]) as node:
            *leases, spoiled, slow = node.lease(SENT + 2)
            kept = [(lease, node.report()) for lease in leases]
            assert node.send([*kept, kept[0], (spoiled, node.noise())]) == [
                *["accepted"] * SENT,
                "replayed",
                "wrong-key",
            ]
            page = opened(run["id"])
            fill = page.get_by_role("meter", name="Fill of the open batch, in tenths")
            expect(fill).to_have_js_property("value", 2)
            said = page.locator("#batches").get_by_role("status")
            expect(page.locator("#answer-title")).to_have_text("None yet")
            expect(page.locator("#next")).to_contain_text("If batch 0 is not full by ")
            expect(said).to_have_text(f"Batch 0, for {N} reports: at least 2 tenths full.")
            detail = operator.deployment(run["id"], 0)
            time.sleep(max(0.0, detail["expires_at"] + 0.05 - time.time()))
            assert node.send([(slow, node.report())]) == ["late"]
        wait_for(operator, run["id"], "open", 1)
        again = operator.deployments(run["id"])[1]
        with HandNode(network, again["batch_id"]) as node:
            garbled = [(lease, node.garbled()) for lease in node.lease(LIARS)]
            assert node.send(garbled) == ["accepted"] * LIARS
    finally:
        nodes.send_signal(signal.SIGCONT)
    expect(page.locator("#run-state")).to_have_text("failed")
    rows = page.locator("#batches-table tbody tr")
    expect(rows.nth(0)).to_contain_text("rejected")
    expect(rows.nth(1).locator("td").last).to_have_text("yes")
    messages = operator.conservation(run["id"])["batches"][1]["shuffler"]["messages_a_report"]
    expect(rows.nth(0)).to_contain_text(f"{(N - LIARS) * messages:,}")
    rejected, abandoned = cells(page.locator("#batches-table"))
    assert abandoned[2:] == ["abandoned", "100", *["\u2013"] * 6, "yes"]
    opened_messages = f"{(N - LIARS) * messages:,}"
    sent = ["100", "100", opened_messages, f"{LIARS * messages:,}"]
    assert rejected[2:] == ["rejected", "100", *sent, "\u221e", "\u2013", "yes"]
    expect(page.locator("#answer-title")).to_have_text("None: the run failed")
    expect(page.locator("#next")).to_contain_text(
        "have not reported yet, then start a new run (riffle run)."
    )
    expect(page.locator("#answer")).to_contain_text(
        "deployment 1 (n=100) was rejected with 6 dishonest reports"
    )


def wait_for(operator: Operator, run: str, state: str, index: int) -> dict[str, Any]:
    """A run's deployment, once it is in this state."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rows = operator.deployments(run)
        if len(rows) > index and rows[index]["state"] == state:
            return rows[index]
        time.sleep(0.02)
    raise AssertionError(f"deployment {index} is not {state}: {rows}")
