"""``riffle simulate``: any learner without a network, at any population size.

Functions import the learners when they run, because help must not wait for this import.
"""
# ruff: noqa: PLC0415

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from riffle.deploy.cli.options import RunOptions, SimulationOptions, expand_options, is_given
from riffle.deploy.output import Output, emit, line, one_line_errors, progress, steps, table

if TYPE_CHECKING:
    from riffle.experiments.presets import Preset
    from riffle.experiments.research import Result

ADVERSARIAL_EPISODES = 2_000
T = TypeVar("T")
Simulated = tuple["Result", dict[str, Any]]


@one_line_errors
@expand_options(without=["batch_seconds", "episode_seconds", "reissues"])
def simulate_command(
    context: typer.Context,
    options: RunOptions,
    how: SimulationOptions,
    out: Annotated[
        Path | None, typer.Option(help="folder for summary.json, seeds.csv and curves.csv")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="print every constant, and the policy of seed 0")
    ] = False,
    output: Output = "text",
) -> None:
    """Simulate a run over several seeds and report exact regret.

    The last line is the mean regret and its 95 % confidence interval.
    """
    result, document = simulate(options, how, preset_given=is_given(context, "preset"))
    if out is not None:
        line(f"written to {result.save(out)}")

    def show() -> None:
        if verbose and result.results[0].policy:
            table(*policy_rows(result), "policy of seed 0")
        table(("quantity", "value"), rows_of(document, verbose=verbose))

    emit(document, output, show)


def simulate(options: RunOptions, how: SimulationOptions, *, preset_given: bool) -> Simulated:
    """Returns the results over all seeds, and the document that the command prints.

    ``preset_given``: the caller named a preset; paper 004's learners refuse presets. Raises
    ValueError if an option does not fit the learner, or if a value is out of range. Raises
    RiffleError if the learner or environment does not exist or refuses its options.
    """
    from riffle.common.protocol.descriptor import MAX_MESSAGES
    from riffle.experiments.adversaries import ALGORITHMS
    from riffle.experiments.per_episode import PER_EPISODE
    from riffle.experiments.research import Result
    from riffle.experiments.study import check, run_seed
    from riffle.node_client.environments.registry import exact_mdp

    learner, compiled = options.learner, {*PER_EPISODE, *ALGORITHMS}  # numba compiles their loops
    if how.per_user and learner in compiled:
        raise ValueError(f"--per-user is not for {learner}, which has no batches")
    for name, value in (("run-id", how.run_id), ("test-seed", how.test_seed)):
        if value is not None and not how.per_user:
            raise ValueError(f"--{name} is for --per-user")
    if learner in ALGORITHMS:
        options = _adversarial(options, preset_given=preset_given)
    if not how.per_user and options.dishonest_fraction is None:
        options = replace(options, dishonest_fraction=0.0)
    # The papers' first batches are so small that a report has more messages than a live run allows.
    most = MAX_MESSAGES if options.constants == "paper" and not how.per_user else None
    chosen = options.apply(
        calibration=how.calibration, run_id=how.run_id, test_seed=how.test_seed, max_messages=most
    )
    if learner in PER_EPISODE:
        if options.families is not None:
            raise ValueError(f"--families is not for {learner}: --calibration decides it")
        if options.trust is not None:
            raise ValueError(f"--trust is not for {learner}: its name says whom it trusts")
    check(chosen)
    if how.per_user:
        return _simulate_users(chosen, how)
    exact_mdp(chosen.make())  # refuses an environment without an exact MDP before any work
    if chosen.spec.learner in compiled and find_spec("numba"):
        line(f"compiling {chosen.spec.learner}, unless an earlier run did; this takes a while")
    with steps("seeds", how.seeds) as shown:
        result = Result(chosen, tuple(_seeds(partial(run_seed, chosen), how, shown.step)))
    return result, result.summary


def _seeds(run: Callable[[int], T], how: SimulationOptions, on_seed: Callable[[], None]) -> list[T]:
    from riffle.deploy.network.processes import interrupt_on_termination
    from riffle.experiments.sweep import Backend, run_jobs

    results = []
    with interrupt_on_termination():
        for result in run_jobs(run, range(how.seeds), Backend(workers=how.workers)):
            on_seed()
            results.append(result)
    return results


