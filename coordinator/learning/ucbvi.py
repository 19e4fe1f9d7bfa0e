"""UCBVI and private UCB-VI, compiled: episodes, a plan before each episode, and exact regret.

`coordinator.learning.ucbvi_parameters` describes the algorithm, its bonuses and its noise with the
letters of this module. In the tests, a NumPy oracle takes the same random draws in the same order,
and gives the same policies. An episode takes 1 + 2 H uniform numbers: one for the start, and two
for every step (the next state and the reward bit). Each counter takes one draw of noise for a
completed block (Central Privatizer) or for a user's message (Local Privatizer). Inner loops run
over pairs (h, x, a) for one x' at a time, so that they fill vector registers.

Arrays are float64: P (H, X, A, X), r (H, X, A), policy (H, X).
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from riffle.coordinator.learning.planning import Floats, Ints, compiled

PRACTICAL, AZAR, QIAO = 0, 1, 2
NONE, LAPLACE, GAUSSIAN = 0, 1, 2
AT_ONCE = 128  # users whose noise is drawn together: few enough for the cache


class World(NamedTuple):
    """The true MDP, its optimal value, and cumulative sums of d1 (`start`) and P (`following`)."""

    P: Floats
    r: Floats
    d1: Floats
    optimum: float
    start: Floats
    following: Floats


class Exploration(NamedTuple):
    """A bonus: its kind, the constants of `ucbvi_parameters.Bonus`, and the log factor `iota`."""

    kind: int
    bonus_scale: float
    noise_scale: float
    least_visits: float
    iota: float


class Privacy(NamedTuple):
    """A Privatizer. `scale` and `variance` describe one draw of its noise.

    `log_term` sets the bound E on the noise (`set_noise`). If `log_term` is 0, E is 0. The kind
    NONE is UCBVI without privacy, which counts exactly.
    """

    local: bool
    separate_visits: bool
    kind: int
    scale: float
    variance: float
    log_term: float


class Work(NamedTuple):
    """Scratch arrays: V (X,), counts (X, pairs), and four arrays (pairs,), with H X A pairs."""

    V: Floats
    counts: Floats
    total: Floats
    first: Floats
    second: Floats
    third: Floats

    @classmethod
    def of(cls, X: int, pairs: int) -> Work:
        """Returns arrays of zeros."""
        return cls(np.zeros(X), np.zeros((X, pairs)), *(np.zeros(pairs) for _ in range(4)))


@compiled
def run_episode(generator: np.random.Generator, world: World, policy: Ints, episode: Ints) -> None:
    """Runs one episode. Writes x, a, x' and the reward bit of each step into `episode` (H, 4)."""
    following, r = world.following, world.r
    x, uniform = 0, generator.random()
    while x < len(world.start) - 1 and world.start[x] <= uniform:
        x += 1
    for h in range(len(policy)):
        a, y, uniform = policy[h, x], 0, generator.random()
        while y < following.shape[3] - 1 and following[h, x, a, y] <= uniform:
            y += 1
        episode[h, 0], episode[h, 1], episode[h, 2] = x, a, y
        episode[h, 3] = 1 if generator.random() < r[h, x, a] else 0
        x = y


@compiled
def loss(world: World, policy: Ints, V: Floats) -> float:
    """Returns V* minus a policy's exact value; V (2, X) is scratch."""
    P, r = world.P, world.r
    H, X = policy.shape
    V[H % 2, :] = 0.0
    for h in range(H - 1, -1, -1):
        now, then = V[h % 2], V[(h + 1) % 2]
        for x in range(X):
            a = policy[h, x]
            total = r[h, x, a]
            for y in range(X):
                total += P[h, x, a, y] * then[y]
            now[x] = total
    value = 0.0
    for x in range(X):
        value += world.d1[x] * V[0, x]
    return world.optimum - value


@compiled
def plan(
    P: Floats, r: Floats, N: Floats, bonus: Exploration, noise: Floats, policy: Ints, work: Work
) -> bool:
    """Overwrites `policy` with the optimistic policy; returns whether it changed.

    The axes of P (X, H X A) are x' and (h, x, a); r and N are (H X A,). `noise` (3,) has the noise
    variances of a transition count and of a reward sum, and the bound E on the noise.
    """
    H, X = policy.shape
    pairs, V, changed = len(r) // H, work.V, False
    mean, square, squares = work.first[:pairs], work.second[:pairs], work.third[:pairs]
    sigma_T, sigma_R, E = noise[0], noise[1], noise[2]
    V[:] = 0.0
    for h in range(H - 1, -1, -1):
        mean[:], square[:], squares[:] = 0.0, 0.0, 0.0
        for y in range(X):
            row, then = P[y, h * pairs : (h + 1) * pairs], V[y]
            for i in range(pairs):
                mean[i] += row[i] * then
                square[i] += row[i] * (then * then)
        for y in range(X if sigma_R > 0.0 else 0):
            then = V[y]
            for i in range(pairs):
                squares[i] += (then - mean[i]) * (then - mean[i])
        rewards, visits = r[h * pairs : (h + 1) * pairs], N[h * pairs : (h + 1) * pairs]
        most = float(H - h)
        for i in range(pairs):
            variance = max(square[i] - mean[i] * mean[i], 0.0)
            shift = E * X if bonus.kind == QIAO else sigma_T * squares[i] + sigma_R
            b = exploration(rewards[i], visits[i], variance, shift, most, H, bonus)
            # From here on, `mean` holds Q.
            mean[i] = min(rewards[i] + mean[i] + b, most) if visits[i] >= 1.0 else most
        changed |= greedy(mean, policy[h], V)
    return changed


