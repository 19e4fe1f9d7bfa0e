/**
 * From an episode to a report (docs/protocol.md, sections 6 to 10).
 *
 * `contents` decides what a report says: data, noise and padding. `sealReport` seals the contents. The two
 * functions are apart because the same contents may have to be sealed again, to another batch key, and because
 * sealing is slow enough for a worker.
 */
import { bigEndian, type Bytes, concat, join, littleEndian, type RandomBytes, randomWords, unhex } from "./bytes.js";
import type { AcceptedBatch } from "./checks.js";
import type { Episode } from "./counters.js";
import { freshKeys, type KeySource, maskOf, sealer, SEALS } from "./crypto.js";
import { analyzerKey, type Batch, type Descriptor, type Policy } from "./descriptor.js";
import { drawCounts } from "./noise.js";

/** Messages that are sealed at the same time. WebCrypto has few threads, and each call costs memory. */
const SEALS_AT_ONCE = 256;

/** Draws a user's policy: policy i with probability weights[i] / 2^32 (section 6.1). */
export function drawPolicy({ policies, weights }: Descriptor, random: RandomBytes): Policy {
  let left = randomWords(1, random)[0];
  return policies[weights.findIndex((weight) => (left -= weight) < 0)];
}

/** Draws the reward bit of a step; throws RangeError if the reward is out of range (section 6.2). */
export function drawReward(d: Descriptor, reward: number, random: RandomBytes): 0 | 1 {
  const mean = (reward - d.reward_low) / (d.reward_high - d.reward_low);
  if (!(mean >= 0 && mean <= 1)) throw new RangeError("a reward is outside the declared range");
  const [low, high] = randomWords(2, random);
  return high * 2 ** 21 + (low >>> 11) < mean * 2 ** 53 ? 1 : 0;
}

/**
 * Returns what a report says, before any seal: the plaintexts of its messages, joined, or the vector
 * of `sums`.
 *
 * Without an episode (null), or with one outside the sizes or the support, this is the report of a
 * failed episode (section 6.4). Draws fresh noise.
 */
export function contents(batch: Batch, episode: Episode | null, random: RandomBytes): Bytes {
  const { descriptor: d, layout } = batch;
  const data = (episode && layout.encode(episode)) ?? [];
  if (d.trust === "local") return flippedBits(data, layout.counters, d.noise.p_numerator, random);
  if (d.trust === "central") return plaintexts(padded(data, [], layout.cells, layout.counters), layout.width);
  const noise = drawCounts(layout.counters, d.noise, random);
  if (d.word_bits !== null) return vectorOf(data, noise, d.word_bits / 8);
  const kept = keep(copies(noise), d.noise_slots, random);
  return plaintexts(padded(data, kept, batch.messages, layout.counters), layout.width);
}

/** Returns each index as often as its count, ascending. */
export function copies(counts: ArrayLike<number>): number[] {
  return Array.from(counts).flatMap((count, index) => new Array<number>(count).fill(index));
}

/** Keeps a uniformly random subset of exactly `slots` noise indices if there are more (section 7). */
export function keep(noise: readonly number[], slots: number, random: RandomBytes): readonly number[] {
  if (noise.length <= slots) return noise;
  const words = randomWords(2 * noise.length, random);
  const order = noise.map((_, i) => i);
  order.sort((i, j) => words[2 * i + 1] - words[2 * j + 1] || words[2 * i] - words[2 * j] || i - j);
  return order.slice(0, slots).map((i) => noise[i]);
}

/** Returns data, noise, and dummies up to `size` indices. */
export function padded(data: readonly number[], noise: readonly number[], size: number, dummy: number): number[] {
  const indices = [...data, ...noise];
  return indices.concat(new Array<number>(size - indices.length).fill(dummy));
}

/** Returns the plaintexts of `indices`, joined: BE(index, width) for each index. */
export function plaintexts(indices: readonly number[], width: number): Bytes {
  return join(indices.map((index) => bigEndian(index, width)));
}

/** Returns the vector of data and noise, in little-endian words; additions are modulo the word (section 8.2). */
export function vectorOf(data: readonly number[], noise: ArrayLike<number>, wordBytes: number): Bytes {
  const words = Float64Array.from(noise);
  for (const index of data) words[index]++;
  return join(Array.from(words, (word) => littleEndian(word, wordBytes)));
}

/** Returns a report's bits under trust `local`, each flipped with probability numerator / 2^32 (section 9). */
export function flippedBits(data: readonly number[], counters: number, numerator: number, random: RandomBytes): Bytes {
  const ones = new Set(data);
  const bytes = new Uint8Array(Math.ceil(counters / 8));
  randomWords(counters, random).forEach((word, index) => {
    if (ones.has(index) !== word < numerator) bytes[index >> 3] |= 128 >> (index & 7);
  });
  return bytes;
}

/** The keys and sizes with which reports to a batch are sealed. They can be posted to a worker. */
export interface SealTarget {
  readonly analyzerKey: Bytes;
  readonly batchKey: Bytes;
  readonly digest: Bytes;
  readonly messages: number;
  /** The bytes of a word of `sums`; 0 for `messages`. */
  readonly wordBytes: number;
}

/** Returns the keys and sizes with which reports to a batch are sealed. */
export function sealTarget({ descriptor, batchKey, digest, messages }: AcceptedBatch): SealTarget {
  return { analyzerKey: analyzerKey(descriptor), batchKey, digest, messages, wordBytes: (descriptor.word_bits ?? 0) / 8 };
}

/** Seals a report: its messages (or vector) to the analyzer, then all of them together to the batch key. */
export async function sealReport(target: SealTarget, contents: Bytes, keys: KeySource = freshKeys): Promise<Bytes> {
  const inner = await (target.wordBytes > 0 ? masked(target, contents, keys) : sealed(target, contents, keys));
  const seal = await sealer(target.batchKey, concat(SEALS.report, target.digest), keys);
  return seal(inner);
}

/** Returns the messages of a report, joined. Each is sealed alone, to the analyzer. */
async function sealed(target: SealTarget, contents: Bytes, keys: KeySource): Promise<Bytes> {
  const seal = await sealer(target.analyzerKey, concat(SEALS.message, target.digest), keys);
  const size = contents.length / target.messages;
  const messages: Bytes[] = [];
  while (messages.length < target.messages) {
    const many = Math.min(SEALS_AT_ONCE, target.messages - messages.length);
    const from = messages.length;
    const plaintext = (i: number): Bytes => contents.slice((from + i) * size, (from + i + 1) * size);
    messages.push(...(await Promise.all(Array.from({ length: many }, (_, i) => seal(plaintext(i))))));
  }
  return join(messages);
}

/** Returns E and the masked vector of a report of `sums` (section 8.3). */
async function masked(target: SealTarget, contents: Bytes, keys: KeySource): Promise<Bytes> {
  const [own, mask] = await maskOf(await keys(), target.analyzerKey, target.digest, contents.length);
  return concat(own, addWords(contents, mask, target.wordBytes));
}

/** Adds two vectors of little-endian words, modulo the word. */
export function addWords(a: Bytes, b: Bytes, wordBytes: number): Bytes {
  let carry = 0;
  return a.map((byte, i) => {
    const sum = byte + b[i] + (i % wordBytes === 0 ? 0 : carry);
    carry = sum >> 8;
    return sum;
  });
}

/** Returns the frame of an upload: lease id ‖ report (section 13.7). */
export function frame(lease: string, report: Bytes): Bytes {
  return concat(unhex(lease), report);
}
