"""``riffle account``: the least noise for a guarantee, or the guarantee of given noise.

``riffle budget``: the privacy that people have spent, from their node owner's ledger.
"""

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from riffle.common import accounting
from riffle.common.mechanism.counters import CounterLayout, Families, Sizes
from riffle.common.mechanism.parameters import Aggregation, Guarantee, Noise, Padding
from riffle.common.mechanism.sums import report_bytes, word_bits
from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import OVERHEAD
from riffle.deploy.cli.options import whole
from riffle.deploy.output import Output, emit, one_line_errors, table, utc
from riffle.node_client.ledger import NAME, Limit, PersonalLedger

Scope = Literal["layer", "all"]
BETAS = ["RIFFLE_NODE_LIFETIME_BETA", "RIFFLE_NODE_MAX_BETA"]


@one_line_errors
def account_command(
    states: Annotated[int, typer.Option(help="X")],
    actions: Annotated[int, typer.Option(help="A")],
    horizon: Annotated[int, typer.Option(help="H")],
    episodes: Annotated[int, whole("n, reports of the batch")],
    epsilon: Annotated[float, typer.Option(help="epsilon of every user")] = 1.0,
    beta: Annotated[float, typer.Option(help="probability that privacy fails")] = 1e-5,
    scope: Annotated[Scope, typer.Option(help="count one step's transitions, or all")] = "all",
    families: Annotated[Families, typer.Option(help="what is counted")] = "joint",
    honest_fraction: Annotated[float, typer.Option(help="share of reports that add noise")] = 1.0,
    calibration: Annotated[
        accounting.CalibrationName, typer.Option(help="how noise is chosen")
    ] = "exact",
    bits: Annotated[
        int | None,
        typer.Option(help="noise bits of each user on each counter, instead of a calibration"),
    ] = None,
    p: Annotated[
        str | None, typer.Option(help="probability that such a bit is 1, for instance 1/256")
    ] = None,
    aggregation: Annotated[Aggregation, typer.Option(help="how counts are sent")] = "messages",
    noise_slots: Annotated[
        int | None, typer.Option(help="with --bits: slots for noise in a report")
    ] = None,
    output: Output = "text",
) -> None:
    """Compute the noise for a guarantee, or the guarantee of given noise.

    The answer also has bits, messages and variance. With --bits and --p, the command computes the
    epsilon that this noise gives at --beta.
    """
    layout = CounterLayout(
        Sizes(states, actions, horizon), families, 0 if scope == "layer" else None
    )
    if not math.isfinite(honest_fraction):
        raise ValueError(f"--honest-fraction must be a number up to 1, not {honest_fraction}")
    dishonest = float(1 - Fraction(str(honest_fraction)))
    if (bits is None) != (p is None):
        raise ValueError("--bits and --p belong together: give both or neither")
    if bits is not None and p is not None:
        noise = Noise(bits, *dyadic(p))
        slots = noise_slots if noise_slots is not None else bits * layout.counters
        summed = aggregation == "sums"
        padding = Padding(1, 0) if summed else Padding(layout.data_slots, slots)
        words = word_bits(episodes, noise) if summed else None
        cells, counters = layout.cells, layout.counters
        event = accounting.BatchEvent(noise, padding, episodes, dishonest, cells, counters, words)
        document = describe(layout, noise, accounting.account(event, beta), words)
    else:
        required = Guarantee(epsilon, beta, dishonest)
        document = calibrated(layout, episodes, required, calibration, aggregation)
    rows = list(document.items())
    emit(document, output, lambda: table(("quantity", "value"), rows))


def calibrated(
    layout: CounterLayout,
    n: int,
    required: Guarantee,
    calibration: accounting.CalibrationName,
    aggregation: Aggregation,
) -> dict[str, Any]:
    """Returns calibrated noise, and the ratio of its variance to the variance of Gaussian noise."""
    chosen = accounting.calibrate(layout, n, required, calibration, aggregation=aggregation)
    document = describe(layout, chosen.noise, chosen.account, chosen.word_bits)
    gaussian = accounting.gaussian_variance(required.epsilon, required.beta, layout.cells)
    document["variance_over_gaussian"] = chosen.account.variance / gaussian
    if calibration == "exact":
        paper = accounting.calibrate(layout, n, required, "paper")
        ratio = paper.noise.mean(n) / chosen.noise.mean(n)
        document["ones_of_the_paper_over_exact"] = ratio
    return document


