"""The README's example: a policy deployed by hand over REST, on live processes."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from deploy.local import LocalConfig, LocalNetwork
from experiments.regret import policy_value
from node_client.environments.tabular import riverswim

ROOT = Path(__file__).parents[2]


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "always_right" in block]
    return str(example)


def test_the_readme_deploys_a_policy_and_gets_its_private_value(tmp_path: Path) -> None:
    config = LocalConfig(tmp_path, "RiverSwim-v0", {"states": 4, "horizon": 6}, nodes=4)
    with LocalNetwork(config) as network:
        names: dict[str, Any] = {
            "coordinator_url": network.coordinator_url,
            "token": network.operator_token,
        }
        exec(readme_example(), names)  # noqa: S102  (our own README)
        path = f"/v1/runs/{names['run']['id']}/deployments/{names['step']['index']}"
        deadline = time.monotonic() + 120
        found = names["api"].get(path).json()
        while found["state"] != "counted":
            assert time.monotonic() < deadline, f"still {found['state']}"
            network.check_alive()
            time.sleep(0.2)
            found = names["api"].get(path).json()
        names["api"].close()
    exact = policy_value(riverswim(4, 6), np.array(names["always_right"]))
    estimate = found["value_estimate"]
    assert abs(estimate["value"] - exact) <= estimate["radius"]
    assert found["spend"]["epsilon_upper"] <= 1.0
    assert found["counts"]["rewards"] is not None
