"""A learner outside: any program that speaks HTTP drives the population, here with httpx alone.

    riffle up --learner manual --episodes 4000 --env RiverSwim-v0 --out runs/outside &
    python examples/rest_learner.py runs/outside/network/operator

It tries every constant policy for a while and gives the rest of the episodes to the best of them.
All that it reads is private already, so it may do anything with these numbers.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

Policy = list[list[int]]
Deploy = Callable[[Policy, int], float]
"""Deploys a policy (H, X) for some episodes; returns a private estimate of its value."""


def learn(deploy: Deploy, states: int, actions: int, horizon: int, episodes: int) -> Policy:
    """Gives half of the episodes to constant policies in turn, and the rest to the best one."""
    share = episodes // (2 * actions)
    policies = [[[action] * states] * horizon for action in range(actions)]
    values = [deploy(policy, share) for policy in policies]
    best = policies[values.index(max(values))]
    deploy(best, episodes - share * actions)
    return best


def outside(api: httpx.Client, run: dict[str, Any]) -> Policy:
    """Drive a run in manual mode to its end."""
    spec, path = run["spec"], f"/v1/runs/{run['id']}/deployments"

    def deploy(policy: Policy, episodes: int) -> float:
        result = api.get(f"/v1/runs/{run['id']}/result").raise_for_status().json()
        episodes = min(episodes, spec["episodes"] - result["episodes_executed"])  # also lost ones
        answer = api.post(path, json={"policy": policy, "episodes": episodes})
        index = answer.raise_for_status().json()["index"]
        while (found := api.get(f"{path}/{index}").raise_for_status().json())["counts"] is None:
            if found["state"] in ("abandoned", "rejected"):  # also if the run fails
                raise SystemExit(f"batch {index} is {found['state']}; see riffle show {run['id']}")
            time.sleep(0.2)
        print(f"{episodes} episodes: {found['value_estimate']}")
        return float(found["value_estimate"]["value"])

    return learn(deploy, spec["states"], spec["actions"], spec["horizon"], spec["episodes"])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    url = (folder / "coordinator_url").read_text()
    bearer = {"Authorization": f"Bearer {(folder / 'coordinator_token').read_text()}"}
    with httpx.Client(base_url=url, headers=bearer, timeout=60) as client:
        (manual,) = client.get("/v1/runs").raise_for_status().json()["runs"]
        print(outside(client, manual))