def _simulate_users(chosen: "Preset", how: SimulationOptions) -> Simulated:
    """Simulates user by user. The returned document has the policy and batches of seed 0."""
    from riffle.experiments import per_user
    from riffle.experiments.research import Result
    from riffle.node_client.environments.tabular import Modelled

    spec, alone = chosen.spec, min(how.workers, how.seeds) <= 1
    with steps("episodes", how.seeds * spec.episodes) as shown:
        # Only a seed that runs in this process can show how many users are done.
        run = partial(per_user.run_seed, chosen, on_users=shown.step if alone else lambda _: None)
        seeds = _seeds(run, how, lambda: None if alone else shown.step(spec.episodes))
    if not isinstance(chosen.make(), Modelled):
        text = "no regret and no exact values: this environment shows no transition probabilities"
        progress.print(text, highlight=False, soft_wrap=True)
    result = Result(chosen, tuple(seed for seed, _ in seeds))
    document = result.summary
    constants = document.pop("constants")
    return result, {
        **document,
        "value_estimate_mean": mean([seed.value_estimate or 0.0 for seed in result.results]),
        "run_id": spec.run_id or per_user.RUN_ID,
        "test_seed": spec.test_seed or 0,
        "policy": result.results[0].policy,
        "batches": seeds[0][1],
        "constants": constants,
    }


def _adversarial(options: RunOptions, *, preset_given: bool) -> RunOptions:
    """Returns a run's options with the defaults of paper 004's learners filled in.

    For LayeredMDP-v0, the caller may also give these learners' options (`CASE_OPTIONS`) as --param.
    """
    from riffle.experiments.adversaries import LAYERED
    from riffle.experiments.study import CASE_OPTIONS

    unused = (options.trust, options.families, options.constants)
    layered = options.env in (None, LAYERED)
    if preset_given or any(value is not None for value in unused) or (layered and options.horizon):
        raise ValueError(
            f"{options.learner} learns from an adversary's losses: --preset, --trust, --families "
            f"and --constants are not for it, nor is --horizon on {LAYERED}; --option adversary, "
            "privacy, scale, eta or estimator are, and --param widths or actions"
        )
    moved = [p for p in options.param or [] if layered and p.partition("=")[0] in CASE_OPTIONS]
    return replace(
        options,
        env=options.env or LAYERED,
        episodes=options.episodes or ADVERSARIAL_EPISODES,
        param=[pair for pair in options.param or [] if pair not in moved],
        option=[*moved, *(options.option or [])],
    )


def rows_of(document: Mapping[str, Any], *, verbose: bool) -> list[tuple[str, object]]:
    """Returns the document as rows of a table, without long values; the regret comes last."""
    hidden = {"constants", "batches", "policy", "regret_mean", "regret_ci", "regret_ci_method"}
    rows = [(key, value) for key, value in document.items() if key not in hidden]
    constants: dict[str, object] = document["constants"] if verbose else {}
    regret = rounded(document["regret_mean"], document["regret_ci"], document["seeds"])
    return [*((f"constants.{k}", v) for k, v in constants.items()), *rows, ("regret_mean", regret)]


def rounded(mean: float | None, interval: list[float] | None, seeds: int) -> str | None:
    """Returns a mean and its band as text, or None if there is no mean.

    The numbers are rounded to the second significant digit of the band's half width, but never
    coarser than to integers.
    """
    if mean is None:
        return None
    if interval is None:
        return f"{mean:,.0f} (1 seed has no band)"
    half = (interval[1] - interval[0]) / 2
    digits = max(1 - math.floor(math.log10(half)), 0) if half else 0
    low, high = (f"{round(end, digits) + 0.0:,.{digits}f}" for end in interval)
    return f"{mean:,.{digits}f} [{low}, {high}] (95 % band, {seeds} seeds)"


def policy_rows(result: "Result") -> tuple[list[str], list[list[object]]]:
    """Returns the policy of seed 0 as a table: a row for each step, a column for each state.

    An environment may name its actions in an attribute ``action_names``.
    """
    policy, made = result.results[0].policy, result.chosen.make()
    names = getattr(made, "action_names", None) or range(made.sizes.A)
    columns = ["step", *(f"state {x}" for x in range(made.sizes.X))]
    return columns, [[h, *(names[a] for a in row)] for h, row in enumerate(policy)]
