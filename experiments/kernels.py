"""Compiled per-episode learning: the loops of `ucbvi` and `private_ucbvi`, episode by episode.

Every function repeats the arithmetic of the reference learners in the same order and takes its
draws from the same NumPy generators in the same order, so that both give the same policies, draw by
draw (tests; rows are summed in order of x', which NumPy does below eight states: beyond, the last
bit may differ). Draws, all from PCG64: an episode takes 1 + 2 H uniforms (start; then next state
and reward bit of every step), a completed block or a user's message one noise a counter.

Regret is exact: a policy's value by backward induction in the true MDP, once for every policy that
differs from the one before. Arrays are float64; P (H, X, A, X), r (H, X, A), policy (H, X).

All is one file because numba's cache on disk only sees changes of the file a function stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])

PRACTICAL, AZAR, QIAO = 0, 1, 2
LAPLACE, GAUSSIAN = 1, 2


class World(NamedTuple):
    """The true MDP, its V*, and running sums of d1 and of the rows of P."""

    P: Floats
    r: Floats
    d1: Floats
    optimum: float
    start: Floats
    following: Floats


class Exploration(NamedTuple):
    """A bonus: its kind, the constants of `ucbvi.Bonus`, and the kind's logarithm."""

    kind: int
    bonus_scale: float
    noise_scale: float
    least_visits: float
    iota: float


class Privacy(NamedTuple):
    """A Privatizer; one draw of its noise has `scale` and `variance`; log_term > 0 asks for E."""

    local: bool
    separate_visits: bool
    kind: int
    scale: float
    variance: float
    log_term: float


def compiled(function: Function) -> Function:
    """Compile for this machine; IEEE arithmetic, no reordering; kept on disk between runs."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


@compiled
def run_episode(generator: np.random.Generator, world: World, policy: Ints, episode: Ints) -> None:
    """One episode into `episode` (H, 4): x, a, x', reward bit.

    A state is the first whose running sum exceeds a uniform draw, the last one at most.
    """
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
    """V* less a policy's exact value; V (2, X) is scratch."""
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
    P: Floats, r: Floats, N: Floats, bonus: Exploration, noise: Floats, policy: Ints, V: Floats
) -> bool:
    """`UCBVI.optimistic`: overwrite `policy`; tell whether it changed.

    noise = (variance of a transition count, variance of a reward sum, E). V (3, X) is scratch: V_h,
    V_{h+1}, its square.
    """
    H, X, A = r.shape
    sigma_T, sigma_R, E = noise[0], noise[1], noise[2]
    V[:, :] = 0.0
    changed = False
    for h in range(H - 1, -1, -1):
        most = float(H - h)
        for x in range(X):
            best, action = -1.0, 0
            for a in range(A):
                Q, n = most, N[h, x, a]
                if n >= 1.0:
                    mean, square, squares = 0.0, 0.0, 0.0
                    for y in range(X):
                        mean += P[h, x, a, y] * V[1, y]
                        square += P[h, x, a, y] * V[2, y]
                    if sigma_R > 0.0:
                        for y in range(X):
                            squares += (V[1, y] - mean) * (V[1, y] - mean)
                    variance = max(square - mean * mean, 0.0)
                    shift = E * X if bonus.kind == QIAO else sigma_T * squares + sigma_R
                    Q = min(
                        r[h, x, a] + mean + _b(r[h, x, a], n, variance, shift, most, H, bonus), most
                    )
                if best < Q:
                    best, action = Q, a
            V[0, x] = best
            if policy[h, x] != action:
                policy[h, x] = action
                changed = True
        for x in range(X):
            V[1, x], V[2, x] = V[0, x], V[0, x] * V[0, x]
    return changed


@compiled
def _b(
    r: float, N: float, variance: float, shift: float, most: float, H: int, bonus: Exploration
) -> float:
    """The bonus: `UCBVI.exploration`, `PrivateUCBVI.exploration`; `shift` is what noise does."""
    width = bonus.iota / N
    if bonus.kind == AZAR:
        return float(7.0 * H * bonus.iota / np.sqrt(N))
    if bonus.kind == QIAO:
        b = 2.0 * np.sqrt(variance * width) + np.sqrt(2.0 * width)
        return float(b + 20.0 * H * shift * width + 4.0 * H * np.sqrt(width))
    b = bonus.bonus_scale * (np.sqrt((variance + r * (1.0 - r)) * width) + most * width)
    if shift > 0.0:
        b += bonus.noise_scale * np.sqrt(bonus.iota * shift) / N
    return float(b)


