"""Checks that each party makes itself: a batch's guarantee, its trust model, and pinned keys.

Three parties check a descriptor: the shuffler on deposit, a node before it takes a slot, and the
analyzer when it writes the ledger. Each party recomputes the guarantee from n, noise,
padding and counters, at a dishonest fraction of its *own* choice.
"""

import math
import re
from collections.abc import Collection
from pathlib import Path

from riffle.common.accounting import Account, BatchEvent, account
from riffle.common.mechanism.parameters import DEFAULT_AGGREGATIONS, Aggregation, Guarantee, Trust
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError

_KEY = re.compile(r"[0-9a-f]{64}")


def check_expiry(
    descriptor: BatchDescriptor, now: float, longest: float = math.inf, episode: float = math.inf
) -> None:
    """Raises RemoteError ``late`` if the batch is over, or ``wrong-size`` if a time is too long.

    The batch may stay open for at most ``longest`` more seconds, and may give an episode at most
    ``episode`` seconds.
    """
    end, seconds = descriptor.expires_at, descriptor.episode_seconds or 0
    if now >= end:
        raise RemoteError("late", f"the batch expired at {end}, it is {now:.0f}")
    if end > now + longest:
        detail = f"open until {end}, it is {now:.0f}; at most {longest} s are allowed"
        raise RemoteError("wrong-size", detail)
    if seconds > episode:
        detail = f"an episode may take {seconds} s; at most {episode} are allowed"
        raise RemoteError("wrong-size", detail)


def check_trust(
    descriptor: BatchDescriptor,
    allowed: Collection[Trust],
    aggregations: Collection[Aggregation] = DEFAULT_AGGREGATIONS,
) -> None:
    """Raises RemoteError ``trust-refused`` unless trust model and aggregation are allowed here.

    A batch of another trust model may give the same epsilon, but protects against fewer parties.
    """
    for kind, value, choices in (
        ("aggregation", descriptor.aggregation, aggregations),
        ("trust model", descriptor.trust, allowed),
    ):
        if value not in choices:
            names = ", ".join(sorted(choices))
            detail = f"the batch's {kind} is {value!r}; allowed here: {names}"
            raise RemoteError("trust-refused", detail)


def check_epoch(descriptor: BatchDescriptor, shortest: int | None, now: float) -> None:
    """Raises RemoteError ``epoch-refused`` unless the batch's epoch is allowed here and now.

    ``shortest`` is the shortest epoch that is allowed here, in seconds. If ``shortest`` is None, a
    user may only report once in a lifetime. Epochs after the next epoch are refused: if batches of
    many epochs were open at once, a person could report in all of them on one day.
    """
    seconds, epoch = descriptor.epoch_seconds, descriptor.epoch
    if seconds is None or epoch is None:
        return
    if shortest is None or seconds < shortest:
        most = "in a lifetime" if shortest is None else f"in {shortest} s"
        detail = f"the batch lets a person report once in {seconds} s; allowed here: once {most}"
        raise RemoteError("epoch-refused", detail)
    if epoch.start > now + seconds:
        ahead = f"the batch's epoch begins at {epoch.start}, it is {now:.0f}"
        raise RemoteError("epoch-refused", f"{ahead}; only this epoch and the next are allowed")


def batch_event(descriptor: BatchDescriptor, dishonest_fraction: float) -> BatchEvent:
    """Returns what the accountant needs to know of a batch, for a given dishonest fraction."""
    return BatchEvent(
        descriptor.batch_noise,
        descriptor.padding,
        descriptor.n,
        dishonest_fraction,
        cells=descriptor.layout.cells,
        counters=descriptor.layout.counters,
        word_bits=descriptor.word_bits,
    )


def required_event(descriptor: BatchDescriptor, required: Guarantee) -> BatchEvent:
    """Returns what the accountant needs to know of a batch, for the required dishonest fraction.

    If the descriptor limits each owner to a share of the slots, the fraction is at least this
    share. A single owner with dishonest nodes then cannot weaken the guarantee.
    """
    fraction, share = required.dishonest_fraction, descriptor.owner_share
    return batch_event(descriptor, max(fraction, share) if share < 1.0 else fraction)


def check_guarantee(
    descriptor: BatchDescriptor, required: Guarantee, max_owner_share: float = 1.0
) -> Account:
    """Refuses a descriptor if its noise gives less privacy than is required or promised.

    Returns the account of `required_event` at the required beta. Raises RemoteError
    ``weak-guarantee``, also if one owner may hold more than ``max_owner_share`` of the slots.
    """
    if descriptor.owner_share > max_owner_share:
        raise RemoteError(
            "weak-guarantee",
            f"the batch lets one owner's nodes hold {descriptor.owner_share:g} of its slots; "
            f"at most {max_owner_share:g} is accepted here",
        )
    event = required_event(descriptor, required)
    result = account(event, required.beta)
    if not result.epsilon_upper <= required.epsilon:
        raise RemoteError(
            "weak-guarantee",
            f"the batch gives epsilon {result.epsilon_upper:.6g} at beta {required.beta:g} "
            f"with {event.dishonest_fraction:.0%} dishonest reports; at most "
            f"{required.epsilon:g} is accepted here",
        )
    promise = descriptor.guarantee
    actual = account(batch_event(descriptor, promise.dishonest_fraction), promise.beta)
    if not actual.epsilon_upper <= promise.epsilon:
        given = f"{actual.epsilon_upper:.6g}"
        detail = f"the descriptor promises epsilon {promise.epsilon:g}, its noise gives {given}"
        raise RemoteError("weak-guarantee", detail)
    return result


def read_pins(file: Path | None) -> frozenset[str] | None:
    """Returns the public keys that an owner pinned in a file, or None if no file is given.

    The file has one key of 64 hex digits per line; ``#`` begins a comment. Raises LocalError
    ``invalid-spec`` if the file is unreadable or empty, or a line is not a key.
    """
    if file is None:
        return None
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError("invalid-spec", f"cannot read the pins in {file}: {error}") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    keys = frozenset(line for line in lines if line)
    if not keys or not all(_KEY.fullmatch(key) for key in keys):
        raise LocalError("invalid-spec", f"{file} must hold public keys, 64 hex digits a line")
    return keys
