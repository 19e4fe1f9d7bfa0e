"""The pictures of docs/page.md, taken and looked at always.

`make page-images` takes them of two longer runs of one spec, so with a band, of three stages at
least, and keeps them. RIFFLE_PAGE_SHOTS names a folder for pictures of every state of a run, wide
and narrow, light and dark, for somebody to judge.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import Browser, Page, expect

from riffle.coordinator.app import prepare_directory
from riffle.coordinator.specs import ManualDeployment, RunSpec
from riffle.deploy.follow import TrueValues, follow
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator
from riffle.experiments.presets import riverswim_run
from riffle.node_client.environments.tabular import riverswim
from tests.page.conftest import SECONDS
from tests.page.node import HandNode
from tests.page.seed import seed, seeded_id
from tests.page.test_trouble import wait_for

FOLDER = os.environ.get("RIFFLE_PAGE_IMAGES")
SHOTS = os.environ.get("RIFFLE_PAGE_SHOTS")
EPISODES, FIRST_STAGE, STAGES = 6000, 200, 3
COUNTED, OPEN, SENT = 300, 100, 40
PICTURES = {
    "list-light": ("light", 1280, 340),
    "run-light": ("light", 1280, 1450),
    "run-dark": ("dark", 1280, 900),
    "run-phone": ("light", 360, 900),
    "hand-light": ("light", 1280, 900),
}


class Shown(NamedTuple):
    """A network, its run to look at, and what the page says of the run's band."""

    network: LoopbackNetwork
    run: str
    band: str


@pytest.fixture(scope="module")
def learned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shown]:
    if FOLDER is None:
        run = request.getfixturevalue("small")["id"]
        yield Shown(request.getfixturevalue("network"), run, "One run of this spec")
        return
    folder = tmp_path_factory.mktemp("images")
    preset = riverswim_run("demo", horizon=6, episodes=EPISODES, epsilon=4.0)
    options = {**preset.spec.options, "first_stage": FIRST_STAGE}
    spec = RunSpec.model_validate(dict(preset.spec) | {"options": options})
    config = LoopbackConfig(folder, "RiverSwim-v0", preset.environment, nodes=4, max_epsilon=4.0)
    with LoopbackNetwork(config) as network, Operator.of(network.secrets) as operator:
        for _ in range(2):
            run = operator.create_run(spec)["id"]
            watch = TrueValues(operator, run, riverswim(4, 6))
            follow(operator, run, EPISODES, folder, watch)
        assert len(operator.stages(run)) >= STAGES
        yield Shown(network, run, "over 2 runs")


@pytest.fixture(scope="module")
def by_hand(learned: Shown) -> Iterator[str]:
    """A manual run of the same environment, one batch counted and one that stays partly filled."""
    with Operator.of(learned.network.secrets) as operator:
        asked = operator.run(learned.run)["spec"] | {"name": "by-hand", "learner": "manual"}
        asked |= {"run_id": None, "options": {}, "support": None, "episodes": 2 * COUNTED}
        run = operator.create_run(RunSpec.model_validate(asked))["id"]
        policy = ((1,) * asked["states"],) * asked["horizon"]
        operator.deploy(run, ManualDeployment(policy=policy, episodes=COUNTED))
        operator.wait(run, 0)
        nodes = learned.network.processes["node"]
        nodes.send_signal(signal.SIGSTOP)
        try:
            row = operator.deploy(run, ManualDeployment(policy=policy, episodes=OPEN))
            wait_for(operator, run, "open", 1)
            with HandNode(learned.network, row["batch_id"]) as node:
                node.send([(lease, node.report()) for lease in node.lease(SENT)])
            yield run
        finally:
            nodes.send_signal(signal.SIGCONT)
        operator.stop(run)


def drawn(page: Page, band: str) -> None:
    """Wait for all of a run; a kept picture shows a stage's policy that changed."""
    if page.locator("#truth > details[open]").count():  # folded on a phone
        expect(page.locator("#regret-chart canvas")).to_be_visible()
    expect(page.locator("#batches-table tbody tr").first).to_contain_text("yes")
    expect(page.locator("#truth")).to_contain_text(band)
    if FOLDER is None:
        return
    for stage in range(STAGES, 1, -1):
        page.get_by_label("Policy of").select_option(f"s{stage - 1}")
        expect(page.locator("#policy-picture-text")).to_contain_text(f"Stage {stage}")
        if page.locator(".policy-svg .changed").count():
            return
    raise AssertionError("no stage's policy differs from the one before")