def describe(
    layout: CounterLayout, noise: Noise, result: accounting.Account, words: int | None
) -> dict[str, Any]:
    """Returns a batch's noise and guarantee under the keys that the command prints.

    ``words`` is the word size of a summed batch; None for messages.
    """
    message = report_bytes(layout.counters, words) if words else OVERHEAD + layout.width
    return {
        "aggregation": "sums" if words else "messages",
        "episodes": result.n,
        "honest_reports": result.honest_reports,
        "counters": layout.counters,
        "cells": layout.cells,
        "bits_per_user": noise.bits,
        "p": noise.p,
        "p_exact": f"{noise.p_numerator}/2^{noise.p_log2}",
        "expected_ones": result.expected_ones,
        "expected_ones_per_report": result.expected_ones_per_report,
        "padded_messages": result.messages,
        "report_bytes": result.messages * message + OVERHEAD,
        "variance": result.variance,
        "epsilon_lower": result.epsilon_lower,
        "epsilon_upper": result.epsilon_upper,
        "beta": result.beta,
        "beta_overflow": result.beta_overflow,
    }


def dyadic(text: str) -> tuple[int, int]:
    """Returns numerator and log2 of the denominator of a probability such as 1/256 or 0.5.

    Raises ValueError if the text is not an integer over a power of two up to 2**32.
    """
    try:
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"--p {text} is not a fraction such as 1/256") from error
    log2 = fraction.denominator.bit_length() - 1
    if fraction.denominator != 1 << log2 or log2 > 32:
        raise ValueError(f"--p {text} is not an integer over a power of two up to 2^32")
    return (fraction.numerator, log2) if log2 else (2 * fraction.numerator, 1)


@one_line_errors
def budget_command(
    ledger: Annotated[
        Path, typer.Argument(envvar="RIFFLE_NODE_LEDGER_FILE", help="the ledger of a node's owner")
    ],
    head_dir: Annotated[
        Path, typer.Option(envvar="RIFFLE_NODE_LEDGER_HEAD_DIR", help="folder of the ledger's head")
    ],
    epsilon: Annotated[
        float, typer.Option(envvar="RIFFLE_NODE_LIFETIME_EPSILON", help="the lifetime limit")
    ],
    beta: Annotated[float, typer.Option(envvar=BETAS, help="beta of that limit")] = 1e-5,
    person: Annotated[
        str | None, typer.Option(help="show the batches of the person with this id at the shuffler")
    ] = None,
    output: Output = "text",
) -> None:
    """Show what people have spent of their lifetime limits.

    A person's epsilon is the exact composition, at --beta, of all batches for which the person was
    asked. The composition covers all runs, coordinators and shufflers.
    """
    if not ledger.is_file():
        raise LocalError("unavailable", f"there is no ledger {ledger}")
    limit = Limit(epsilon, beta)
    histories = PersonalLedger(ledger, HeadFolder(head_dir, NAME), limit).histories()
    if person is not None and person not in histories:
        raise LocalError("not-found", f"the ledger has no person {person!r}")
    people: list[dict[str, Any]] = [
        {
            "person": user,
            "epsilon": limit.spent([charge for _, charge in history]),
            "batches": [
                {"at": at, **charge.model_dump(exclude={"event"})} for at, charge in history
            ],
        }
        for user, history in histories.items()
        if person in (None, user)
    ]
    document = {"limit_epsilon": epsilon, "limit_beta": beta, "people": people}
    title, columns = f"Limit: {limit}", ["person", "batches", "epsilon"]
    rows = [[each["person"], len(each["batches"]), each["epsilon"]] for each in people]
    if person is not None:
        title, columns = f"{title}; spent {rows[0][2]:g}", ["batch_id", "run_id", "shuffler_id"]
        rows = [[utc(b["at"]), *(b[name] for name in columns)] for b in people[0]["batches"]]
        columns = ["asked", "batch", "run", "shuffler"]
    emit(document, output, lambda: table(columns, rows, title))
