/** The checks that a node makes before it leases a slot (docs/protocol.md, section 11). */
import { epsilonOf } from "./accountant.js";
import { type Bytes, unhex, utf8 } from "./bytes.js";
import { covers, type Support } from "./counters.js";
import * as crypto from "./crypto.js";
import * as descriptors from "./descriptor.js";
import type { Aggregation, Batch, Envelope, Trust } from "./descriptor.js";
import { Refusal } from "./problems.js";

/** Pins and demands of the node's owner, and what the environment declares. Keys are 64 hex digits. */
export interface Demands {
  readonly coordinatorKey: string;
  readonly shufflerKey: string;
  readonly shufflerId: string;
  readonly epsilon: number;
  readonly beta: number;
  readonly dishonestFraction: number;
  readonly environment: string;
  readonly states: number;
  readonly actions: number;
  readonly horizon: number;
  readonly rewardLow: number;
  readonly rewardHigh: number;
  /** What the environment declares: its support, and whether all steps are alike; null: not declared. */
  readonly support: Support | null;
  readonly homogeneous: boolean | null;
  readonly trustModels: readonly Trust[];
  readonly aggregations: readonly Aggregation[];
  readonly maxOwnerShare: number;
  /** null: none is pinned. */
  readonly analyzerKeys: readonly string[] | null;
  readonly maxSeconds: number;
  /** null: no epochs. */
  readonly shortestEpoch: number | null;
  readonly maxEpisodeSeconds: number;
  /** The factor by which epsilon may exceed a bound: 1, or at most 1.0001 (section 12.5). */
  readonly tolerance: number;
}

/** A batch that the node may serve. `epsilon` is its epsilon at the owner's beta and gamma. */
export interface AcceptedBatch extends Batch {
  readonly batchKey: Bytes;
  readonly epsilon: number;
}

/**
 * Makes all checks, in order, at the time `now` (seconds since 1970).
 *
 * Throws Refusal for the first check that fails. A descriptor with a test seed is always refused:
 * such noise protects nobody (section 6.5).
 */
export async function accept(envelope: Envelope, requestedId: string, demands: Demands, now: number): Promise<AcceptedBatch> {
  const data = utf8(envelope.descriptor);
  const batch = await descriptors.parseDescriptor(data);
  const batchKey = unhex(envelope.batch_key);
  await checkSignatures(envelope, data, batch.digest, batchKey, demands);
  await checkIds(batch, requestedId, demands);
  checkTimes(batch, demands, now);
  need(demands.aggregations.includes(batch.descriptor.aggregation), 11, "trust-refused", "the owner does not allow this aggregation");
  need(demands.trustModels.includes(batch.descriptor.trust), 12, "trust-refused", "the owner does not allow this trust model");
  checkEpoch(batch, demands, now);
  checkContent(batch, demands);
  need(!(await crypto.isLowOrder(descriptors.analyzerKey(batch.descriptor))), 22, "wrong-key", "the analyzer's key is a point of low order");
  need(!(await crypto.isLowOrder(batchKey)), 23, "wrong-key", "the batch's key is a point of low order");
  return { ...batch, batchKey, epsilon: checkGuarantee(batch, demands) };
}

function need(holds: boolean, check: number, slug: string, message: string): void {
  if (!holds) throw new Refusal(slug, message, check);
}

async function checkSignatures(envelope: Envelope, data: Bytes, digest: Bytes, batchKey: Bytes, demands: Demands): Promise<void> {
  const deposited = await crypto.isDeposited(demands.coordinatorKey, envelope.coordinator_signature, data);
  need(deposited, 3, "bad-signature", "the coordinator's signature does not verify");
  const countersigned = await crypto.isCountersigned(demands.shufflerKey, envelope.shuffler_signature, digest, batchKey);
  need(countersigned, 4, "bad-signature", "the shuffler's signature does not verify");
}

