"""Runs with many seeds, on this machine's cores or a Dask cluster, with results kept on disk.

A job is a (`Run`, seed). The seed keys its draws, so every backend and every order of jobs gives
the same results. `Rows` holds the results: one line of JSON for each job, appended when the job
ends. A row names the code that made it, and a sweep refuses to mix rows of different code.

joblib runs the jobs, because its processes need no main guard and accept classes that a notebook
defines.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from riffle.common.accounting import CalibrationName
from riffle.common.mechanism.parameters import Trust
from riffle.common.process.plugins import (
    Constructor,
    fingerprint,
    is_file_reference,
    load_file,
    own_files,
)
from riffle.common.protocol.descriptor import MAX_MESSAGES, first_fault
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.coordinator.learning.learner import LearnerError
from riffle.experiments import per_user
from riffle.experiments.presets import Preset, customize, label_of, preset
from riffle.experiments.regret import SeedResult
from riffle.experiments.study import ADVERSARIAL, CASE_OPTIONS, run_seed
from riffle.node_client.environments.registry import FOLDER, declaration_of
from riffle.node_client.environments.tabular import Modelled

SHAPING = ("common", "coordinator", "experiments", "node_client")
REFUSALS = frozenset({"invalid-spec", "batch-too-small"})
"""Problems of a single run. Other errors, such as a missing package, end the sweep."""
UNDECLARED = {"support": False, "homogeneous": False}
BETA = 1e-5

Parameters = tuple[tuple[str, Any], ...]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Run:
    """A run without its seed. epsilon is None without privacy; `options` are for the learner.

    Learner and environment are names, references to files, or Python objects. With `declared`, the
    learner uses the structure that the environment declares, as on the services.
    """

    learner: str | Constructor
    environment: object
    parameters: Parameters
    K: int
    epsilon: float | None
    calibration: CalibrationName = "exact"
    constants: str = "practical"
    options: Parameters = ()
    beta: float = BETA
    trust: Trust = "shuffle"
    declared: bool = False
    own: str = ""

    def __post_init__(self) -> None:
        """Sets ``own``, a digest of the caller's own learner and environment, if it is not set."""
        if not self.own:
            object.__setattr__(self, "own", self.own_code())
            _LOADED.add(self.own)

    @property
    def key(self) -> str:
        """The 16 hexadecimal digits that identify this run and the caller's own code."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {name: label_of(fields[name]) for name in ("learner", "environment")}
        fields["parameters"] = [pair for pair in self.parameters if pair[0] != FOLDER]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]

    def own_code(self) -> str:
        """Returns a digest of learner and environment; "" if neither is the caller's own code."""
        code = [_code(part) for part in (self.learner, self.environment)]
        if code[1] is not None:
            made = self.chosen.make()
            if isinstance(made, Modelled):
                code[1:] = [made.mdp.P, made.mdp.r, made.mdp.d1, repr(declaration_of(made))]
            else:
                code += [type(made), type(getattr(made, "native", made))]
        return "" if code == [None, None] else fingerprint(code)

    @property
    def chosen(self) -> Preset:
        """The run as a `Preset`. Raises the errors of `experiments.presets.customize`."""
        parameters, options = dict(self.parameters), dict(self.options)
        if self.learner in ADVERSARIAL:  # LayeredMDP-v0 takes the adversary as a parameter, too
            options |= {name: parameters.pop(name) for name in CASE_OPTIONS if name in parameters}
        return customize(
            preset("riverswim"),
            self.learner,
            self.environment,
            parameters=parameters,
            options={**({} if self.declared else UNDECLARED), **options},
            changes={
                "episodes": self.K,
                "epsilon": self.epsilon,
                "beta": self.beta,
                "trust": self.trust,
                "calibration": self.calibration,
                "constants": self.constants,
                "dishonest_fraction": 0.0,
                "max_messages": MAX_MESSAGES,  # no report is sent, so its length does not matter
            },
        )


_LOADED = set[str]()
"""The digests (`Run.own`) of callers' code that this process has loaded."""


def _code(part: object) -> object:
    """Returns the class or function of a learner or environment, or None for a known name."""
    if isinstance(part, str):
        return load_file(part) if is_file_reference(part) else None
    return part if callable(part) else type(part)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one seed of one run. If there is no result, `reason` says why."""

    key: str
    seed: int
    code: str
    reason: str | None = None
    result: SeedResult | None = None

    @property
    def identity(self) -> tuple[str, int]:
        """The job that made this result: run key and seed."""
        return self.key, self.seed


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Returns a digest (16 hexadecimal digits) of all sources that can affect a result."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    files = [file for folder in SHAPING for file in (root / folder).rglob("*.py")]
    for file in sorted(files):
        if file.parent.name != "figures":
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


_ROW = TypeAdapter(Row)


class Rows:
    """The rows of one results folder. Without a file, the rows are only in memory."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._rows = {row.identity: row for row in ([] if file is None else _read(file))}

    def get(self, identity: tuple[str, int]) -> Row | None:
        """Returns the result of a job, or None."""
        return self._rows.get(identity)

    def append(self, row: Row) -> None:
        """Stores a result. If there is a file, the result is in the file when this returns."""
        self._rows[row.identity] = row
        if self.file is not None:
            with self.file.open("a") as stream:
                stream.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")

    def forget(self, identities: set[tuple[str, int]]) -> None:
        """Removes rows, so that their jobs run again."""
        self._rows = {i: row for i, row in self._rows.items() if i not in identities}
        if self.file is not None:
            aside = self.file.with_suffix(".new")
            aside.write_text("".join(json.dumps(asdict(r)) + "\n" for r in self._rows.values()))
            aside.replace(self.file)


