"""A page whose visitors take part in a batch, together with simulated people, and its network.

    make web
    python examples/hints_page.py --people 299 --visitors 1

It prints the page's address on this machine, waits for the visitors, and prints what was learned:
how often people were right after each kind of hint. Phones need https: see the how-tos.
"""

import argparse
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from riffle.common.protocol.verification import read_pins
from riffle.coordinator.specs import RunSpec
from riffle.deploy.network import secrets
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator

BUILT = Path(__file__).parents[1] / "node_client" / "web" / "dist" / "demo"
STATES, HINTS, RIDDLES = 3, 2, 3  # as in node_client/web/demo/riddles.ts
EPSILON, BETA = 1.0, 1e-5
SUCCESS = ((0.5, 0.8), (0.6, 0.7), (0.4, 0.9))
"""The probability that a simulated person is right, by riddle and hint (a letter, a clue)."""


def people() -> dict[str, Any]:
    """Returns the simulated people as the document of an MDP."""
    P = [[[[0, p, 1 - p] for p in row] for _ in range(STATES)] for row in SUCCESS]
    return {"P": P, "r": [[list(row)] * STATES for row in SUCCESS], "d1": [1, 0, 0]}


class Files(SimpleHTTPRequestHandler):
    """Serves files, without a log."""

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@contextmanager
def page(folder: Path) -> Iterator[tuple[str, Path]]:
    """Serves a copy of the built page; yields its origin and folder."""
    shutil.copytree(BUILT, folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", folder
        finally:
            server.shutdown()


def settings(network: LoopbackNetwork, visitors: int) -> dict[str, Any]:
    """Enrols the page as a node with an owner of its own; returns its settings and token."""
    own, nodes = network.config.folder / "page.json", network.secrets / "nodes"
    secrets.enrol(network.secrets, network.shuffler_url, ["page"], 1, visitors, file=own)
    keys = sorted(read_pins(nodes / "analyzer_keys") or ())
    return {
        "shuffler_url": network.shuffler_url,
        "shuffler_id": "shuffler",
        "shuffler_key": (nodes / "shuffler_key").read_text().strip(),
        "coordinator_key": (nodes / "coordinator_key").read_text().strip(),
        "analyzer_keys": keys,
        "node_token": json.loads(own.read_text())[0]["token"],
        "environment": "File-v0",
        "max_epsilon": EPSILON,
        "max_beta": BETA,
        "min_dishonest_fraction": 0,
    }


@contextmanager
def ready(folder: Path, simulated: int, visitors: int) -> Iterator[tuple[str, Operator, str]]:
    """Runs network, nodes and page with an open batch; yields page URL, operator and run id."""
    table = folder / "people.json"
    table.write_text(json.dumps(people()))
    parameters = {"path": str(table)}
    config = LoopbackConfig(folder, "File-v0", parameters, nodes=0, max_epsilon=EPSILON)  # type: ignore[arg-type]
    with page(folder / "page") as (origin, files):
        os.environ["RIFFLE_SHUFFLER_ALLOWED_ORIGINS"] = json.dumps([origin])
        with LoopbackNetwork(config) as network, Operator.of(network.secrets) as operator:
            (files / "settings.json").write_text(json.dumps(settings(network, visitors)))
            secrets.enrol(network.secrets, network.shuffler_url, ["simulated"], 1, simulated)
            network.start("node")
            yield f"{origin}/", operator, deploy(operator, simulated + visitors)


def deploy(operator: Operator, n: int) -> str:
    """Opens a run and its batch. A fair coin chooses one kind of hint for each person."""
    sizes = {"states": STATES, "actions": HINTS, "horizon": RIDDLES}
    spec: dict[str, Any] = {
        "environment": "File-v0",
        "learner": "manual",
        "name": "hints",
        "episodes": n,
        **sizes,
    }
    spec |= {"epsilon": EPSILON, "beta": BETA, "batch_seconds": 7200, "episode_seconds": 600}
    run = operator.create_run(RunSpec.model_validate(spec))
    policies = [[[hint] * STATES] * RIDDLES for hint in range(HINTS)]
    mixture = {"policies": policies, "probabilities": [0.5, 0.5], "episodes": n}
    operator.deploy(run["id"], mixture)
    return str(run["id"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=299, help="simulated people")
    parser.add_argument("--visitors", type=int, default=1, help="visitors that the batch waits for")
    parser.add_argument("--out", type=Path, default=Path("runs/hints"), help="a new folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    with ready(options.out.resolve(), options.people, options.visitors) as (url, operator, run):
        print(f"open {url}")
        print(json.dumps(operator.wait(run, 0), indent=1))
