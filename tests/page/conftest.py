"""A real network with a year of runs in its store, and a real browser that looks at it.

The browser is Debian's Chromium, headless, through Playwright. Without it these tests are skipped,
unless RIFFLE_REQUIRE_CHROMIUM is set. Every test also fails on a console error, an uncaught
exception, a refusal by the Content-Security-Policy or a request to anywhere but the coordinator.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from riffle.coordinator.app import prepare_directory
from riffle.coordinator.batches.counts import CountCheck
from riffle.coordinator.specs import RunSpec
from riffle.deploy.follow import TrueValues, follow
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator
from riffle.node_client.environments.registry import Parameter
from riffle.node_client.environments.tabular import riverswim
from tests.page.seed import seed

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SMALL = {
    "environment": "RiverSwim-v0",
    "states": 3,
    "actions": 2,
    "horizon": 2,
    "epsilon": 4.0,
    "beta": 1e-5,
}
RUNS, LONG = 49, 1200
CHECKS = {0: CountCheck("start", 1.25, 0.5), 2: CountCheck("total", -9.75, 1e-12)}
"""What the checks of a seeded run's counts found: batch 0 is plausible, 1 unchecked, 2 marked."""
SECONDS = 60  # a page is given, on a busy machine
Open = Callable[..., Page]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        assert not os.environ.get("RIFFLE_REQUIRE_CHROMIUM"), "chromium is required, and not here"
        pytest.skip("there is no chromium on this machine")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        expect.set_options(timeout=SECONDS * 1000)
        yield found
        found.close()


@pytest.fixture(scope="package")
def network(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoopbackNetwork]:
    folder = tmp_path_factory.mktemp("network")
    data = folder / "data" / "coordinator"
    data.parent.mkdir()
    prepare_directory(data)
    url = f"sqlite:///{data / 'coordinator.sqlite'}"
    seed(url, runs=1, deployments=3, name="doubtful", checks=CHECKS)
    seed(url, runs=RUNS, deployments=8)
    seed(url, runs=1, deployments=LONG, name="long", enumerated=False)
    environment: dict[str, Parameter] = {"states": 3, "horizon": 2}
    config = LoopbackConfig(folder, "RiverSwim-v0", environment, nodes=2, max_epsilon=4.0)
    with LoopbackNetwork(config) as found:
        yield found


@pytest.fixture(scope="package")
def operator(network: LoopbackNetwork) -> Iterator[Operator]:
    with Operator.of(network.secrets) as found:
        yield found


@pytest.fixture(scope="package")
def small(operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of real nodes, its true values supplied as ``riffle up`` does."""
    spec = RunSpec.model_validate({**SMALL, "name": "small", "episodes": 600})
    run = operator.create_run(spec)
    watch = TrueValues(operator, run["id"], riverswim(3, 2))
    follow(operator, run["id"], 600, tmp_path_factory.mktemp("small"), watch)
    found = operator.run(run["id"])
    assert found["state"] == "finished", found["message"]
    return found


@pytest.fixture
def manual(operator: Operator) -> Iterator[dict[str, Any]]:
    """A run that waits for deployments by hand."""
    spec = {**SMALL, "name": "by-hand", "learner": "manual", "episodes": 500}
    run = operator.create_run(RunSpec.model_validate(spec))
    yield run
    if operator.run(run["id"])["state"] == "running":
        operator.stop(run["id"])


class Watch:
    """What a page must not do, noted as it happens."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.faults: list[str] = []
        self.expected: tuple[str, ...] = ()

    def message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.note(message.text)

    def error(self, error: Any) -> None:
        self.note(str(error))

    def request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "blob:" + self.origin)):
            self.note(f"asked for {request.url}")
        if "token" in request.url.rpartition("/")[2].lower():
            self.note(f"a token in {request.url}")

    def note(self, fault: str) -> None:
        if not any(words in fault for words in self.expected):
            self.faults.append(fault)


@pytest.fixture
def watch(network: LoopbackNetwork) -> Iterator[Watch]:
    found = Watch(network.coordinator_url)
    yield found
    assert found.faults == []


@pytest.fixture
def opened(browser: Browser, network: LoopbackNetwork, watch: Watch) -> Iterator[Open]:
    """Opens the page in a fresh profile, signed in, at a run or at the list."""
    contexts = []

    def open_page(
        run: str | None = None,
        *,
        width: int = 1280,
        scheme: str = "light",
        token: str | None = None,
    ) -> Page:
        viewport = {"width": width, "height": 900}
        context = browser.new_context(color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(SECONDS * 1000)
        page = context.new_page()
        page.on("console", watch.message)
        page.on("pageerror", watch.error)
        page.on("request", watch.request)
        page.goto(f"{network.coordinator_url}/" + (f"#/runs/{run}" if run else ""))
        page.get_by_label("Operator's token").fill(token or network.operator_token)
        page.get_by_role("button", name="Enter").click()
        return page

    yield open_page
    for context in contexts:
        context.close()
