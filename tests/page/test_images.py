"""The pictures of docs/page.md, taken and looked at always.

`make page-images` takes them of two longer runs of one spec, so with a band, and keeps them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import Browser, expect

from deploy.follow import TrueValues, follow
from deploy.local import LocalConfig, LocalNetwork
from deploy.operator import Operator
from deploy.presets import riverswim_run
from node_client.environments.tabular import riverswim

FOLDER = os.environ.get("RIFFLE_PAGE_IMAGES")
EPISODES = 4000
PICTURES = {
    "list-light": ("light", 1280, 300),
    "run-light": ("light", 1280, 2480),
    "run-dark": ("dark", 1280, 900),
    "run-phone": ("light", 360, 900),
}


@pytest.fixture(scope="module")
def learned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalNetwork, str, str]]:
    """A network, its run to look at, and what the page says of the run's band."""
    if FOLDER is None:
        run = request.getfixturevalue("small")["id"]
        yield request.getfixturevalue("network"), run, "One run of this spec"
        return
    folder = tmp_path_factory.mktemp("images")
    preset = riverswim_run("demo", horizon=6, episodes=EPISODES, epsilon=4.0)
    config = LocalConfig(folder, "RiverSwim-v0", preset.environment, nodes=4, max_epsilon=4.0)
    with LocalNetwork(config) as network, Operator.of(network.secrets) as operator:
        for _ in range(2):
            run = operator.create_run(preset.spec)["id"]
            watch = TrueValues(operator, run, riverswim(4, 6))
            follow(operator, run, EPISODES, folder, watch)
        yield network, run, "over 2 runs"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_taken(
    browser: Browser, learned: tuple[LocalNetwork, str, str], name: str, tmp_path: Path
) -> None:
    network, run, band = learned
    scheme, width, height = PICTURES[name]
    of_run = name.startswith("run")
    viewport = {"width": width, "height": height}
    context = browser.new_context(color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{network.coordinator_url}/" + (f"#/runs/{run}" if of_run else ""))
    page.get_by_label("Operator's token").fill(network.operator_token)
    page.get_by_role("button", name="Enter").click()
    expect(page.locator("tbody tr").first).to_be_visible()
    if of_run:
        expect(page.locator("#regret-chart canvas")).to_be_visible()
        expect(page.locator("#batches-table tbody tr").first).to_contain_text("yes")
        expect(page.locator("#truth")).to_contain_text(band)
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