def _read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    *lines, last = file.read_bytes().split(b"\n")
    if last:  # cut short: the newline after it is missing
        file.write_bytes(b"".join(line + b"\n" for line in lines))
    return [_row(file, number, line) for number, line in enumerate(lines, 1)]


def _row(file: Path, number: int, line: bytes) -> Row:
    try:
        return _ROW.validate_json(line, strict=True)
    except ValidationError as error:
        raise LocalError(
            "malformed", f"{file}, line {number}, is no result ({first_fault(error)}); remove it"
        ) from error


Job = tuple[Run, int]

PATIENCE = 10.0  # seconds to wait for the Dask scheduler


@dataclass(frozen=True, slots=True)
class Backend:
    """The place where jobs run: `workers` processes here, or a Dask scheduler's address."""

    workers: int = 2
    address: str | None = None


def compute(run: Run, seed: int) -> SeedResult:
    """Computes a run with one seed. If the environment's MDP is unknown, simulates user by user.

    Raises RiffleError or ValueError if the run is refused. Raises LocalError ``wrong-state`` if the
    code of learner or environment changed after the run was made.
    """
    parts = (run.learner, run.environment)
    files = any(isinstance(part, str) and is_file_reference(part) for part in parts)
    if (files or run.own not in _LOADED) and run.own_code() != run.own:
        raise LocalError(
            "wrong-state",
            f"the files of {' or '.join(map(label_of, parts))} have changed since they were loaded:"
            " load them again (importlib.reload) or start Python again; what is loaded now runs "
            "with workers=1",
        )
    chosen = run.chosen
    try:
        if isinstance(chosen.make(), Modelled):
            return run_seed(chosen, seed)
        return per_user.run_seed(chosen, seed)[0]
    except RemoteError as error:  # the services' error; here nobody is remote
        raise LocalError(error.slug, error.detail) from None


def execute(key: str, job: Job) -> Row:
    """Runs one job; ``key`` is its run's key. If the run is refused, the row has the reason."""
    run, seed = job
    try:
        return Row(key, seed, code_digest(), result=compute(run, seed))
    except (RiffleError, LearnerError) as error:
        if isinstance(error, RiffleError) and error.slug not in REFUSALS:
            raise
        return Row(key, seed, code_digest(), reason=str(error))


def sweep(jobs: Sequence[Job], rows: Rows, backend: Backend, on_row: Callable[[Row], None]) -> None:
    """Computes the jobs missing from `rows` and appends each result as its job ends.

    Raises LocalError ``wrong-state`` if the rows or a worker have other code than this process.
    Raises LocalError ``unavailable`` if a package is missing or the Dask scheduler does not answer.
    """
    # This process makes the keys: a worker cannot read the source of a notebook's class.
    keys = {id(run): run.key for run, _ in jobs}
    unique = {(keys[id(run)], seed): (run, seed) for run, seed in jobs}
    if stale := [i for i in unique if (row := rows.get(i)) and row.code != code_digest()]:
        raise LocalError(
            "wrong-state",
            f"{rows.file} has {len(stale)} results made by other code than this; choose "
            "another --out, or compute them again with --force",
        )
    missing = [(key, job) for (key, seed), job in unique.items() if rows.get((key, seed)) is None]
    missing.sort(key=lambda keyed: -keyed[1][0].K)
    for row in run_jobs(lambda keyed: execute(*keyed), missing, backend, ordered=False):
        if row.code != code_digest():
            raise LocalError(
                "wrong-state",
                f"a worker has other code ({row.code}) than this machine ({code_digest()})",
            )
        rows.append(row)
        on_row(row)


def run_jobs(
    run: Callable[[T], R], jobs: Sequence[T], backend: Backend, *, ordered: bool = True
) -> Iterator[R]:
    """Yields ``run(job)`` for each job. Without ``ordered``, yields a result when its job ends."""
    if backend.address is None and min(backend.workers, len(jobs)) <= 1:
        yield from map(run, jobs)
        return
    from joblib import Parallel, delayed  # noqa: PLC0415  (slow to import)

    with _cluster(backend):
        workers = backend.workers if backend.address is None else -1
        # One job per task: jobs that share a task would wait for each other and be lost together.
        kind = "generator" if ordered else "generator_unordered"
        parallel = Parallel(workers, return_as=kind, batch_size=1)
        yield from parallel(delayed(run)(job) for job in jobs)


@contextmanager
def _cluster(backend: Backend) -> Iterator[None]:
    from joblib import parallel_config  # noqa: PLC0415

    if backend.address is None:
        # Workers live on, with the modules that they imported; changed files need new workers.
        with parallel_config("loky", initializer=repr, initargs=(own_files(),)):
            yield
        return
    try:
        from distributed import Client  # noqa: PLC0415  (optional)
    except ImportError as error:
        text = "a cluster needs dask: pip install 'riffle-rl[experiments]', or 'make extras'"
        raise LocalError("unavailable", text) from error
    try:
        client = Client(backend.address, timeout=PATIENCE)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise LocalError(
            "unavailable", f"no Dask scheduler answers at {backend.address}: {error}"
        ) from error
    with client, parallel_config("dask"):
        yield