@compiled
def exploration(
    r: float, N: float, variance: float, shift: float, most: float, H: int, bonus: Exploration
) -> float:
    """Returns the bonus b_h(x, a) from r^, N and the variance of V_{h+1}; `most` is H - h.

    For QIAO, `shift` is X times the bound E on noise. For PRACTICAL, `shift` is the variance of the
    noise in N (r~ + P~ V_{h+1}).
    """
    width = bonus.iota / N
    if bonus.kind == AZAR:
        return float(7.0 * H * bonus.iota / np.sqrt(N))
    if bonus.kind == QIAO:
        b = 2.0 * np.sqrt(variance * width) + np.sqrt(2.0 * width)
        return float(b + 20.0 * H * shift * width + 4.0 * H * np.sqrt(width))
    b = bonus.bonus_scale * (np.sqrt((variance + r * (1.0 - r)) * width) + most * width)
    return float(b + bonus.noise_scale * np.sqrt(bonus.iota * shift) / N)


@compiled
def greedy(Q: Floats, policy: Ints, V: Floats) -> bool:
    """Writes the best actions for Q (X A,) to `policy`, and their values to V.

    Returns whether an action changed.
    """
    X, changed = len(policy), False
    A = len(Q) // X
    for x in range(X):
        best, action = -1.0, 0
        for a in range(A):
            if best < Q[x * A + a]:
                best, action = Q[x * A + a], a
        V[x] = best
        if policy[x] != action:
            policy[x] = action
            changed = True
    return changed


