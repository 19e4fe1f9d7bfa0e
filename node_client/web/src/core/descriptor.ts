/** The envelope and the descriptor of a batch (docs/protocol.md, section 4). */
import { floorShare } from "./accountant.js";
import { type Bytes, unhex } from "./bytes.js";
import { checkSupport, type Families, Layout, type Sizes, type Support } from "./counters.js";
import { digestOf, KEY_BYTES, SEAL_BYTES } from "./crypto.js";
import * as json from "./json.js";
import type { Noise } from "./noise.js";
import { Refusal } from "./problems.js";

export type Trust = "shuffle" | "local" | "central";
export type Aggregation = "messages" | "sums";
/** For each step and state, the action. */
export type Policy = readonly (readonly number[])[];

/** The document that the shuffler serves for a batch (section 4.1). */
export interface Envelope {
  readonly descriptor: string;
  readonly coordinator_signature: string;
  readonly batch_key: string;
  readonly shuffler_signature: string;
}

/** The promise of a batch. */
export interface Guarantee {
  readonly epsilon: number;
  readonly beta: number;
  readonly dishonest_fraction: number;
}

/** A descriptor with all its members, defaults filled in (section 4.3). */
export interface Descriptor extends Sizes {
  readonly version: number;
  readonly run_id: string;
  readonly batch_id: string;
  readonly shuffler_id: string;
  readonly deployment: number;
  readonly trust: Trust;
  readonly aggregation: Aggregation;
  readonly word_bits: number | null;
  readonly environment: string;
  readonly n: number;
  readonly expires_at: number;
  readonly reward_low: number;
  readonly reward_high: number;
  readonly families: Families;
  readonly support: Support | null;
  readonly homogeneous: boolean;
  readonly layer: number | null;
  readonly policies: readonly Policy[];
  readonly weights: readonly number[];
  readonly noise: Noise;
  readonly data_slots: number;
  readonly noise_slots: number;
  readonly guarantee: Guarantee;
  readonly owner_share: number;
  readonly epoch_seconds: number | null;
  readonly analyzer_key: string;
  readonly test_seed: bigint | null;
  readonly episode_seconds: number | null;
}

/** A descriptor with what follows from its bytes (sections 3.3 and 4.6). Sizes are in bytes. */
export interface Batch {
  readonly descriptor: Descriptor;
  readonly digest: Bytes;
  readonly layout: Layout;
  /** L, the number of messages of a report. */
  readonly messages: number;
  readonly messageBytes: number;
  readonly reportBytes: number;
  readonly ownerSlots: number;
}

const MOST_BYTES = 16_777_216;
const MOST_COUNTERS = 16_777_216;
const MOST_NOISE_BITS = 268_435_456;
const MOST_MESSAGES = 65_536;
const TOTAL_WEIGHT = 2 ** 32;
const NOISE_KINDS = { shuffle: ["bernoulli"], local: ["flips"], central: ["laplace", "binomial"] };
const WORD_DEVIATIONS_SQUARED = 144n;

export const hex16 = json.text(/^[0-9a-f]{32}$/);
const hex32 = json.text(/^[0-9a-f]{64}$/);
const hex64 = json.text(/^[0-9a-f]{128}$/);
const name = json.text(/^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$/);
const states = json.list(json.integer(0));
const seconds = (most: number): json.Reader<number | null> => json.optional(json.nullable(json.integer(1, most)), null);

const envelope = json.record<Envelope>({
  descriptor: (value) => json.text(/^/)(value),
  coordinator_signature: hex64,
  batch_key: hex32,
  shuffler_signature: hex64,
});

