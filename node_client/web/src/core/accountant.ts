/**
 * The smallest epsilon for which a batch is (epsilon, beta)-DP, or a little more
 * (docs/protocol.md, section 12).
 *
 * Privacy losses are put on a grid. A loss divides its probability between the grid points below and
 * above it. The division keeps the result from being below the true epsilon, except for rounding
 * (section 12.4).
 */
import { pmf, tail } from "./binomial.js";
import { convolve } from "./convolution.js";
import type { Noise } from "./noise.js";

/** The accountant's input about a batch. `wordBits` is null unless the batch is summed. */
export interface BatchEvent {
  readonly noise: Noise;
  readonly n: number;
  readonly dishonestFraction: number;
  readonly cells: number;
  readonly counters: number;
  readonly noiseSlots: number;
  readonly wordBits: number | null;
}

const MOST_OUTCOMES = 1 << 22;
const MOST_POINTS = 4000; // in a standard deviation of the sum
const ROUNDING = 100; // most mass that roundings may hide, in multiples of a cut
const BISECTIONS = 60;
const LARGEST_EPSILON = 500;

/** Returns floor(share × n), exactly, for the shortest decimal that reads as the double `share` (section 4.5). */
export function floorShare(share: number, n: number): number {
  const [digits, exponent] = share.toExponential().split("e");
  const [whole, fraction = ""] = digits.split(".");
  const places = BigInt(fraction.length - Number(exponent)); // share <= 1, so this is not negative
  return Number((BigInt(whole + fraction) * BigInt(n)) / 10n ** places);
}

/** Returns eta, a bound on the probability that noise is dropped or a word overflows (12.3). */
export function overflow({ noise, n, counters, noiseSlots, wordBits }: BatchEvent): number {
  if (noise.kind !== "bernoulli") return 0;
  const p = noise.p_numerator / 2 ** noise.p_log2;
  if (wordBits === null) return Math.min(1, n * tail(noise.bits * counters, p, noiseSlots));
  return Math.min(1, counters * tail(n * noise.bits, p, 2 ** wordBits - 1 - n));
}

/**
 * Returns epsilon at `beta`; infinity if there is none.
 *
 * `compared` is the epsilon with which the caller will compare the result. It sets the grid's step, so
 * that a result near `compared` is exact to a few millionths (section 12.4).
 */
export function epsilonOf(event: BatchEvent, beta: number, compared: number): number {
  const { noise, n, cells } = event;
  const p = noise.p_numerator / 2 ** noise.p_log2;
  if (noise.kind === "flips") return epsilonOfSteps(p / (1 - p), 2 * cells, beta);
  if (noise.kind === "laplace") return epsilonOfSteps(p, 2 * cells, beta);
  const eta = overflow(event);
  if (2 * eta > beta) return Infinity;
  const honest = noise.kind === "binomial" ? 1 : n - floorShare(event.dishonestFraction, n);
  const moves = movesOf(honest * noise.bits, p);
  if (moves === null) return Infinity;
  const step = gridStep(moves, cells, compared);
  const cut = 1e-9 * beta;
  const [up, down] = [moves.up, moves.down].map((losses) => onGrid(losses, step).cut(cut).power(cells, cut));
  return smallestEpsilon(up.times(down, cut), step, eta, beta);
}

/** Losses with their probabilities, and the probability of an infinite loss. */
interface Losses {
  readonly losses: readonly number[];
  readonly masses: readonly number[];
  readonly infinite: number;
}

/** Returns the losses if a counter moves up by one, and if it moves down by one, under N noise bits (12.2). */
function movesOf(N: number, p: number): { up: Losses; down: Losses } | null {
  const reach = 20 + Math.sqrt(400 + 120 * N * p * (1 - p));
  const low = Math.max(0, Math.floor(N * p - reach));
  const high = Math.min(N, Math.ceil(N * p + reach));
  if (high - low >= MOST_OUTCOMES) return null; // noise for an epsilon far below any that is useful
  const r = (y: number): number => Math.log(((N - y + 1) * p) / (y * (1 - p)));
  const masses = outcomes(low, high, Math.floor(N * p), r);
  const zs = masses.map((_, i) => low + i);
  const [allOnes, noOnes] = [high === N ? masses[N - low] : 0, low === 0 ? masses[0] : 0];
  const [ups, downs] = [zs.filter((z) => z < N), zs.filter((y) => y > 0)];
  return {
    up: { losses: ups.map((z) => -r(z + 1)), masses: ups.map((z) => masses[z - low]), infinite: allOnes },
    down: { losses: downs.map(r), masses: downs.map((y) => masses[y - low]), infinite: noOnes },
  };
}

/** Returns the probabilities of y = low to high ones. exp(r(y)) is the probability of y divided by that of y - 1. */
function outcomes(low: number, high: number, middle: number, r: (y: number) => number): number[] {
  const masses = new Array<number>(high - low + 1).fill(1);
  for (let y = middle + 1; y <= high; y++) masses[y - low] = masses[y - low - 1] * Math.exp(r(y));
  for (let y = middle; y > low; y--) masses[y - low - 1] = masses[y - low] / Math.exp(r(y));
  const sum = masses.reduce((total, mass) => total + mass, 0);
  return masses.map((mass) => mass / sum);
}

