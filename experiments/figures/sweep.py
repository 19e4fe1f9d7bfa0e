"""Computes a catalogue's runs for all seeds, on this machine's cores (loky) or a Dask cluster.

This is the only module of the package that calls the simulators. A job is a (run, seed). Its draws
are keyed by the seed, not by arrival, so every backend and order gives the same rows. Long runs
start first, so that all cores finish at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.coordinator.learning.learner import LearnerError
from riffle.experiments import adversarial, per_episode
from riffle.experiments.adversaries import Case
from riffle.experiments.figures.catalogue import ADVERSARIAL, Parameters, Run
from riffle.experiments.figures.series import Row, Rows, code_digest
from riffle.experiments.regret import optimal_value, policy_value
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import TabularMDP


def compute(run: Run, seed: int) -> Row:
    """Computes a run with one seed.

    Raises:
        RiffleError, LearnerError: the run is refused (unknown learner, batch too small).
    """
    return _adversarial(run, seed) if run.learner in ADVERSARIAL else _stochastic(run, seed)


def _stochastic(run: Run, seed: int) -> Row:
    mdp = _mdp(run.environment, run.parameters)
    result = per_episode.run(
        run.learner,
        mdp,
        run.K,
        epsilon=1.0 if run.epsilon is None else run.epsilon,  # not used without privacy
        beta=run.beta,
        seed=seed,
        calibration="paper" if run.calibration == "paper" else "tight",
        constants=run.constants,
        options=dict(run.options),
    )
    best = optimal_value(mdp)
    return Row(
        key=run.key,
        seed=seed,
        code=code_digest(),
        episodes=tuple(map(float, result.episodes)),
        regret=tuple(result.cumulative.tolist()),
        switches=result.switches,
        value_share=policy_value(mdp, result.policy) / best,
        ceiling=best * run.K,
        seconds=result.seconds,
        constants=result.constants,
    )


def _adversarial(run: Run, seed: int) -> Row:
    options: dict[str, Any] = {**dict(run.parameters), **dict(run.options)}
    options["widths"] = tuple(map(int, options["widths"].split("-")))
    name: Any = run.learner
    case = Case(
        name,
        run.K,
        epsilon=1.0 if run.epsilon is None else run.epsilon,
        beta=run.beta,
        calibration="paper" if run.calibration == "paper" else "correct",
        seed=seed,
        **options,
    )
    result = adversarial.run(case)
    return Row(
        key=run.key,
        seed=seed,
        code=code_digest(),
        episodes=tuple(result.episodes.tolist()),
        regret=tuple(result.regret.tolist()),
        seconds=result.seconds,
        constants=result.constants,
    )


@lru_cache(maxsize=16)
def _mdp(environment: str, parameters: Parameters) -> TabularMDP:
    options: dict[str, Any] = dict(parameters)
    return exact_mdp(make(environment, **options))


BackendName = Literal["loky", "dask"]
Job = tuple[Run, int]

PATIENCE = 10.0  # seconds to wait for the Dask scheduler


@dataclass(frozen=True, slots=True)
class Backend:
    """The place where jobs run: `workers` processes on this machine, or a Dask cluster's address.

    Raises:
        ValueError: an address without Dask, or Dask without an address.
        LocalError: ``unavailable``: a package that the backend needs is not installed.
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
    """Computes the jobs missing from `rows` and appends each result as its job ends.

    Raises: LocalError: ``wrong-state``: other code than this process has made the rows or runs
    on the cluster's workers; ``unavailable``: the Dask scheduler does not answer.
    """
    unique = list(dict.fromkeys(jobs))
    rows.check_code({(run.key, seed) for run, seed in unique})
    missing = [(run, seed) for run, seed in unique if rows.get((run.key, seed)) is None]
    missing.sort(key=lambda job: -job[0].K)
    for row in _compute_all(missing, backend):
        if row.code != code_digest():
            raise LocalError(
                "wrong-state",
                f"a worker has other code ({row.code}) than this machine ({code_digest()})",
            )
        rows.append(row)
        on_row(row)


def execute(run: Run, seed: int) -> Row:
    """Runs one job in this process; a refusal becomes a row with its reason."""
    try:
        return compute(run, seed)
    except (RiffleError, LearnerError) as error:
        return Row(run.key, seed, code_digest(), reason=str(error))


def _compute_all(jobs: list[Job], backend: Backend) -> Iterator[Row]:
    # Imported here because joblib is an optional dependency.
    from joblib import Parallel, delayed  # noqa: PLC0415

    if not jobs:
        return
    with _cluster(backend):
        workers = backend.workers if backend.name == "loky" else -1
        # One job per task: jobs that share a task would be lost together and wait for each other.
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
