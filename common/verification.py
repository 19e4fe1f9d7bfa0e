"""The check that everyone makes: does this descriptor give what its owner demands?

The shuffler runs it when a descriptor is deposited, a node before it takes a slot, the analyzer
when it writes the ledger. Nobody believes the numbers a descriptor claims: the guarantee is
recomputed from n, noise, padding and counters at the *owner's* dishonest fraction.
"""

from collections.abc import Collection

from riffle.common.accounting import Account, account
from riffle.common.descriptor import BatchDescriptor
from riffle.common.errors import RemoteError
from riffle.common.noise import Guarantee, Trust


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