/**
 * Returns the grid's step. The step of section 12.4 is widened if the standard deviation of the sum of all losses
 * exceeds `compared` or has too many grid points. A wider step only raises the result.
 */
function gridStep({ up }: { up: Losses }, cells: number, compared: number): number {
  const mean = up.losses.reduce((sum, loss, i) => sum + loss * up.masses[i], 0);
  const variance = up.losses.reduce((sum, loss, i) => sum + (loss - mean) ** 2 * up.masses[i], 0);
  const spread = Math.sqrt(2 * cells * variance);
  return Math.max((Math.max(compared, spread) / 1000) * Math.sqrt(5 / cells), spread / MOST_POINTS);
}

/** A distribution of losses: masses[i] is the probability of the loss (low + i) × step. */
class Grid {
  constructor(
    readonly low: number,
    readonly masses: Float64Array,
    readonly infinite: number,
  ) {}

  /** Returns the distribution of the sum of two losses, without tails of mass `cut`. */
  times(other: Grid, cut: number): Grid {
    const { product, error } = convolve(this.masses, other.masses, ROUNDING * cut);
    const masses = product.map((mass) => (mass > error ? mass : 0));
    const rounding = 2 * error * masses.length; // mass that rounding may have hidden
    const infinite = this.infinite + other.infinite - this.infinite * other.infinite + rounding;
    return new Grid(this.low + other.low, masses, infinite).cut(cut);
  }

  /** Returns the distribution of the sum of `count` losses with this distribution, by repeated squaring. */
  power(count: number, cut: number): Grid {
    if (count === 1) return this;
    const half = this.power(Math.floor(count / 2), cut);
    const whole = half.times(half, cut);
    return count % 2 === 0 ? whole : whole.times(this, cut);
  }

  /** Cuts two tails of mass at most `mass`: moves the lowest losses to the lowest kept one, the highest to infinity. */
  cut(mass: number): Grid {
    const masses = this.masses;
    let [from, to, below, above] = [0, masses.length, 0, 0];
    while (from < to - 1 && below + masses[from] <= mass) below += masses[from++];
    while (to > from + 1 && above + masses[to - 1] <= mass) above += masses[--to];
    const kept = masses.slice(from, to);
    kept[0] += below;
    return new Grid(this.low + from, kept, this.infinite + above);
  }
}

function onGrid({ losses, masses, infinite }: Losses, step: number): Grid {
  const places = losses.map((loss) => Math.floor(loss / step));
  const low = places.reduce((least, place) => Math.min(least, place), Infinity);
  const high = places.reduce((most, place) => Math.max(most, place), -Infinity);
  const grid = new Float64Array(high - low + 2);
  places.forEach((place, i) => {
    const share = Math.expm1(place * step - losses[i]) / Math.expm1(-step);
    const upper = Math.min(1, Math.max(0, share));
    grid[place + 1 - low] += masses[i] * upper;
    grid[place - low] += masses[i] * (1 - upper);
  });
  return new Grid(low, grid, infinite);
}

/** Returns the smallest epsilon with total(epsilon) <= beta, searched upward from 0 (12.4). */
function smallestEpsilon(sum: Grid, step: number, eta: number, beta: number): number {
  // over[i] and weighted[i]: Σ Pr[s] and Σ Pr[s] e^-s over the losses s >= (first + i) step.
  const first = Math.max(1, sum.low);
  const masses = sum.masses.subarray(Math.max(0, first - sum.low));
  const over = new Float64Array(masses.length + 1);
  const weighted = new Float64Array(masses.length + 1);
  for (let i = masses.length - 1; i >= 0; i--) {
    over[i] = over[i + 1] + masses[i];
    weighted[i] = weighted[i + 1] + masses[i] * Math.exp(-(first + i) * step);
  }
  const total = (epsilon: number, place: number): number => {
    const i = Math.min(masses.length, Math.max(0, place - first));
    const finite = Math.max(0, over[i] - Math.exp(epsilon) * weighted[i]);
    return sum.infinite + finite + (1 + Math.exp(epsilon)) * eta;
  };
  const end = Math.min(first + masses.length, Math.ceil(LARGEST_EPSILON / step));
  for (let place = 0; place <= end; place++) {
    if (total(place * step, place) > beta) continue;
    if (place === 0) return 0;
    return bisect((epsilon) => total(epsilon, place) <= beta, (place - 1) * step, place * step);
  }
  return Infinity;
}

/** Returns the least value from `lower` to `upper` for which `holds` is true. `holds(upper)` must be true. */
function bisect(holds: (value: number) => boolean, lower: number, upper: number): number {
  for (let i = 0; i < BISECTIONS; i++) {
    const middle = (lower + upper) / 2;
    if (holds(middle)) upper = middle;
    else lower = middle;
  }
  return upper;
}

/** Returns epsilon for flips and Laplace noise, with which each of the `moves` has loss -log q or log q (12.2). */
function epsilonOfSteps(q: number, moves: number, beta: number): number {
  const loss = -Math.log(q);
  const delta = (epsilon: number): number => {
    let sum = 0;
    for (let k = moves; (2 * k - moves) * loss > epsilon; k--) {
      sum -= pmf(moves, 1 / (1 + q), k) * Math.expm1(epsilon - (2 * k - moves) * loss);
    }
    return sum;
  };
  return delta(0) <= beta ? 0 : bisect((epsilon) => delta(epsilon) <= beta, 0, moves * loss);
}