const descriptor = json.record<Descriptor>({
  version: json.optional(json.integer(1, 1), 1),
  run_id: hex16,
  batch_id: hex16,
  shuffler_id: name,
  deployment: json.integer(0),
  trust: json.optional(json.choice("shuffle", "local", "central"), "shuffle"),
  aggregation: json.optional(json.choice("messages", "sums"), "messages"),
  word_bits: json.optional(json.nullable(json.integer(16, 32)), null),
  environment: name,
  n: json.integer(1, 2 ** 32),
  expires_at: json.integer(0),
  states: json.integer(1, 10_000),
  actions: json.integer(1, 1_000),
  horizon: json.integer(1, 1_000),
  reward_low: json.real,
  reward_high: json.real,
  families: json.choice("paper", "lean", "joint"),
  support: json.optional(
    json.nullable(json.record<Support>({ start: states, next: json.list(json.list(json.list(states))) })),
    null,
  ),
  homogeneous: json.optional(json.boolean, false),
  layer: json.optional(json.nullable(json.integer(0)), null),
  policies: json.list(json.list(json.list(json.integer(0))), 1, 4_096),
  weights: json.list(json.integer(1)),
  noise: json.record<Noise>({
    kind: json.optional(json.choice("bernoulli", "flips", "laplace", "binomial"), "bernoulli"),
    bits: json.integer(1, 2 ** 32),
    p_numerator: json.integer(1),
    p_log2: json.integer(1, 32),
  }),
  data_slots: json.integer(1),
  noise_slots: json.integer(0),
  guarantee: json.record<Guarantee>({ epsilon: json.real, beta: json.real, dishonest_fraction: json.real }),
  owner_share: json.optional(json.real, 1),
  epoch_seconds: seconds(3_162_240_000),
  analyzer_key: hex32,
  test_seed: json.optional(json.nullable(json.natural), null),
  episode_seconds: seconds(1_296_000),
});

/** Reads an envelope; throws FormError if it has not exactly the members of section 4.1. */
export function readEnvelope(body: string): Envelope {
  return envelope(json.parseJson(body));
}

/** Parses a descriptor; throws Refusal `too-large` (check 1) or `malformed` (check 2). */
export async function parseDescriptor(data: Bytes): Promise<Batch> {
  if (data.length > MOST_BYTES) throw new Refusal("too-large", `a descriptor has at most ${MOST_BYTES} bytes`, 1);
  const digest = await digestOf(data);
  try {
    return batchOf(descriptor(json.parseJson(textOf(data))), digest);
  } catch (error) {
    throw error instanceof json.FormError ? new Refusal("malformed", `descriptor: ${error.message}`, 2) : error;
  }
}

function textOf(data: Bytes): string {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    throw new json.FormError("this is not UTF-8");
  }
}

function rule(holds: boolean, broken: string): void {
  if (!holds) throw new json.FormError(broken);
}

/** Makes the cross-checks of section 4.5; returns the batch. */
function batchOf(d: Descriptor, digest: Bytes): Batch {
  checkPolicies(d);
  rule(d.layer === null || d.layer < d.horizon, "layer must be below the horizon");
  if (d.support !== null) checkSupport(d.support, d);
  checkNoise(d.noise, d.trust);
  rule(d.reward_low < d.reward_high, "reward_low must be below reward_high");
  checkGuarantee(d);
  const layout = new Layout(d, d.families, d.layer, d.support);
  rule(layout.counters <= MOST_COUNTERS, "too many counters");
  rule(d.noise.bits * layout.counters <= MOST_NOISE_BITS, "too many noise bits a report");
  checkSlots(d, layout);
  rule(d.aggregation === "messages" || d.trust === "shuffle", "sums are for trust shuffle only");
  rule(d.word_bits === (d.aggregation === "sums" ? fewestWordBits(d.n, d.noise) : null), "another word_bits");
  const messages = d.data_slots + d.noise_slots;
  rule(messages <= MOST_MESSAGES, "too many messages a report");
  const ownerSlots = floorShare(d.owner_share, d.n);
  rule(ownerSlots >= 1, "an owner may hold no slot");
  const messageBytes = messageBytesOf(d, layout);
  return { descriptor: d, digest, layout, messages, messageBytes, reportBytes: messages * messageBytes + SEAL_BYTES, ownerSlots };
}

