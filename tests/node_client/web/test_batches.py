"""The node in TypeScript fills whole batches of live services, from Node.js and from Chromium.

Chromium passes the protocol's vectors, too. The episodes are deterministic, so the true counts are
known. What is left of the private counts is noise, and its law is that of the descriptor:
Binomial(n bits, p) on each counter.
"""

import functools
import json
import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from scipy import stats

from riffle.coordinator.specs import ManualDeployment, RunSpec
from riffle.deploy.network import secrets as network_secrets
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator
from tests.node_client.web.conftest import WEB

Counts = np.ndarray[Any, np.dtype[np.float64]]
ROOT = Path(__file__).parents[3]
X, A, H, PEOPLE = 3, 2, 2, 300
LEVEL = 1e-6
POLICY = ((0, 1, 0), (1, 0, 1))
TABLES = {
    "P": [[np.eye(X)[[(x + 1 + a) % X for a in range(A)]].tolist() for x in range(X)]] * H,
    "r": [[[float(a) for a in range(A)]] * X] * H,
    "d1": [1.0, 0.0, 0.0],
}
"""Action a leads from x to x + 1 + a, modulo X, and gives the reward a."""
SERVE = """async ({tables, users, settings}) => {
    const {memoryDiary, readSettings, serve, TabularEnvironment, workerSealer} =
        await import("/index.js");
    const told = [];
    const options = {
        settings: readSettings(settings), diary: memoryDiary(), seal: workerSealer(),
        tell: (event) => told.push(event),
    };
    window.stop = new AbortController();
    window.told = told;
    window.served = serve(new TabularEnvironment(tables), users, options, window.stop.signal);
}"""
VECTORS = """async () => {
    const {vectorTests} = await import("/tests.js");
    const tests = vectorTests(async (file) => (await fetch(`/vectors/${file}`)).text());
    for (const [name, run] of tests) await run();
    return tests.map(([name]) => name).sort();
}"""
SPEC = RunSpec(
    name="by-hand",
    learner="manual",
    environment="Choices-v0",
    states=X,
    actions=A,
    horizon=H,
    episodes=2 * PEOPLE,
    epsilon=4.0,
    beta=1e-5,
)


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def files_served(folder: Path) -> Iterator[str]:
    """Serves a folder on loopback; gives its origin."""
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class PageNetwork(LoopbackNetwork):
    """A network whose shuffler lets the scripts of one origin be nodes."""

    origin: str

    def _shuffler(self, name: str) -> dict[str, object]:
        return super()._shuffler(name) | {"ALLOWED_ORIGINS": json.dumps([self.origin])}

    def owner(self) -> dict[str, Any]:
        """Returns the settings of a newly enrolled node."""
        folder, file = self.secrets / "nodes", self.secrets / f"{secrets.token_hex(4)}.json"
        network_secrets.enrol(self.secrets, self.shuffler_url, [file.stem], 1, PEOPLE, file=file)
        pins = (folder / "analyzer_keys").read_text().splitlines()
        return {
            "shuffler_url": self.shuffler_url,
            "shuffler_id": self.environment("node")["RIFFLE_NODE_SHUFFLER_ID"],
            "shuffler_key": (folder / "shuffler_key").read_text().strip(),
            "coordinator_key": (folder / "coordinator_key").read_text().strip(),
            "analyzer_keys": [pin.split("#")[0].strip() for pin in pins],
            "node_token": json.loads(file.read_text())[0]["token"],
            "environment": SPEC.environment,
            "max_epsilon": SPEC.epsilon,
            "max_beta": SPEC.beta,
            "min_dishonest_fraction": SPEC.dishonest_fraction,
        }


@pytest.fixture(scope="module")
def origin(dist: Path) -> Iterator[str]:
    with files_served(dist) as found:
        yield found


@pytest.fixture(scope="module")
def network(origin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageNetwork]:
    folder = tmp_path_factory.mktemp("network")
    config = LoopbackConfig(folder, SPEC.environment, nodes=0, max_epsilon=SPEC.epsilon)
    found = PageNetwork(config)
    found.origin = origin
    with found:
        yield found


