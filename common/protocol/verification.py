"""The check that everyone makes: does this descriptor give what its owner demands?

The shuffler runs it when a descriptor is deposited, a node before it takes a slot, the analyzer
when it writes the ledger. Nobody believes the numbers a descriptor claims: the guarantee is
recomputed from n, noise, padding and counters at the *owner's* dishonest fraction.

Public keys that an owner pinned in a file: 64 hex digits a line, ``#`` begins a comment.
"""

import re
from collections.abc import Collection
from pathlib import Path

from riffle.common.accounting import Account, account
from riffle.common.mechanism.noise import Guarantee, Trust
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError


def check_trust(descriptor: BatchDescriptor, allowed: Collection[Trust]) -> None:
    """Raise RemoteError ``trust-refused`` unless an owner allows the descriptor's trust model.

    A batch of another model may give the same epsilon, but against other people: a coordinator that
    asks for ``central`` would read every trajectory.
    """
    if descriptor.trust not in allowed:
        raise RemoteError(
            "trust-refused",
            f"the batch is of trust model {descriptor.trust!r}; allowed here: "
            f"{', '.join(sorted(allowed))}",
        )


def achieved(descriptor: BatchDescriptor, *, beta: float, dishonest_fraction: float) -> Account:
    """The guarantee of a batch at a given beta and dishonest fraction, with bounds."""
    layout = descriptor.layout
    return account(
        descriptor.to_noise(),
        descriptor.padding,
        n=descriptor.n,
        dishonest_fraction=dishonest_fraction,
        cells=layout.cells,
        counters=layout.counters,
        beta=beta,
    )


def check_guarantee(descriptor: BatchDescriptor, required: Guarantee) -> Account:
    """Refuse a descriptor that gives less than ``required``.

    Returns:
        The recomputed account at the required beta and dishonest fraction; its upper bound of
        epsilon is at most the required one.

    Raises:
        RemoteError: ``weak-guarantee``, with both numbers; also when the descriptor promises more
            than its noise gives.
    """
    account_here = achieved(
        descriptor, beta=required.beta, dishonest_fraction=required.dishonest_fraction
    )
    if not account_here.epsilon_upper <= required.epsilon:
        raise RemoteError(
            "weak-guarantee",
            f"the batch gives epsilon {account_here.epsilon_upper:.6g} at beta {required.beta:g} "
            f"with {required.dishonest_fraction:.0%} dishonest reports; at most "
            f"{required.epsilon:g} is accepted here",
        )
    promised = descriptor.to_guarantee()
    claim = achieved(descriptor, beta=promised.beta, dishonest_fraction=promised.dishonest_fraction)
    if not claim.epsilon_upper <= promised.epsilon:
        raise RemoteError(
            "weak-guarantee",
            f"the descriptor promises epsilon {promised.epsilon:g}, its noise gives "
            f"{claim.epsilon_upper:.6g}",
        )
    return account_here


_KEY = re.compile(r"[0-9a-f]{64}")


def pinned(file: Path | None) -> frozenset[str] | None:
    """The keys in a file as it is now; None without a file: nothing is pinned.

    Raises:
        LocalError: ``invalid-spec``: it cannot be read, has no key or a line that is none.
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