@compiled
def run_ucbvi(
    generator: np.random.Generator,
    world: World,
    bonus: Exploration,
    checkpoints: Ints,
    policy: Ints,
) -> tuple[Floats, int]:
    """UCBVI for checkpoints[-1] episodes: regret at the checkpoints, and switches.

    `policy` is overwritten with the last one deployed.
    """
    r = world.r
    H, X, A = r.shape
    counts, rewards, N = np.zeros((H, X, A, X)), np.zeros((H, X, A)), np.zeros((H, X, A))
    rows, means, noise = np.zeros((H, X, A, X)), np.zeros((H, X, A)), np.zeros(3)
    episode, V, U = np.zeros((H, 4), np.int64), np.zeros((3, X)), np.zeros((2, X))
    curve = np.zeros(len(checkpoints))
    switches, regret, gap, at = 0, 0.0, 0.0, 0
    for k in range(1, checkpoints[-1] + 1):
        if plan(rows, means, N, bonus, noise, policy, V) or k == 1:
            gap = loss(world, policy, U)
            switches += k > 1
        regret += gap
        run_episode(generator, world, policy, episode)
        for h in range(H):
            x, a = episode[h, 0], episode[h, 1]
            counts[h, x, a, episode[h, 2]] += 1.0
            rewards[h, x, a] += episode[h, 3]
            N[h, x, a] += 1.0
            for y in range(X):
                rows[h, x, a, y] = counts[h, x, a, y] / N[h, x, a]
            means[h, x, a] = rewards[h, x, a] / N[h, x, a]
        if k == checkpoints[at]:
            curve[at] = regret
            at += 1
    return curve, switches


@compiled
def draw(generator: np.random.Generator, privacy: Privacy) -> float:
    """One noise: `AdditiveNoise.draw`, element by element."""
    if privacy.kind == LAPLACE:
        return generator.laplace(0.0, privacy.scale)
    if privacy.kind == GAUSSIAN:
        return generator.normal(0.0, privacy.scale)
    return 0.0


@compiled
def add_to_tree(
    generator: np.random.Generator,
    t: int,
    touched: Ints,
    total: Floats,
    blocks: Floats,
    privacy: Privacy,
    released: Floats,
) -> None:
    """`BinaryMechanism.add` of contribution t, ones at `touched`; blocks (levels, C)."""
    for i in touched:
        if i >= 0:
            total[i] += 1.0
    completed = 0
    while not t >> completed & 1:
        blocks[completed, :] = 0.0
        completed += 1
    for c in range(len(total)):
        blocks[completed, c] = draw(generator, privacy)
        released[c] = blocks[completed, c]
    for level in range(completed + 1, len(blocks)):
        if t >> level & 1:
            for c in range(len(total)):
                released[c] += blocks[level, c]
    for c in range(len(total)):
        released[c] = total[c] + released[c]


@compiled
def add_local(
    generator: np.random.Generator,
    touched: Ints,
    message: Floats,
    privacy: Privacy,
    released: Floats,
) -> None:
    """`LocalPrivatizer.add`; `message` (C,) is scratch."""
    message[:] = 0.0
    for i in touched:
        if i >= 0:
            message[i] = 1.0
    for c in range(len(message)):
        released[c] += message[c] + draw(generator, privacy)


@compiled
def project(row: Floats, total: float, tolerance: float, n: Floats, order: Floats) -> float:
    """`postprocess.project` of one row into n (X,); returns its sum. `order` (X,) is scratch."""
    X = len(row)
    for i in range(X):
        c, j = row[i], i
        while j > 0 and order[j - 1] < c:
            order[j] = order[j - 1]
            j -= 1
        order[j] = c
    prefix, raised, lowered = 0.0, np.inf, np.inf
    for k in range(1, X + 1):
        prefix += order[k - 1]
        raised = min(raised, (total - tolerance - prefix) / k)
        lowered = min(lowered, (total + tolerance - prefix) / k)
    shift = max(0.0, raised) + min(0.0, lowered)
    visits = 0.0
    for x in range(X):
        n[x] = max(row[x] + shift, 0.0) if total + tolerance >= 0 else 0.0
        visits += n[x]
    return visits


