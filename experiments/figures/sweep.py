"""From a catalogue's run to the simulators: the only module here that knows their signatures.

All seeds of all runs through joblib: over this machine's cores (loky) or a Dask cluster.

A job is a (run, seed). Its draws are keyed by the seed, never by arrival, so every backend and any
order gives the same rows. Long runs go first, so that the cores end together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.coordinator.learning.learner import FloatArray, LearnerError
from riffle.experiments import adversarial, per_episode
from riffle.experiments.figures.catalogue import ADVERSARIAL, Parameters, Run, Value
from riffle.experiments.figures.series import Row, Rows, code_digest
from riffle.experiments.regret import optimal_value, policy_value
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import TabularMDP


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed of a run gave.

    regret (c,) at the checkpoints episodes (c,); `value_share` is the last policy's value over V*;
    switches and value_share are None where they have no meaning (004 changes policy every episode
    and has no V*); ceiling is V* K or None.
    """

    episodes: FloatArray
    regret: FloatArray
    switches: int | None
    value_share: float | None
    ceiling: float | None
    seconds: float
    constants: dict[str, Value]


def compute(run: Run, seed: int) -> Outcome:
    """One seed of a run.

    Raises:
        RiffleError: the run is refused (unknown learner, batch too small); its text says why.
    """
    return _adversarial(run, seed) if run.learner in ADVERSARIAL else _stochastic(run, seed)


def _stochastic(run: Run, seed: int) -> Outcome:
    mdp = _mdp(run.environment, run.parameters)
    done = per_episode.run(
        run.learner,
        mdp,
        run.K,
        epsilon=1.0 if run.epsilon is None else run.epsilon,  # not read by learners without privacy
        beta=run.beta,
        seed=seed,
        calibration="paper" if run.calibration == "paper" else "tight",
        constants=run.constants,
        options=dict(run.options),
    )
    best = optimal_value(mdp)
    return Outcome(
        episodes=done.episodes.astype(np.float64),
        regret=done.cumulative,
        switches=done.switches,
        value_share=policy_value(mdp, done.policy) / best,
        ceiling=best * run.K,
        seconds=done.seconds,
        constants=done.constants,
    )


def _adversarial(run: Run, seed: int) -> Outcome:
    known: dict[str, Any] = {**dict(run.parameters), **dict(run.options)}
    case = adversarial.Case(
        "uc-o-reps" if run.learner == "uc-o-reps" else "uob-lbps",
        run.K,
        epsilon=1.0 if run.epsilon is None else run.epsilon,
        beta=run.beta,
        privacy=known["privacy"],
        calibration="paper" if run.calibration == "paper" else "correct",
        seed=seed,
        adversary=known["adversary"],
        widths=tuple(map(int, known["widths"].split("-"))),
        actions=known["actions"],
    )
    done = adversarial.run(case)
    return Outcome(done.episodes, done.regret, None, None, None, done.seconds, done.constants)


@lru_cache(maxsize=16)
def _mdp(environment: str, parameters: Parameters) -> TabularMDP:
    given: dict[str, Any] = dict(parameters)
    return exact_mdp(make(environment, **given))


BackendName = Literal["loky", "dask"]
Job = tuple[Run, int]

PATIENCE = 10.0  # seconds for the Dask scheduler to answer


@dataclass(frozen=True, slots=True)
class Backend:
    """Where jobs run: `workers` processes here, or the Dask scheduler at an address.

    Raises:
        ValueError: an address without Dask, or Dask without an address.
        LocalError: ``unavailable``: what it needs is not installed.
    """

    name: BackendName = "loky"
    workers: int = 2
    address: str | None = None

    def __post_init__(self) -> None:
        if (self.name == "dask") != (self.address is not None):
            raise ValueError("--backend dask and --address (of its scheduler) belong together")
        needed = ("numba", "joblib") + (("dask", "distributed") if self.name == "dask" else ())
        missing = [package for package in needed if find_spec(package) is None]
        if missing:
            raise LocalError(
                "unavailable",
                f"figures need {' and '.join(missing)}: pip install 'riffle-rl[experiments]', "
                "or in a clone 'make extras'",
            )


def sweep(jobs: Iterable[Job], rows: Rows, backend: Backend, on_row: Callable[[Row], None]) -> None:
    """Compute the jobs that `rows` lacks, each appended as it ends.

    Raises:
        LocalError: ``wrong-state``, rows or a cluster's workers have other code than this process;
            ``unavailable``, the Dask scheduler does not answer.
    """
    wanted = list(dict.fromkeys(jobs))
    rows.check_code({(run.key, seed) for run, seed in wanted})
    missing = [(run, seed) for run, seed in wanted if rows.get((run.key, seed)) is None]
    missing.sort(key=lambda job: -job[0].K)
    for row in _computed(missing, backend):
        if row.code != code_digest():
            raise LocalError(
                "wrong-state",
                f"a worker has other code ({row.code}) than this machine ({code_digest()})",
            )
        rows.append(row)
        on_row(row)


def execute(run: Run, seed: int) -> Row:
    """One job, in whatever process; a refusal becomes a row that says why."""
    try:
        done = compute(run, seed)
    except (RiffleError, LearnerError) as error:
        return Row(run.key, seed, code_digest(), reason=str(error))
    return Row(
        key=run.key,
        seed=seed,
        code=code_digest(),
        episodes=tuple(done.episodes.tolist()),
        regret=tuple(done.regret.tolist()),
        switches=done.switches,
        value_share=done.value_share,
        ceiling=done.ceiling,
        seconds=done.seconds,
        constants=done.constants,
    )


def _computed(jobs: list[Job], backend: Backend) -> Iterator[Row]:
    # Here, not above: joblib is an optional dependency.
    from joblib import Parallel, delayed  # noqa: PLC0415

    if not jobs:
        return
    with _cluster(backend):
        workers = backend.workers if backend.name == "loky" else -1
        # One job a task: a batch of them would be lost, or wait, together.
        parallel = Parallel(workers, return_as="generator_unordered", batch_size=1)
        yield from parallel(delayed(execute)(run, seed) for run, seed in jobs)


@contextmanager
def _cluster(backend: Backend) -> Iterator[None]:
    from joblib import parallel_config  # noqa: PLC0415

    if backend.address is None:
        with parallel_config("loky"):
            yield
        return
    from distributed import Client  # noqa: PLC0415

    try:
        client = Client(backend.address, timeout=PATIENCE)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise LocalError(
            "unavailable", f"no Dask scheduler answers at {backend.address}: {error}"
        ) from error
    with client, parallel_config("dask"):
        yield
