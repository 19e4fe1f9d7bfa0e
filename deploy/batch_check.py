"""Checks the reports of a batch whose environment is known. Pure.

Every statistical test is exact. A correct client fails any test of a session with probability at
most `ERROR_RATE`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations

import numpy as np
import numpy.typing as npt
from scipy import special

from riffle.common.mechanism.counters import Episode, Ints
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.deploy.report_check import BatchKeys, MistakeError, OpenReport, noise_bits, read_report

ERROR_RATE = 1e-6
TESTS = 4_000
"""More tests than a session has; each errs with probability at most `LEVEL`."""
LEVEL = ERROR_RATE / TESTS
POOLED = {"6.1", "6.2"}
AXES = ("family", "h", "x", "a", "x'", "r")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Test:
    """A number that was observed, and its distribution for a correct client, from 0 on.

    Tests of the same ``name`` in several batches may be added.
    """

    section: str
    name: str
    observed: int
    law: Floats

    def __add__(self, other: "Test") -> "Test":
        law = np.convolve(self.law, other.law)
        return Test(self.section, self.name, self.observed + other.observed, law)

    @property
    def fault(self) -> MistakeError | None:
        """Returns the mistake if the number is less likely than `LEVEL`, on one of two sides."""
        below, above = self.law[: self.observed + 1].sum(), self.law[self.observed :].sum()
        if min(below, above) > LEVEL / 2:
            return None
        mean = float(self.law @ np.arange(self.law.size))
        detail = f"{self.name}: expected about {mean:.4g}, seen {self.observed}"
        return MistakeError(self.section, detail)


@lru_cache(maxsize=512)
def _binomial(N: int, p: float) -> Floats:
    """Returns the probabilities of 0 to N ones among N bits."""
    j = np.arange(N + 1.0)
    ways = special.gammaln(N + 1.0) - special.gammaln(j + 1) - special.gammaln(N - j + 1)
    return np.asarray(np.exp(ways + special.xlogy(j, p) + special.xlog1py(N - j, -p)))


@dataclass(frozen=True)
class BatchLaw:
    """The law of a batch's reports where every transition is certain.

    ``states`` (M, H + 1) and ``actions`` (M, H) are each policy's path; ``means`` (M, H) are the
    scaled rewards on it.
    """

    descriptor: BatchDescriptor
    states: Ints
    actions: Ints
    means: Floats

    @cached_property
    def paths(self) -> list[tuple[list[Ints], Ints]]:
        """For each policy: sets of counters, of which an episode raises one each; and the counters
        of its reward bits, by step. In ``joint`` a set has the counters of both reward bits."""
        return [self._path(k) for k in range(len(self.means))]

    def _path(self, k: int) -> tuple[list[Ints], Ints]:
        layout, x, a = self.descriptor.layout, self.states[k], self.actions[k]
        zero, one = (layout.encode(Episode(x, a, np.full_like(a, bit))) for bit in (0, 1))
        if "joint" in layout.shapes:
            return list(np.stack([zero, one], axis=1)), one
        return list(zero[:, None]), one[zero.size :]

    @property
    def noise(self) -> tuple[int, float]:
        """As `noise_bits` says."""
        return noise_bits(self.descriptor)

    def matches(self, counts: Ints) -> npt.NDArray[np.bool_]:
        """Tells which reports (n, C + 1) may hold an episode of each policy: (n, M)."""
        found = [[counts[:, c].any(axis=1) for c in required] for required, _ in self.paths]
        return np.asarray(np.array(found).all(axis=1).T)

    def mistakes(
        self, counts: Ints, seen: set[bytes], pooled: dict[str, Test]
    ) -> Iterator[MistakeError]:
        """Yields what is wrong with all reports (n, C + 1) of a batch.

        ``seen`` has the noise of earlier batches; ``pooled`` adds up tests for the caller.
        """
        yield from (certain := list(self._certain(counts)))
        (bits, p), noise = self.noise, counts[:, self._never].astype(np.uint8)
        chance = len(noise) ** 2 * (p * p + (1 - p) ** 2) ** noise.shape[1]
        rows = [row.tobytes() for row in noise] if bits and TESTS * chance < LEVEL else []
        if len(fresh := set(rows) - seen) < len(rows):
            yield MistakeError(
                "7", "expected fresh noise in every report; seen the same in several"
            )
        seen |= fresh
        failed = []
        for test in () if certain else self._tests(counts):
            if test.section in POOLED:
                pooled[test.name] = pooled[test.name] + test if test.name in pooled else test
            elif test.fault:
                failed.append(test)
        # One lack of noise fails many tests: the first says how much, and an empty one says where.
        where = [test for test in failed[1:] if not test.observed]
        yield from (test.fault for test in failed[:1] + where[:1] if test.fault)

    def _certain(self, counts: Ints) -> Iterator[MistakeError]:
        """Yields what is wrong whatever is drawn."""
        d, bits = self.descriptor, self.noise[0]
        if d.trust == "local":
            return
        C, lost = d.layout.counters, int((~self.matches(counts).any(axis=1)).sum())
        if lost:
            detail = f"{lost} of {len(counts)} reports hold no episode of the batch's mixture"
            yield MistakeError("5.3", f"{detail}{self._other_order(counts)}")
        elif counts[:, :C].max() > bits + 1:
            most = f"expected at most {bits + 1} ones of a counter in a report, {bits} of noise"
            yield MistakeError("7", f"{most}; seen {counts[:, :C].max()}")

    @cached_property
    def _never(self) -> Ints:
        """Counters that no episode raises: they hold noise only."""
        raised = [np.concatenate([*required, ones]) for required, ones in self.paths]
        return np.setdiff1d(np.arange(self.descriptor.layout.counters), np.concatenate(raised))

    @cached_property
    def _coordinates(self) -> npt.NDArray[np.int64]:
        """Every counter's family (by number) and h, x, a, x', r; -1 for a coordinate it lacks."""
        layout = self.descriptor.layout
        numbered = layout.split(np.arange(1.0, layout.counters + 1))
        table = np.full((layout.counters, len(AXES)), -1)
        for number, block in enumerate(numbered.values()):
            at = np.argwhere(block)
            places = block[tuple(at.T)].astype(np.int64) - 1
            table[places, 0], table[places, 1 : at.shape[1] + 1] = number, at
        return table

    def _other_order(self, counts: Ints) -> str:
        """Names another order of the counters in which every report holds an episode, if any."""
        C = self.descriptor.layout.counters
        orders = {"with 1 added to every index": np.append(np.arange(1, C), 0)}
        for axes in permutations(range(len(AXES))):
            order = np.lexsort(self._coordinates[:, axes[::-1]].T)
            name = f"in the order ({', '.join(AXES[axis] for axis in axes)})"
            orders.setdefault(name, np.argsort(order))
        for name, order in orders.items():
            if self.matches(counts[:, order]).any(axis=1).all():
                return f"; all hold one {name}"
        return ""

    def _tests(self, counts: Ints) -> Iterator[Test]:
        """Yields the numbers of reports (n, C + 1) of one batch that chance decides."""
        (bits, p), n, noise = self.noise, len(counts), counts[:, self._never]
        N, size, totals = n * bits, self._never.size, noise.sum(axis=0)
        law = _binomial(N * size, p)
        yield Test("7", "noise of all counters without data", int(totals.sum()), law)
        for axis, name in enumerate(AXES):
            values = self._coordinates[self._never, axis]
            for value in np.unique(values[values >= 0]):
                law = _binomial(N * int((values == value).sum()), p)
                total = int(totals[values == value].sum())
                yield Test("7", f"noise of counters with {name} = {value}", total, law)
        law = _binomial(size, (1 - p) ** N)
        yield Test("7", "counters that no report gave noise", int((totals == 0).sum()), law)
        law = np.diff(np.cumsum(_binomial(N, p)) ** size, prepend=0)
        yield Test("7", "most noise of one counter", int(totals.max()), law)
        above = np.cumsum(_binomial(bits * size, p)[::-1])[::-1] ** n
        least = int(noise.sum(axis=1).min())
        yield Test("7", "least noise of one report", least, -np.diff(above, append=0))
        yield from self._episode_tests(counts)

    def _episode_tests(self, counts: Ints) -> Iterator[Test]:
        (bits, p), n, matches = self.noise, len(counts), self.matches(counts)
        weights, local = self.descriptor.mixture.probabilities, self.descriptor.trust == "local"
        for k, (required, ones) in enumerate(self.paths):
            hidden = p * (1 - p) ** (required[0].size - 1) if local else 0.0
            own = (1 - hidden) ** len(required)
            by_noise = (1 - (1 - p) ** (bits * required[0].size)) ** len(required)
            law = _binomial(n, weights[k] * own + (1 - weights[k]) * by_noise)
            yield Test("6.1", f"reports with policy {k}", int(matches[:, k].sum()), law)
            for h, c in enumerate(ones):
                q, name = weights[k] * self.means[k, h], f"reward bits at step {h} of policy {k}"
                law = np.convolve(_binomial(n, q), _binomial(n * bits, p))
                law = _binomial(n, q + p - 2 * q * p) if local else law
                yield Test("6.2", name, int(counts[:, c].sum()), law)
            if not local:
                sure, cells = matches[:, k] & (matches.sum(axis=1) == 1), np.concatenate(required)
                extra = int((counts[sure][:, cells].sum(axis=1) - len(required)).sum())
                law = _binomial(int(sure.sum()) * bits * cells.size, p)
                yield Test("5.3", "messages beside one episode's on its counters", extra, law)


Uploads = Sequence[Sequence[tuple[BatchKeys, bytes]]]
"""For each report, all its tries."""


def check_reports(
    law: BatchLaw, uploads: Uploads, seen: set[bytes], pooled: dict[str, Test]
) -> Iterator[MistakeError]:
    """Yields what is wrong with a batch's uploads; ``seen`` also has earlier ephemeral keys."""
    opened, wrong = list[OpenReport](), Counter[tuple[str, str]]()
    for tries in uploads:
        try:
            opened.append(_open(tries, seen))
        except MistakeError as mistake:
            wrong[mistake.section, mistake.detail] += 1
    for (section, detail), count in wrong.most_common(3):
        yield MistakeError(section, f"{count} of {len(uploads)} reports: {detail}")
    if len(opened) == law.descriptor.n:
        yield from law.mistakes(np.stack([report.counts for report in opened]), seen, pooled)


def _open(tries: Sequence[tuple[BatchKeys, bytes]], seen: set[bytes]) -> OpenReport:
    """Opens every try of a report. Raises MistakeError if they differ, or repeat a key."""
    found = [read_report(keys, sealed) for keys, sealed in tries]
    if any((report.counts != found[-1].counts).any() for report in found):
        detail = "expected the same messages, sealed to the new key; seen other messages"
        raise MistakeError("13.7", detail)
    fresh = {key for report in found for key in report.ephemeral}
    if fresh & seen or len(set(found[-1].ephemeral)) < len(found[-1].ephemeral):
        raise MistakeError("3.4", "expected a new ephemeral key in every seal; seen one twice")
    seen |= fresh
    return found[-1]