def users() -> list[str]:
    return [secrets.token_hex(16) for _ in range(PEOPLE)]


def filled(network: PageNetwork) -> None:
    """Deploys a batch, waits until it is counted, and compares its counts with the truth."""
    with Operator.of(network.secrets, network.coordinator_url) as operator:
        run = operator.create_run(SPEC)["id"]
        operator.deploy(run, ManualDeployment(policy=POLICY, episodes=PEOPLE))
        operator.wait(run, 0)
        done = operator.deployment(run, 0)
        kept = operator.conservation(run)
        operator.stop(run)
    assert done["state"] == "counted", done
    assert (kept["opened"], kept["failed"]) == (PEOPLE * done["messages"], 0)
    compare(done)


def truth() -> tuple[Counts, Counts]:
    """Returns what 300 people do: transitions (H, X, A, X), and rewards (H, X, A)."""
    transitions, x = np.zeros((H, X, A, X)), 0
    for h in range(H):
        a = POLICY[h][x]
        y = (x + 1 + a) % X
        transitions[h, x, a, y] = PEOPLE
        x = y
    return transitions, transitions.sum(axis=3) * np.arange(A)


def compare(done: dict[str, Any]) -> None:
    """A transition's count is the sum of two counters; a reward's, of X counters."""
    transitions, rewards = truth()
    for name, true, counters in (("transitions", transitions, 2), ("rewards", rewards, X)):
        bits = counters * PEOPLE * done["noise"]["bits"]
        law = stats.binom(bits, done["noise"]["p_numerator"] / 2 ** done["noise"]["p_log2"])
        added = np.array(done["counts"][name]) - true + law.mean()
        assert np.abs(added - np.rint(added)).max() < 1e-6, "noise is whole"
        low, high = law.interval(1 - LEVEL / added.size)
        assert ((low <= np.rint(added)) & (np.rint(added) <= high)).all(), (name, added)
        spread = ((added - law.mean()) ** 2).sum() / law.var()
        assert LEVEL / 2 < stats.chi2.cdf(spread, added.size) < 1 - LEVEL / 2, (name, spread)


def test_node_js_fills_a_batch(network: PageNetwork, dist: Path, tmp_path: Path) -> None:
    for name, value in (("environment", TABLES), ("users", {"node": users()})):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    settings = network.owner() | {
        "users_file": str(tmp_path / "users.json"),
        "environment_parameters": {"path": str(tmp_path / "environment.json")},
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    command = ["node", str(dist / "cli.js"), "--settings", str(tmp_path / "settings.json")]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as node:
        try:
            filled(network)
        finally:
            node.terminate()
    assert node.returncode == 0, (tmp_path / "log").read_text()


def test_chromium_fills_a_batch(network: PageNetwork, origin: str, browser: Browser) -> None:
    page = browser.new_page()
    page.goto(f"{origin}/index.js")
    page.evaluate(SERVE, {"tables": TABLES, "users": users(), "settings": network.owner()})
    try:
        filled(network)
        page.evaluate("async () => { window.stop.abort(); await window.served; }")
    finally:
        page.close()


def test_chromium_passes_the_vectors(dist: Path, browser: Browser, tmp_path: Path) -> None:
    esbuild = [str(WEB / "node_modules" / ".bin" / "esbuild"), "--bundle", "--format=esm"]
    out = f"--outfile={tmp_path / 'tests.js'}"
    subprocess.run(
        [*esbuild, "--log-level=warning", str(WEB / "test" / "vectors.ts"), out], check=True
    )
    (tmp_path / "vectors").symlink_to(ROOT / "docs" / "vectors")
    with files_served(tmp_path) as origin:
        page = browser.new_page()
        page.goto(f"{origin}/tests.js")
        passed = page.evaluate(VECTORS)
        page.close()
    assert passed == sorted(file.name for file in (ROOT / "docs" / "vectors").iterdir())
