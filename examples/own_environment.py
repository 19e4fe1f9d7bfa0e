"""An environment of one's own: a service desk that asks its customers to wait, or not.

    riffle simulate --environment examples/own_environment.py:make --param busy=0.7
    riffle up --environment examples/own_environment.py:make --out runs/desk

A node's owner names it in `RIFFLE_NODE_ENVIRONMENT=own_environment.py:make`, with the folder in
`RIFFLE_NODE_ENVIRONMENT_PARAMETERS={"folder": "..."}`. A package offers it by an entry point:

    [project.entry-points."riffle.environments"]
    Desk-v0 = "my_package:make"
"""

import numpy as np

from riffle import TabularEnvironment, stationary

ADMIT, DEFER = 0, 1


def make(queue: int = 3, horizon: int = 4, busy: float = 0.6) -> TabularEnvironment:
    """States: people waiting, 0..queue. Actions: admit the next one, or ask to come later.

    Admitting earns most when nobody waits; a full queue turns everybody away.
    """
    X = queue + 1
    P, r, d1 = np.zeros((X, 2, X)), np.zeros((X, 2)), np.eye(X)[0]
    for x in range(X):
        shorter, longer = max(x - 1, 0), min(x + 1, queue)
        P[x, ADMIT, longer] += busy
        P[x, ADMIT, shorter] += 1 - busy
        P[x, DEFER, shorter] = 1.0
        r[x] = (0.0 if x == queue else 1 - x / X), 0.2
    return TabularEnvironment(stationary(P, r, d1, horizon))