function checkPolicies(d: Descriptor): void {
  for (const policy of d.policies) {
    rule(policy.length === d.horizon, "a policy must have a row for each step");
    for (const row of policy) {
      rule(row.length === d.states && row.every((action) => action < d.actions), "a row must have an action for each state");
    }
  }
  rule(d.weights.length === d.policies.length, "there must be a weight for each policy");
  rule(d.weights.reduce((sum, weight) => sum + weight, 0) === TOTAL_WEIGHT, "weights must sum to 2^32");
}

function checkNoise({ kind, bits, p_numerator, p_log2 }: Noise, trust: Trust): void {
  rule(NOISE_KINDS[trust].includes(kind), `trust ${trust} takes no noise of kind ${kind}`);
  const obeys = {
    bernoulli: p_numerator < 2 ** p_log2,
    flips: bits === 1 && p_log2 === 32 && p_numerator < 2 ** 31,
    laplace: bits === 1 && p_log2 === 32 && p_numerator < 2 ** 32,
    binomial: p_numerator === 1 && p_log2 === 1,
  };
  rule(obeys[kind], `noise of kind ${kind} takes other numbers`);
}

function checkGuarantee({ guarantee: { epsilon, beta, dishonest_fraction }, owner_share }: Descriptor): void {
  rule(epsilon > 0 && epsilon <= 100, "epsilon must be above 0 and at most 100");
  rule(beta > 0 && beta < 1, "beta must be above 0 and below 1");
  rule(dishonest_fraction >= 0 && dishonest_fraction < 1, "dishonest_fraction must be at least 0 and below 1");
  rule(owner_share > 0 && owner_share <= 1, "owner_share must be above 0 and at most 1");
  rule(owner_share === 1 || owner_share <= dishonest_fraction, "owner_share must be 1 or at most dishonest_fraction");
}

function checkSlots(d: Descriptor, layout: Layout): void {
  const padded = d.trust === "shuffle" && d.aggregation === "messages";
  const fits = padded ? d.data_slots === layout.cells : d.data_slots === 1 && d.noise_slots === 0;
  rule(fits, "data_slots or noise_slots do not suit the counters");
}

/** Returns the size of a word of `sums` in bits, or NaN if no word is large enough (section 8.1). */
function fewestWordBits(n: number, noise: Noise): number | null {
  const [scale, one] = [1n << BigInt(noise.p_log2), BigInt(noise.p_numerator)];
  const mean = BigInt(n) * BigInt(noise.bits) * one;
  const fits = (bits: number): boolean => {
    const room = (2n ** BigInt(bits) - 1n - BigInt(n)) * scale - mean;
    return room >= 0n && room * room >= WORD_DEVIATIONS_SQUARED * mean * (scale - one);
  };
  return [16, 32].find(fits) ?? NaN;
}

function messageBytesOf(d: Descriptor, layout: Layout): number {
  if (d.word_bits !== null) return KEY_BYTES + (layout.counters * d.word_bits) / 8;
  const plaintext = { shuffle: layout.width, local: Math.ceil(layout.counters / 8), central: layout.cells * layout.width };
  return SEAL_BYTES + plaintext[d.trust];
}

/** Returns the time before which a user with a report in a batch may not report again; Infinity: never (4.7). */
export function barsUntil({ epoch_seconds, expires_at }: Descriptor): number {
  return epoch_seconds === null ? Infinity : epochStart(expires_at, epoch_seconds) + epoch_seconds;
}

/** Returns whether a user who is barred until `barredUntil` (0: never reported) may report in a batch. */
export function mayReport(barredUntil: number, { epoch_seconds, expires_at }: Descriptor): boolean {
  if (barredUntil === 0) return true;
  return epoch_seconds !== null && barredUntil <= epochStart(expires_at, epoch_seconds);
}

/** Returns when the epoch of a batch begins. */
export function epochStart(expiresAt: number, epochSeconds: number): number {
  return Math.floor(expiresAt / epochSeconds) * epochSeconds;
}

/** Returns the bytes of the analyzer key. */
export function analyzerKey(d: Descriptor): Bytes {
  return unhex(d.analyzer_key);
}