def filling(page: Page) -> None:
    """Wait for a run by hand: its form, and how full its batch is."""
    expect(page.get_by_role("button", name="Deploy", exact=True)).to_be_visible()
    expect(page.locator("#batches").get_by_role("status")).to_contain_text("at least 4 tenths")
    expect(page.locator("#batches-table tbody tr").last).to_contain_text("yes")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_taken(
    browser: Browser, learned: Shown, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    network, run, band = learned
    scheme, width, height = PICTURES[name]
    what = name.partition("-")[0]
    address = {"run": f"#/runs/{run}", "list": ""}.get(what)
    if address is None:
        address = f"#/runs/{request.getfixturevalue('by_hand')}"
    viewport = {"width": width, "height": height}
    context = browser.new_context(color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
    context.set_default_timeout(SECONDS * 1000)
    page = context.new_page()
    page.goto(f"{network.coordinator_url}/{address}")
    page.get_by_label("Operator's token").fill(network.operator_token)
    page.get_by_role("button", name="Enter").click()
    expect(page.locator("#answer, table.runs").first).to_be_visible()
    if what == "run":
        drawn(page, band)
    elif what == "hand":
        filling(page)
    else:
        expect(page.locator("table.runs tbody tr").first).to_be_visible()
    folder = Path(FOLDER or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"page-{name}.png")
    context.close()
    picture = np.asarray(imread(folder / f"page-{name}.png"))[..., :3]
    assert picture.shape == (height, width, 3)
    assert (picture[0, 0].mean() > 0.5) == (scheme == "light")
    inked = (picture != picture[:, :1]).any(axis=(1, 2)).mean()
    assert inked > 1 / 3, f"only {inked:.0%} of the lines show anything"
    shades = len(np.unique(picture[::3] @ np.array([1.0, 256.0, 65536.0])))
    assert shades > 50, "text and charts have many shades, a blank page has one"


@contextmanager
def standing_still(network: LoopbackNetwork) -> Iterator[None]:
    """The network's nodes do nothing meanwhile."""
    nodes = network.processes["node"]
    nodes.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        nodes.send_signal(signal.SIGCONT)


def shoot(browser: Browser, network: LoopbackNetwork, name: str, run: str) -> None:
    """Takes a run's pictures at one time, in both widths and both colour schemes."""
    pages = {}
    for width, scheme in product((1280, 400), ("light", "dark")):
        context = browser.new_context(
            color_scheme=scheme,  # type: ignore[arg-type]
            viewport={"width": width, "height": 800},
        )
        page = pages[f"{name}-{width}-{scheme}"] = context.new_page()
        page.goto(f"{network.coordinator_url}/" + (f"#/runs/{run}" if run else ""))
        page.get_by_label("Operator's token").fill(network.operator_token)
        page.get_by_role("button", name="Enter").click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        if run:
            expect(page.locator("#figures")).to_contain_text("Privacy")
    page.wait_for_timeout(5000)
    for file, page in pages.items():
        page.mouse.move(0, 0)  # so that no row is highlighted
        page.screenshot(path=Path(SHOTS or "") / f"{file}.png", full_page=True)
        page.context.close()


@pytest.mark.skipif(SHOTS is None, reason="RIFFLE_PAGE_SHOTS names no folder")
@pytest.mark.timeout(900)
def test_every_state_of_a_run_is_shot(browser: Browser, tmp_path: Path) -> None:
    data = tmp_path / "data" / "coordinator"
    data.parent.mkdir()
    prepare_directory(data)
    seed(f"sqlite:///{data / 'coordinator.sqlite'}", runs=1, deployments=2000, name="year")
    preset = riverswim_run("demo", horizon=6, episodes=EPISODES, epsilon=4.0)
    options = {**preset.spec.options, "first_stage": FIRST_STAGE}
    fields = dict(preset.spec)  # keeps documents as they are
    config = LoopbackConfig(tmp_path, "RiverSwim-v0", preset.environment, nodes=4, max_epsilon=4.0)
    with LoopbackNetwork(config) as network, Operator.of(network.secrets) as operator:

        def create(**changes: object) -> str:
            spec = RunSpec.model_validate(fields | {"options": options} | changes)
            return str(operator.create_run(spec)["id"])

        shoot(browser, network, "year", seeded_id(0, "year"))
        with standing_still(network):
            empty = create(name="empty")
            wait_for(operator, empty, "open", 0)
            shoot(browser, network, "empty", empty)
            operator.stop(empty)
            failed = create(name="failed", batch_seconds=5, reissues=0)
            for event in operator.events(failed):
                if event["kind"] == "run_failed":
                    break
            shoot(browser, network, "failed", failed)
        by_hand = create(name="by-hand", learner="manual", options={}, episodes=2 * COUNTED)
        policy = ((1,) * 4,) * 6
        operator.deploy(by_hand, ManualDeployment(policy=policy, episodes=COUNTED))
        operator.wait(by_hand, 0)
        shoot(browser, network, "by-hand", by_hand)
        operator.stop(by_hand)
        learned = create()
        watch = TrueValues(operator, learned, riverswim(4, 6))
        for event in operator.events(learned):
            watch(event)
            data = event["data"]
            exploring = data.get("stage") == 2
            if event["kind"] == "deployment_issued" and (exploring or data["purpose"] == "exploit"):
                with standing_still(network):
                    wait_for(operator, learned, "open", data["index"])
                    shoot(browser, network, "exploring" if exploring else "exploiting", learned)
        shoot(browser, network, "finished", learned)
        shoot(browser, network, "list", "")