async function checkIds({ descriptor: d }: Batch, requestedId: string, demands: Demands): Promise<void> {
  need(d.batch_id === requestedId, 5, "wrong-recipient", "this is another batch than the one asked for");
  need(d.batch_id === (await crypto.batchId(d.run_id, d.deployment)), 6, "wrong-recipient", "the batch id is not its run's and deployment's");
  need(d.shuffler_id === demands.shufflerId, 7, "wrong-recipient", `made for the shuffler ${d.shuffler_id}`);
}

function checkTimes({ descriptor: d }: Batch, demands: Demands, now: number): void {
  need(now < d.expires_at, 8, "late", `the batch expired at ${d.expires_at}`);
  need(d.expires_at <= now + demands.maxSeconds, 9, "wrong-size", `open until ${d.expires_at}, which is longer than the owner allows`);
  need((d.episode_seconds ?? 0) <= demands.maxEpisodeSeconds, 10, "wrong-size", "an episode may take longer than the owner allows");
}

function checkEpoch({ descriptor: { epoch_seconds, expires_at } }: Batch, { shortestEpoch }: Demands, now: number): void {
  if (epoch_seconds === null) return;
  const allowed = shortestEpoch !== null && epoch_seconds >= shortestEpoch;
  need(allowed, 13, "epoch-refused", `the batch lets a person report once in ${epoch_seconds} s`);
  const start = descriptors.epochStart(expires_at, epoch_seconds);
  need(start <= now + epoch_seconds, 14, "epoch-refused", `the batch's epoch begins at ${start}: it is neither this one nor the next`);
}

function checkContent({ descriptor: d }: Batch, demands: Demands): void {
  const pinned = demands.analyzerKeys === null || demands.analyzerKeys.includes(d.analyzer_key);
  need(pinned, 15, "outdated-key", "the analyzer's key is not pinned");
  need(d.environment === demands.environment, 16, "wrong-recipient", `made for the environment ${d.environment}`);
  const sized = d.states === demands.states && d.actions === demands.actions && d.horizon === demands.horizon;
  need(sized, 17, "wrong-size", `made for ${d.states} states, ${d.actions} actions, ${d.horizon} steps`);
  const rewarded = d.reward_low <= demands.rewardLow && demands.rewardHigh <= d.reward_high;
  need(rewarded, 18, "wrong-size", `rewards are declared from ${d.reward_low} to ${d.reward_high}`);
  need(!(d.homogeneous && demands.homogeneous === false), 19, "wrong-recipient", "the steps are declared to be alike, and differ here");
  const covered = d.support === null || demands.support === null || covers(d.support, demands.support, d.horizon);
  need(covered, 20, "wrong-recipient", "the declared support leaves out transitions that are possible here");
  need(d.test_seed === null, 21, "test-entry-refused", "the descriptor seeds its noise, which protects nobody");
}

/** Returns epsilon at the owner's beta and gamma (section 12.5). */
function checkGuarantee(batch: Batch, demands: Demands): number {
  const { owner_share, guarantee } = batch.descriptor;
  need(owner_share <= demands.maxOwnerShare, 24, "weak-guarantee", `one owner's nodes may hold ${owner_share} of the slots`);
  const gamma = owner_share < 1 ? Math.max(demands.dishonestFraction, owner_share) : demands.dishonestFraction;
  const epsilon = epsilonAt(batch, gamma, demands.beta, demands.epsilon);
  need(epsilon <= demands.epsilon * demands.tolerance, 25, "weak-guarantee", `epsilon is ${epsilon}; the owner allows ${demands.epsilon}`);
  const promised = epsilonAt(batch, guarantee.dishonest_fraction, guarantee.beta, guarantee.epsilon);
  need(promised <= guarantee.epsilon * demands.tolerance, 26, "weak-guarantee", `epsilon ${guarantee.epsilon} is promised; it is ${promised}`);
  return epsilon;
}

function epsilonAt({ descriptor: d, layout }: Batch, dishonestFraction: number, beta: number, compared: number): number {
  const { noise, n, noise_slots: noiseSlots, word_bits: wordBits } = d;
  const { cells, counters } = layout;
  return epsilonOf({ noise, n, dishonestFraction, cells, counters, noiseSlots, wordBits }, beta, compared);
}
