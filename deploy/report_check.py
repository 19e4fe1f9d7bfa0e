"""Compares the reports of a batch with their law, and names a client's mistakes. No I/O.

The law is the reports' distribution for a correct client. Statistical tests are exact, but ignore
that a report may drop noise (12.3). In a whole session, a correct client fails with probability at
most `ERROR_RATE`. Numbers such as 12.3 are sections of docs/protocol.md.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import permutations, product

import numpy as np
import numpy.typing as npt
from scipy import special

from riffle.common.mechanism.counters import Episode, Ints
from riffle.common.mechanism.parameters import Flips, Noise
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.deploy.owner import MistakeError, Tries, misread, open_report

ERROR_RATE, TESTS = 1e-6, 4_000
"""A session has fewer than `TESTS` tests; each errs with probability at most `LEVEL`."""
LEVEL = ERROR_RATE / TESTS
HINTS = {  # what to look at if a test with this in its section and name fails
    "7 noise of all": " (drawn exactly, not approximately? Do dummies fill unneeded slots, 7.4?)",
    "8.2 noise of all": " (drawn exactly, not approximately? Is all noise sent, without 7.3?)",
    "9 noise of all": " (is a bit inverted with probability f, not replaced by a coin? 9.2)",
    "above": " (drawn on its own, for each report?)",
    "each is 0": " (are ones flipped as well as zeros?)",
}
AXES = ("family", "h", "x", "a", "x'", "r")
Floats = npt.NDArray[np.float64]


def noise_bits(d: BatchDescriptor) -> tuple[int, float]:
    """Returns how many noise bits a report has for each counter, and the probability of a 1."""
    noise = d.batch_noise
    bits = (noise.bits, noise.p) if isinstance(noise, Noise) else (0, 0.0)
    return (1, noise.f) if isinstance(noise, Flips) else bits


@dataclass(frozen=True, slots=True)
class Test:
    """An observed number; ``law[k]`` is the probability that a correct client's number is k.

    ``others`` has the laws of clients with known mistakes.
    """

    section: str
    name: str
    observed: int
    law: Floats
    others: dict[str, Floats] = field(default_factory=dict)

    def __add__(self, other: "Test") -> "Test":
        law, both = np.convolve(self.law, other.law), self.others.keys() & other.others.keys()
        others = {name: np.convolve(self.others[name], other.others[name]) for name in both}
        return Test(self.section, self.name, self.observed + other.observed, law, others)

    @property
    def is_pooled(self) -> bool:
        """Returns whether the test is made only once, on the sum over all batches."""
        return self.section[0] == "6" or self.name.startswith(("noise of the ", "bits of "))

    def is_likely(self, law: Floats, level: float) -> bool:
        """Returns whether the observed number is likely under ``law``: two-sided, at ``level``."""
        below, above = law[: self.observed + 1].sum(), law[self.observed :].sum()
        return bool(min(below, above) > level / 2)

    @property
    def fault(self) -> MistakeError | None:
        """The mistake if `observed` is unlikely under `law` at the level `LEVEL`, else None."""
        if self.is_likely(self.law, LEVEL):
            return None
        mean = float(self.law @ np.arange(self.law.size))
        detail = f"{self.name}: expected about {mean:.4g}, seen {self.observed}"
        hints = [hint for part, hint in HINTS.items() if part in f"{self.section} {self.name}"]
        return MistakeError(self.section, detail + "".join(hints[:1]))


def pooled_faults(pooled: dict[str, Test]) -> Iterator[MistakeError]:
    """Yields the first fault of each section of docs/protocol.md.

    If noise is wrong, yields only the faults of noise: wrong noise also changes the numbers of
    policies and reward bits. A fault names the known mistakes that explain all its section's tests.
    """
    failed = {test.section: fault for test in reversed(pooled.values()) if (fault := test.fault)}
    noise = [fault for section, fault in failed.items() if section[0] != "6"]
    for fault in noise or failed.values():
        tests = [t for t in pooled.values() if t.section == fault.args[0] and t.others]
        names = [{n for n, law in t.others.items() if t.is_likely(law, 1e-4)} for t in tests]
        section, detail = fault.args
        if both := sorted(set.intersection(*names)) if names else []:
            detail += f"; as of a client with {' or '.join(both)}"
        yield MistakeError(section, detail)


@lru_cache(maxsize=512)
def binomial(N: int, p: float) -> Floats:
    """Returns the probabilities of 0 to N ones among N bits, each 1 with probability p."""
    return np.diff(special.bdtr(np.arange(N + 1.0), N, p), prepend=0)


@dataclass(frozen=True)
class BatchLaw:
    """The law of a batch's reports. Episodes begin in state 0, and transitions are certain.

    ``next_states`` and ``rewards`` (H, X, A) have the next state and the mean reward.
    """

    descriptor: BatchDescriptor
    next_states: Ints
    rewards: Floats

    @cached_property
    def paths(self) -> list[tuple[list[Ints], Ints, Floats]]:
        """A tuple for each policy: sets of counters, reward counters, mean reward bits. An episode
        raises one counter of each set. A reward bit of 1 raises the reward counter of its step."""
        d, h, found = self.descriptor, np.arange(self.descriptor.horizon), []
        for policy in d.mixture.policies:
            x = np.zeros(d.horizon + 1, dtype=np.int64)
            for step in h:
                x[step + 1] = self.next_states[step, x[step], policy[step, x[step]]]
            a = policy[h, x[:-1]]
            means = (self.rewards[h, x[:-1], a] - d.reward_low) / (d.reward_high - d.reward_low)
            zero, one = (d.layout.encode(Episode(x, a, np.full_like(a, bit))) for bit in (0, 1))
            sets = [np.unique(pair) for pair in zip(zero, one, strict=False)]
            found.append((sets, one if "joint" in d.layout.shapes else one[zero.size :], means))
        return found

    def matches(self, counts: Ints, axis: int = 0, *values: int) -> npt.NDArray[np.bool_]:
        """Returns (n, M): whether report i, a row of counts, may hold an episode of policy m.

        If there are ``values``, looks only at counters whose coordinate ``axis`` is one of them.
        """
        where, found = self._coordinates[:, axis], []
        for required, *_ in self.paths:
            chosen = [c for c in required if not values or where[c[0]] in values]
            rows = np.array([counts[:, c].any(axis=1) for c in chosen])
            found.append(rows.reshape(-1, len(counts)).all(axis=0))
        return np.array(found).T

    def mistakes(
        self, counts: Ints, seen: set[bytes], pooled: dict[str, Test]
    ) -> Iterator[MistakeError]:
        """Yields mistakes in the reports of a batch; ``counts`` is (n, C + 1).

        ``seen`` has the noise of earlier batches; ``pooled`` adds up tests over batches.
        """
        yield from (certain := list(self._certain(counts)))
        p, noise = noise_bits(self.descriptor)[1], counts[:, self._never].astype(np.uint8)
        chance = len(noise) ** 2 * (p * p + (1 - p) ** 2) ** noise.shape[1]
        rows = [row.tobytes() for row in noise if row.any()] if TESTS * chance < LEVEL else []
        if len({*rows} - seen) < len(rows):
            detail = "expected fresh noise in every report; seen the same in several"
            yield MistakeError(self._section, detail)
        seen |= {*rows}
        tests = [] if certain else [*self._noise_tests(counts), *self._episode_tests(counts)]
        failed = [test for test in tests if not test.is_pooled and test.fault]
        for test in (test for test in tests if test.is_pooled and not failed):
            key = f"{test.section} {test.name}"
            pooled[key] = pooled[key] + test if key in pooled else test
        # Too little noise fails many tests. The first shows how little; a number of 0 shows where.
        where = [t for t in failed[1:] if not t.observed and t.name[:5] in {"noise", "least"}]
        yield from (test.fault for test in failed[:1] + where[:1] if test.fault)

    def _certain(self, counts: Ints) -> Iterator[MistakeError]:
        """Yields mistakes that no random draw of a correct client can explain."""
        bits, most = noise_bits(self.descriptor)[0], int(counts[:, :-1].max())
        lost, index = (~self.matches(counts).any(axis=1)).sum(), counts[:, :-1].max(axis=0).argmax()
        others = misread(self.descriptor) if most > bits + 1 and not counts[:, -1].any() else ()
        dummy = [f" ({index} is the dummy {name})" for name, d in others if d.layout.dummy == index]
        if lost and self.descriptor.trust != "local":
            detail = f"{lost} of {len(counts)} reports hold no episode of the batch's mixture"
            detail += f" at step {self.descriptor.layer}" * (self.descriptor.layer is not None)
            yield MistakeError("5.3", f"{detail}{''.join(dummy) or self._why_lost(counts)}")
        elif most > bits + 1:
            detail = f"expected at most {bits + 1} ones of a counter in a report, {bits} of noise"
            detail += f"; seen {most} of index {index}"
            detail += "".join(dummy) or f" (a dummy has index {counts.shape[1] - 1})"
            yield MistakeError(self._section if bits else "10", detail)

    @property
    def _section(self) -> str:
        """The section on the noise of this batch."""
        d = self.descriptor
        return "8.2" if d.word_bits else "9" if d.trust == "local" else "7"

    @cached_property
    def _never(self) -> Ints:
        """The counters that no episode raises, and that therefore hold only noise."""
        raised = [np.concatenate([*required, ones]) for required, ones, _ in self.paths]
        return np.setdiff1d(np.arange(self.descriptor.layout.counters), np.concatenate(raised))

    @cached_property
    def _coordinates(self) -> npt.NDArray[np.int64]:
        """The family (by number), h, x, a, x', r of every counter; -1 for a missing coordinate."""
        layout, start = self.descriptor.layout, 0
        table = np.full((layout.counters, len(AXES)), -1)
        for number, block in enumerate(layout.split(np.ones(layout.counters)).values()):
            at = np.argwhere(block)
            rows = table[start : (start := start + len(at))]
            rows[:, 0], rows[:, 1 : at.shape[1] + 1] = number, at
        return table

    def _why_lost(self, counts: Ints) -> str:
        """Names a mistake that explains all reports, or the families or steps that are wrong."""
        for name, law in self._other_laws():
            with suppress(ValueError):  # such an episode may be outside the support
                if law.matches(counts).any(axis=1).all():
                    return f"; all hold one {name}"
        for name, place in self._other_orders():
            if self.matches(counts[:, place]).any(axis=1).all():
                return f"; all hold one {name}"
        (bits, p), (n, size) = noise_bits(self.descriptor), counts[:, :-1].shape
        own, noise, total = n * len(self.paths[0][0]), size * n * bits * p, counts[:, :-1].sum()
        if own > 8 * noise**0.5 and total < noise + own / 2:
            return "; they hold hardly more than noise: is the episode counted?"
        for axis, values in enumerate(self._coordinates[:, :2].T):
            every = np.unique(values)
            bad = [v for v in every if not self.matches(counts, axis, v).any(axis=1).all()]
            names = [*self.descriptor.layout.shapes] if axis == 0 else [f"h = {h}" for h in every]
            if 0 < len(bad) < len(every):
                return f"; only these are wrong: {', '.join(names[v] for v in bad)}"
        if own > 8 * noise**0.5 and total - counts[:, self._never].sum() >= own:
            return "; together they hold enough: has each the messages of one user only (7)?"
        return ""

    def _other_orders(self) -> Iterator[tuple[str, Ints]]:
        """Yields descriptions of other orders of the counters, each with every counter's place."""
        names, (*inner, family) = tuple(self.descriptor.layout.shapes), self._coordinates[:, ::-1].T
        yield "with 1 added to every index", np.roll(np.arange(family.size), -1)
        for order in permutations(range(len(names))):
            text = f"in the order (5.2) {', '.join(names[k] for k in order)}"
            yield text, np.argsort(np.lexsort((*inner, np.argsort(order)[family])))
        for axes in permutations(range(len(AXES))):
            text = f"in the order ({', '.join(AXES[axis] for axis in axes)})"
            yield text, np.argsort(np.lexsort(self._coordinates[:, axes[::-1]].T))

    def _other_laws(self) -> Iterator[tuple[str, "BatchLaw"]]:
        """Yields laws of clients that use counters, policy row or transitions of a wrong step."""
        d = self.descriptor
        changed = partial(BatchDescriptor.model_construct, **dict(d))
        for h in range(d.horizon) if d.layer is not None and not d.support else ():
            yield f"of step {h}", replace(self, descriptor=changed(layer=h))
        for h in range(d.horizon):
            same = np.repeat(self.next_states[h : h + 1], d.horizon, axis=0)
            yield f"with the transitions of P[{h}] at every step", replace(self, next_states=same)
            rows = tuple((policy[h],) * d.horizon for policy in d.policies)
            by_row = replace(self, descriptor=changed(policies=rows))
            yield f"with row {h} of the policy at every step", by_row
        ways = tuple(product(*zip(*d.policies, strict=True)))
        shares = (sum(d.weights) // len(ways),) * len(ways)
        by_step = replace(self, descriptor=changed(policies=ways, weights=shares))
        yield "with a policy drawn for each step", by_step

    def _noise_tests(self, counts: Ints) -> Iterator[Test]:
        """Yields tests of the noise in reports (n, C + 1), on counters that no episode raises."""
        (bits, p), n, noise = noise_bits(self.descriptor), len(counts), counts[:, self._never]
        N, size, totals = n * bits, self._never.size, noise.sum(axis=0)
        test = partial(Test, self._section)
        for end, c in (("first", 0), ("last", self.descriptor.layout.counters - 1)):
            if c in self._never:
                yield test(f"noise of the {end} counter", int(counts[:, c].sum()), binomial(N, p))
        groups = {"all counters without data": np.ones(size, dtype=np.bool_)}
        for axis, values in zip(AXES, self._coordinates[self._never].T, strict=True):
            for value in np.unique(values[values >= 0]):
                groups[f"counters with {axis} = {value}"] = values == value
        for name, g in groups.items():
            yield test(f"noise of {name}", int(totals[g].sum()), binomial(N * int(g.sum()), p))
        law = binomial(size, (1 - p) ** N)
        yield test("counters that no report gave noise", int((totals == 0).sum()), law)
        law = np.diff(np.cumsum(binomial(N, p)) ** size, prepend=0)
        yield test("most noise of one counter", int(totals.max()), law)
        above = np.cumsum(binomial(bits * size, p)[::-1])[::-1] ** n
        least = int(noise.sum(axis=1).min())
        yield test("least noise of one report", least, -np.diff(above, append=0))
        yield from self._spread_tests(counts, test)

    def _spread_tests(self, counts: Ints, test: Callable[..., Test]) -> Iterator[Test]:
        """Yields tests that find noise of a fixed amount, or the same noise in two places."""
        (bits, p), n, d = noise_bits(self.descriptor), len(counts), self.descriptor
        middle = int(bits * p)
        high, q = counts[:, self._never] > middle, 1 - binomial(bits, p)[: middle + 1].sum()
        if bits > 1:
            name = "noise of the counters: how often it is above its mean"
            yield test(name, int(high.sum()), binomial(high.size, q))
        own, N = counts[:, self._never].sum(axis=1), bits * self._never.size
        if d.trust != "local" and "rewards" not in d.layout.shapes:
            own, N = counts[:, :-1].sum(axis=1) - d.layout.cells, bits * d.layout.counters
        above = 1 - binomial(N, p)[: int(N * p) + 1].sum()
        more = int((own > int(N * p)).sum())
        yield test("reports with more noise than its mean", more, binomial(n, above))
        both = high[: n // 2 * 2 : 2] & high[1::2]
        name = "noise of the same counter in two reports: how often both are above the mean"
        yield test(name, int(both.sum()), binomial(both.size, q * q))
        for axis, pairs in self._pairs.items():
            both = high[:, pairs[:, 0]] & high[:, pairs[:, 1]]
            name = f"noise of the same counter but for its {axis}: how often both are above mean"
            yield test(name, int(both.sum()), binomial(both.size, q * q))

    @cached_property
    def _pairs(self) -> dict[str, Ints]:
        """For each coordinate, disjoint pairs of counters without data that differ only in it.

        Counters of two families form a pair if they have the same place in their families.
        """
        table, found = self._coordinates[self._never], dict[str, Ints]()
        place = self._never - np.searchsorted(self._coordinates[:, 0], table[:, 0])
        for axis, name in enumerate(AXES):
            groups: dict[tuple[int, ...], list[int]] = {}
            for at, row in enumerate(np.delete(table, axis, 1) if axis else place[:, None]):
                groups.setdefault(tuple(row.tolist()), []).append(at)
            each = [pair for g in groups.values() for pair in zip(g[-2::-2], g[::-2], strict=False)]
            found |= {name: np.array(each)} if each else {}
        return found

    def _episode_tests(self, counts: Ints) -> Iterator[Test]:
        """Yields tests of policies, of reward bits, and of noise on the counters of an episode."""
        (bits, p), n, matches = noise_bits(self.descriptor), len(counts), self.matches(counts)
        weights, local = self.descriptor.mixture.probabilities, self.descriptor.trust == "local"
        others = {f"policy {k} alone": np.eye(weights.size)[k] for k in range(weights.size)}
        others["policies drawn alike"] = np.full(weights.size, 1 / weights.size)
        others["the weights in reverse"] = weights[::-1]
        for k, (required, *_) in enumerate(self.paths):
            sizes = [c.size for c in required]
            hidden = p * (1 - p) ** (sizes[0] - 1) if local else 0.0
            by_noise = (1 - (1 - p) ** (bits * sizes[0])) ** len(sizes)
            more = (1 - hidden) ** len(sizes) - by_noise
            qs = {name: by_noise + w[k] * more for name, w in others.items()}
            q, seen = by_noise + weights[k] * more, int(matches[:, k].sum())
            if k == 0:
                unlike = int((matches[: n // 2 * 2 : 2, k] != matches[1::2, k]).sum())
                name = "pairs of reports of which one has policy 0 (drawn for each report?)"
                laws = {other: binomial(n // 2, 2 * r * (1 - r)) for other, r in qs.items()}
                yield Test("6.1", name, unlike, binomial(n // 2, 2 * q * (1 - q)), laws)
            laws = {other: binomial(n, r) for other, r in qs.items()}
            yield Test("6.1", f"reports with policy {k}", seen, binomial(n, q), laws)
            sure = matches[:, k] & (matches.sum(axis=1) == 1)
            yield from self._reward_tests(counts if local else counts[sure], k)
            if not local:
                cells = np.concatenate(required)
                extra = int((counts[sure][:, cells].sum(axis=1) - len(required)).sum())
                law = binomial(int(sure.sum()) * bits * cells.size, p)
                name = "noise of the counters that an episode raises"
                yield Test(self._section, name, extra, law)
        if local:
            absent = np.array([~counts[:, required[0]].any(axis=1) for required, *_ in self.paths])
            size = self.paths[0][0][0].size
            q = p * (1 - p) ** (size * len(self.paths) - 1)
            name = "bits of the first transition: reports in which each is 0"
            yield Test("9", name, int(absent.all(axis=0).sum()), binomial(n, q))

    def _reward_tests(self, counts: Ints, k: int) -> Iterator[Test]:
        """Yields tests of the reward bits in reports with policy k (in all reports if `local`)."""
        (bits, p), N, d = noise_bits(self.descriptor), len(counts), self.descriptor
        _, ones, means = self.paths[k]
        local, rewards = d.trust == "local", means * (d.reward_high - d.reward_low) + d.reward_low
        share = d.mixture.probabilities[k] if local else 1.0
        others = {"the reward itself as the probability": rewards, "always 1": means**0}
        others |= {"bits that are always 0": 0 * means, "inverted bits": 1 - means}
        others |= {"rounded rewards": np.rint(means), "fair coins": 0 * means + 0.5}
        others["the reward / (reward_high - reward_low)"] = rewards / (d.reward_high - d.reward_low)
        others["the previous step's reward"] = np.roll(means, 1)

        def law(q: float) -> Floats:
            if local:
                return binomial(N, share * q + p - 2 * share * q * p)
            return np.convolve(binomial(N, q), binomial(N * bits, p))

        for h, c in enumerate(ones):
            name = f"reward bits at step {h} of policy {k}, sent if 1"
            wrong = {name: law(float(np.clip(q[h], 0, 1))) for name, q in others.items()}
            yield Test("6.2", name, int(counts[:, c].sum()), law(means[h]), wrong)
        chances = 1 - (1 - means) * (1 - p) ** bits
        for h in range(0 if local else len(ones) - 1):
            one, two = chances[h : h + 2]
            unlike = int(((counts[:, ones[h]] > 0) != (counts[:, ones[h + 1]] > 0)).sum())
            name = f"reports of policy {k} whose reward bits of steps {h} and {h + 1} differ"
            q = one + two - 2 * one * two
            yield Test("6.2", f"{name} (drawn for each step?)", unlike, binomial(N, q))


def check_reports(
    law: BatchLaw, reports: Sequence[Tries], seen: set[bytes], pooled: dict[str, Test]
) -> Iterator[MistakeError]:
    """Yields reports' mistakes or, if all open, the batch's. ``seen`` also has ephemeral keys."""
    opened, wrong = list[Ints](), Counter[tuple[str, str]]()
    for tries in reports:
        try:
            opened.append(open_report(tries, seen))
        except MistakeError as mistake:
            wrong[mistake.args] += 1
    for (section, detail), count in wrong.most_common(3):
        yield MistakeError(section, f"{count} of {len(reports)} reports: {detail}")
    if len(opened) == len(reports) > 0:
        yield from law.mistakes(np.stack(opened), seen, pooled)
