"""The demonstration page in Chromium, at a phone's width: one visitor among simulated people."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from examples.hints_page import ready
from riffle.deploy.operator import Operator
from tests.page.conftest import SECONDS, Watch

PEOPLE, WIDTH = 39, 400
KEPT = """new Promise((done) => {
  const opening = indexedDB.open("riffle-demo");
  opening.onsuccess = () => {
    const store = opening.result.transaction("participations").objectStore("participations");
    const all = store.getAll();
    all.onsuccess = () => done(JSON.stringify(all.result));
  };
})"""
"""All that the page keeps on the device."""
Network = tuple[str, Operator, str]


@pytest.fixture
def network(
    dist: Path, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Network]:
    monkeypatch.setenv("RIFFLE_SHUFFLER_ALLOWED_ORIGINS", "[]")
    with ready(tmp_path, PEOPLE, 1) as found:
        yield found


@pytest.fixture
def page(browser: Browser, network: Network) -> Iterator[Page]:
    """The page; a fault on its console, or a request to another host, fails the test."""
    watch = Watch("http://127.0.0.1:")
    size = {"width": WIDTH, "height": 800}
    with browser.new_context(viewport=size, color_scheme="dark", has_touch=True) as context:  # type: ignore[arg-type]
        found = context.new_page()
        found.set_default_timeout(SECONDS * 1000)
        found.on("console", watch.message)
        found.on("pageerror", watch.error)
        found.on("request", watch.request)
        yield found
    assert watch.faults == []


def test_a_visitors_choices_complete_a_batch_with_python_nodes(
    page: Page, network: Network
) -> None:
    url, operator, run = network
    page.goto(url)
    expect(page.get_by_role("heading", name="What leaves your device")).to_be_visible()
    assert page.locator("#leaves").inner_text().count(".") == 3
    page.get_by_role("button", name="Take part").click()
    expect(page.get_by_text("Riddle 1 of 3")).to_be_visible()
    page.get_by_role("button", name="A towel").click()
    expect(page.get_by_text("Riddle 2 of 3")).to_be_visible()
    page.reload()  # the first answer is on the device
    expect(page.get_by_text("Riddle 2 of 3")).to_be_visible()
    page.get_by_role("button", name="A map").click()
    expect(page.get_by_text("Riddle 3 of 3")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
    page.get_by_role("button", name="A stamp").click()
    expect(page.get_by_role("heading", name="Thank you")).to_be_focused()
    expect(page.get_by_text("Your batch is complete")).to_be_visible()
    deployment = operator.wait(run, 0)
    assert deployment["state"] == "counted", deployment
    flow = operator.conservation(run)
    assert flow["balanced"] is True and flow["failed"] == 0, flow
    page.reload()  # she is not asked again
    expect(page.get_by_role("heading", name="Thank you")).to_be_visible()
    page.get_by_text("What this device keeps").click()
    expect(page.get_by_text("accepted")).to_be_visible()
    kept = page.evaluate(KEPT)
    assert '"episode":null' in kept
    assert "policy" not in kept
