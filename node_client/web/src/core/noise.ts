/**
 * Exact draws of noise (docs/protocol.md, section 7).
 *
 * A counter's noise is Binomial(bits, p), p = numerator / 2^log2, drawn by inversion in blocks of
 * 256 bits. Let F(j) = Pr[at most j ones] and U an endless string of random bits, read as a number
 * in [0, 1). The number of j with F(j) <= U has exactly the binomial law. The first 16 bits of U
 * leave an interval for U. If some F(j) lies inside, 64 more bits are read, and so on. All
 * comparisons are between integers, so nothing is rounded. The bytes are read in the order in which
 * the reference node reads them, so the same bytes give the same noise.
 */
import type { RandomBytes } from "./bytes.js";

/** The noise of a descriptor. */
export interface Noise {
  readonly kind: "bernoulli" | "flips" | "laplace" | "binomial";
  readonly bits: number;
  readonly p_numerator: number;
  readonly p_log2: number;
}

const BLOCK = 256;
const DRAWS_AT_ONCE = 1 << 20;
const FIRST_BITS = 16;
const MORE_BITS = 64n;
const OPEN = 0xffff;
const MOST_LAWS = 16;

/** The law of the number of ones among at most 256 bits. */
class Law {
  /** F(j) 2^scale, for j below `bits`. */
  private readonly cumulative: bigint[] = [];
  private readonly scale: bigint;
  /** The number of ones for each value of U's first bits, or OPEN. */
  private readonly ones = new Uint16Array(1 << FIRST_BITS);

  constructor(bits: number, numerator: number, log2: number) {
    this.scale = BigInt(bits * log2);
    this.sumUp(bits, BigInt(numerator), (1n << BigInt(log2)) - BigInt(numerator));
    let [least, most] = [0, 0];
    for (let u = 0; u < this.ones.length; u++) {
      while (least < bits && this.compare(least, u) <= 0) least++;
      while (most < bits && this.compare(most, u + 1) < 0) most++;
      this.ones[u] = least === most ? least : OPEN;
    }
  }

  private sumUp(bits: number, one: bigint, zero: bigint): void {
    let [choose, total] = [1n, 0n];
    for (let j = 0; j < bits; j++) {
      total += choose * one ** BigInt(j) * zero ** BigInt(bits - j);
      this.cumulative.push(total);
      choose = (choose * BigInt(bits - j)) / BigInt(j + 1);
    }
  }

  /** Compares F(j) with u / 2^16: negative, 0 or positive. */
  private compare(j: number, u: number): number {
    const difference = (this.cumulative[j] << BigInt(FIRST_BITS)) - (BigInt(u) << this.scale);
    return difference < 0n ? -1 : difference === 0n ? 0 : 1;
  }

  /** Draws the number of ones of each of `size` blocks. Reads all blocks' first bits, then more where needed. */
  draw(size: number, random: RandomBytes): Uint16Array {
    const first = new DataView(random((size * FIRST_BITS) / 8).buffer);
    const ones = new Uint16Array(size);
    for (let i = 0; i < size; i++) ones[i] = this.ones[first.getUint16(2 * i, true)];
    for (let i = 0; i < size; i++) if (ones[i] === OPEN) ones[i] = this.settle(first.getUint16(2 * i, true), random);
    return ones;
  }

  /** Reads more bits of U until the number of ones is certain. */
  private settle(first: number, random: RandomBytes): number {
    let [known, drawn] = [BigInt(first), BigInt(FIRST_BITS)];
    for (;;) {
      const more = new DataView(random(Number(MORE_BITS) / 8).buffer).getBigUint64(0, true);
      [known, drawn] = [(known << MORE_BITS) | more, drawn + MORE_BITS];
      const low = this.atMost((known << this.scale) >> drawn);
      if (low === this.atMost((((known + 1n) << this.scale) - 1n) >> drawn)) return low;
    }
  }

  /** Returns the number of j for which F(j) 2^scale is at most x. */
  private atMost(x: bigint): number {
    const first = this.cumulative.findIndex((value) => value > x);
    return first < 0 ? this.cumulative.length : first;
  }
}

const laws = new Map<string, Law>();

function lawOf(bits: number, { p_numerator, p_log2 }: Noise): Law {
  const name = `${bits} ${p_numerator} ${p_log2}`;
  const law = laws.get(name) ?? new Law(bits, p_numerator, p_log2);
  if (laws.size >= MOST_LAWS) laws.clear();
  laws.set(name, law);
  return law;
}

/** Returns, for each counter, the number of ones among its `bits` Bernoulli(p) bits. */
export function drawCounts(counters: number, noise: Noise, random: RandomBytes): Float64Array {
  const counts = new Float64Array(counters);
  const blocks = Math.floor(noise.bits / BLOCK);
  const atOnce = Math.max(1, Math.floor(DRAWS_AT_ONCE / counters));
  const add = (bits: number, many: number): void => {
    const ones = lawOf(bits, noise).draw(many * counters, random);
    for (let i = 0; i < ones.length; i++) counts[i % counters] += ones[i];
  };
  for (let start = 0; start < blocks; start += atOnce) add(BLOCK, Math.min(atOnce, blocks - start));
  if (noise.bits % BLOCK > 0) add(noise.bits % BLOCK, 1);
  return counts;
}