@compiled
def learn(episode: Ints, counts: Floats, R: Floats, rows: Floats, means: Floats, N: Floats) -> None:
    """Adds an episode to exact `counts`, `R` and `N`. Updates the estimates `rows` and `means`."""
    pairs, X = len(N) // len(episode), len(rows)
    for h in range(len(episode)):
        i = h * pairs + episode[h, 0] * (pairs // X) + episode[h, 1]
        counts[episode[h, 2], i] += 1.0
        R[i] += episode[h, 3]
        N[i] += 1.0
        for y in range(X):
            rows[y, i] = counts[y, i] / N[i]
        means[i] = R[i] / N[i]


@compiled
def draws(generator: np.random.Generator, privacy: Privacy, C: int) -> Floats:
    """Returns noise (AT_ONCE, C) with the law of `AdditiveNoise.draw`. Large draws are fastest."""
    kind, scale = privacy.kind, privacy.scale
    with numba.objmode(noises="float64[:,::1]"):
        draw = generator.laplace if kind == LAPLACE else generator.normal
        noises = np.asarray(draw(0.0, scale, (AT_ONCE, C)))
    return noises  # noqa: RET504  (object mode hands its result out by name)


@compiled
def add_to_tree(t: int, total: Floats, noise: Floats, blocks: Floats, released: Floats) -> None:
    """Writes `total` + noise to `released`. `total` sums t contributions (`BinaryMechanism.add`).

    `blocks` (levels, C) has the noise of the newest block of each level. `noise` (C,) is the noise
    of the block that contribution t completes.
    """
    completed = 0
    while not t >> completed & 1:
        completed += 1
    blocks[completed] = noise
    released[:] = noise
    for level in range(completed + 1, len(blocks)):
        if t >> level & 1:
            released += blocks[level]
    released += total


@compiled
def project(c: Floats, total: Floats, tolerance: float, n: Floats, N: Floats, work: Work) -> None:
    """Projects each column of c (X, H X A) as `postprocess.project` projects a row.

    Writes these columns to n, and their sums to N. Odd-even transposition sorts all columns of c.
    """
    X, pairs = c.shape
    upper, lower = work.first, work.second
    n[:, :] = c
    for k in range(X):
        for j in range(k % 2, X - 1, 2):
            a, b = c[j], c[j + 1]
            for i in range(pairs):
                upper[i], lower[i] = max(a[i], b[i]), min(a[i], b[i])
            c[j], c[j + 1] = upper, lower
    prefix, raised, lowered = work.third, work.first, work.second
    prefix[:], raised[:], lowered[:] = 0.0, np.inf, np.inf
    for k in range(X):
        prefix += c[k]
        for i in range(pairs):
            raised[i] = min(raised[i], (total[i] - tolerance - prefix[i]) / (k + 1))
            lowered[i] = min(lowered[i], (total[i] + tolerance - prefix[i]) / (k + 1))
    for i in range(pairs):
        raised[i] = max(0.0, raised[i]) + min(0.0, lowered[i])
    N[:] = 0.0
    for x in range(X):
        row = n[x]
        for i in range(pairs):
            row[i] = max(row[i] + raised[i], 0.0) if total[i] + tolerance >= 0 else 0.0
        N += row


@compiled
def estimate(
    released: Floats,
    separate_visits: bool,
    E: float,
    least: float,
    rows: Floats,
    means: Floats,
    N: Floats,
    work: Work,
) -> None:
    """Estimates P~, r~ and N~ from the `released` counters (C,), by Eq. 7 of paper 000.

    Writes P~ to `rows` (X, H X A), r~ to `means` (H X A,) and N~ to N (H X A,). The projection has
    tolerance E / 4. If E > 0, the add-on follows. N~ is at least `least`.
    """
    X, pairs = rows.shape
    counts, total, rewards = work.counts, work.total, released[len(released) - pairs :]
    total[:] = 0.0
    for y in range(X):
        count = counts[y]
        for i in range(pairs):
            count[i] = released[i * X + y]
        total += count
    if separate_visits:
        total[:] = released[pairs * X : pairs * X + pairs]
    project(counts, total, E / 4, rows, N, work)
    if E > 0.0:
        N[:] = 0.0
        for y in range(X):
            rows[y] += E / (2 * X)
            N += rows[y]
    for y in range(X):
        row = rows[y]
        for i in range(pairs):
            row[i] = row[i] / N[i] if N[i] > 0.0 else row[i]
    for i in range(pairs):
        N[i] = max(N[i], least)
        means[i] = min(max(rewards[i] / N[i], 0.0), 1.0) if N[i] > 0.0 else 0.0


@compiled
def count(episode: Ints, X: int, A: int, separate_visits: bool, counters: Floats) -> None:
    """Adds an episode to counters (C,), in the order of `CounterLayout`."""
    H = len(episode)
    pairs = H * X * A
    for h in range(H):
        x, a, y, bit = episode[h, 0], episode[h, 1], episode[h, 2], episode[h, 3]
        pair = (h * X + x) * A + a
        counters[pair * X + y] += 1.0
        if separate_visits:
            counters[pairs * X + pair] += 1.0
        counters[len(counters) - pairs + pair] += bit


@compiled
def run(
    generator: np.random.Generator,
    noise_generator: np.random.Generator,
    world: World,
    privacy: Privacy,
    bonus: Exploration,
    checkpoints: Ints,
    policy: Ints,
    work: Work,
) -> tuple[Floats, int]:
    """Runs UCBVI or private UCB-VI for checkpoints[-1] episodes.

    Returns the regret at the checkpoints, and how often `policy` changed. Overwrites `policy`.
    """
    separate_visits, K = privacy.separate_visits, checkpoints[-1]
    private = privacy.kind != NONE
    H, X, A = world.r.shape
    pairs, levels = H * X * A, 0
    C = pairs * (X + (2 if separate_visits else 1))
    while K - 1 >> levels:
        levels += 1
    blocks = np.zeros((levels if private and not privacy.local else 0, C))
    upcoming, counts, R = np.zeros((0, C)), np.zeros((X, pairs)), np.zeros(pairs)
    total, released, noise = np.zeros(C), np.zeros(C), np.zeros(3)
    rows, means, N = np.zeros((X, pairs)), np.zeros(pairs), np.zeros(pairs)
    episode, U = np.zeros((H, 4), np.int64), np.zeros((2, X))
    curve = np.zeros(len(checkpoints))
    switches, regret, gap, at = 0, 0.0, 0.0, 0
    for k in range(1, K + 1):
        if private and k > 1:
            least = bonus.least_visits * np.sqrt(noise[0] * (1 if separate_visits else X))
            estimate(released, separate_visits, noise[2], least, rows, means, N, work)
        if plan(rows, means, N, bonus, noise, policy, work) or k == 1:
            gap = loss(world, policy, U)
            switches += k > 1
        regret += gap
        run_episode(generator, world, policy, episode)
        if not private:
            learn(episode, counts, R, rows, means, N)
        elif k < K:
            if (k - 1) % AT_ONCE == 0:
                upcoming = draws(noise_generator, privacy, C)
            noises = upcoming[(k - 1) % AT_ONCE]
            if privacy.local:
                count(episode, X, A, separate_visits, noises)
                released += noises
            else:
                count(episode, X, A, separate_visits, total)
                add_to_tree(k, total, noises, blocks, released)
            set_noise(noise, k, privacy)
        if k == checkpoints[at]:
            curve[at] = regret
            at += 1
    return curve, switches


@compiled
def set_noise(noise: Floats, t: int, privacy: Privacy) -> None:
    """Sets the `noise` (3,) of `plan` for counts that sum the contributions of t users."""
    terms = t
    if not privacy.local:
        terms = 0
        while t:
            t &= t - 1
            terms += 1
    noise[0] = noise[1] = terms * privacy.variance
    ell = privacy.log_term
    noise[2] = 0.0
    if ell > 0.0 and privacy.kind == GAUSSIAN:
        noise[2] = 4.0 * (privacy.scale * np.sqrt(2.0 * terms * ell))
    elif ell > 0.0:
        noise[2] = 4.0 * (privacy.scale * (2.0 * np.sqrt(terms * ell) + ell))