@compiled
def estimate(
    released: Floats,
    separate_visits: bool,
    E: float,
    least: float,
    rows: Floats,
    means: Floats,
    N: Floats,
    scratch: Floats,
) -> None:
    """`PrivateUCBVI.estimates`: P~, r~, N~ from released counters; E > 0 adds the add-on."""
    H, X, A = means.shape
    pairs = H * X * A
    transitions = released[: pairs * X].reshape(pairs, X)
    flat, flat_means, flat_N = rows.reshape(pairs, X), means.reshape(pairs), N.reshape(pairs)
    rewards = pairs * X + (pairs if separate_visits else 0)
    for i in range(pairs):
        total = transitions[i, 0]
        for y in range(1, X):
            total += transitions[i, y]
        if separate_visits:
            total = released[pairs * X + i]
        visits = project(transitions[i], total, E / 4, flat[i], scratch)
        if E > 0.0:
            visits = 0.0
            for y in range(X):
                flat[i, y] += E / (2 * X)
                visits += flat[i, y]
        if visits > 0.0:
            for y in range(X):
                flat[i, y] /= visits
        flat_N[i], flat_means[i] = max(visits, least), 0.0
        if flat_N[i] > 0.0:
            flat_means[i] = min(max(released[rewards + i] / flat_N[i], 0.0), 1.0)


@compiled
def counters_of(episode: Ints, X: int, A: int, separate_visits: bool, touched: Ints) -> None:
    """`CounterLayout.encode` into `touched` (3 H,); -1 for what is not sent."""
    H = len(episode)
    pairs = H * X * A
    rewards = pairs * X + (pairs if separate_visits else 0)
    for h in range(H):
        x, a, y, bit = episode[h, 0], episode[h, 1], episode[h, 2], episode[h, 3]
        pair = (h * X + x) * A + a
        touched[h] = pair * X + y
        touched[H + h] = pairs * X + pair if separate_visits else -1
        touched[2 * H + h] = rewards + pair if bit else -1


@compiled
def run_private(
    generator: np.random.Generator,
    noise_generator: np.random.Generator,
    world: World,
    privacy: Privacy,
    bonus: Exploration,
    checkpoints: Ints,
    policy: Ints,
) -> tuple[Floats, int]:
    """Private UCB-VI for checkpoints[-1] episodes: regret at the checkpoints, and switches."""
    separate_visits, r = privacy.separate_visits, world.r
    H, X, A = r.shape
    K = checkpoints[-1]
    C = H * X * A * (X + (2 if separate_visits else 1))
    levels = 0
    while K - 1 >> levels:
        levels += 1
    blocks = np.zeros((0 if privacy.local else levels, C))
    total, released = np.zeros(C), np.zeros(C)
    rows, means, N = np.zeros((H, X, A, X)), np.zeros((H, X, A)), np.zeros((H, X, A))
    noise, touched, scratch = np.zeros(3), np.zeros(3 * H, np.int64), np.zeros(X)
    episode, V, U = np.zeros((H, 4), np.int64), np.zeros((3, X)), np.zeros((2, X))
    curve = np.zeros(len(checkpoints))
    switches, regret, gap, at = 0, 0.0, 0.0, 0
    for k in range(1, K + 1):
        if k > 1:
            least = bonus.least_visits * np.sqrt(noise[0] * (1 if separate_visits else X))
            estimate(released, separate_visits, noise[2], least, rows, means, N, scratch)
        if plan(rows, means, N, bonus, noise, policy, V) or k == 1:
            gap = loss(world, policy, U)
            switches += k > 1
        regret += gap
        run_episode(generator, world, policy, episode)
        if k < K:
            counters_of(episode, X, A, separate_visits, touched)
            if privacy.local:
                add_local(noise_generator, touched, total, privacy, released)
            else:
                add_to_tree(noise_generator, k, touched, total, blocks, privacy, released)
            set_noise(noise, k, privacy)
        if k == checkpoints[at]:
            curve[at] = regret
            at += 1
    return curve, switches


@compiled
def set_noise(noise: Floats, t: int, privacy: Privacy) -> None:
    """Variances and E of the counts after t contributions: `variance`, `deviation`."""
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
