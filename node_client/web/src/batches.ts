import { accept, type AcceptedBatch, type Demands } from "./core/checks.js";
import { Refusal } from "./core/problems.js";
import { Unavailable } from "./errors.js";
import type { Outside, ShufflerClient } from "./http.js";

const REFUSED_SECONDS = 10; // before a refused batch is checked again
const MOST_REFUSED_SECONDS = 640;
const REMEMBERED = 16;

/** An event that a node tells its owner; it names no person. */
export interface NodeEvent {
  readonly event: "batch-accepted" | "batch-refused" | "leased" | "uploaded" | "trouble" | "declined";
  readonly batch?: string;
  readonly detail?: string;
  readonly reports?: number;
  readonly accepted?: number;
}

export interface OpenBatch {
  readonly batch: AcceptedBatch;
  readonly freeSlots: number;
}

/** The open batches that pass the checks of section 11. A refused batch is checked again after a pause. */
export class Batches {
  readonly #client: ShufflerClient;
  readonly #demands: Demands;
  readonly #outside: Outside;
  readonly #tell: (event: NodeEvent) => void;
  readonly #accepted = new Map<string, AcceptedBatch>();
  readonly #refused = new Map<string, { until: number; pause: number }>();
  /** The seconds that a lease granted now lasts, besides the time for an episode. */
  leaseSeconds = 0;

  constructor(client: ShufflerClient, demands: Demands, outside: Outside, tell: (event: NodeEvent) => void) {
    this.#client = client;
    this.#demands = demands;
    this.#outside = outside;
    this.#tell = tell;
  }

  /** Returns the accepted batches that have a free slot; the shuffler may wait for one. */
  async list(waitSeconds: number, signal?: AbortSignal): Promise<OpenBatch[]> {
    const { batches, lease_seconds } = await this.#client.list(waitSeconds, signal);
    this.leaseSeconds = lease_seconds;
    const open: OpenBatch[] = [];
    for (const { batch_id, free_slots } of batches) {
      const batch = await this.#unlessRefused(batch_id);
      if (batch !== null && batch.descriptor.expires_at > this.#outside.now()) open.push({ batch, freeSlots: free_slots });
    }
    return open;
  }

  /** Returns a batch, checked now or before. Throws Refusal for the first check that fails. */
  async get(batchId: string): Promise<AcceptedBatch> {
    return this.#accepted.get(batchId) ?? (await this.check(batchId));
  }

  /** Fetches and checks a batch, even if it was checked before: its batch key may have changed. */
  async check(batchId: string): Promise<AcceptedBatch> {
    const envelope = await this.#client.descriptor(batchId);
    const batch = await accept(envelope, batchId, this.#demands, this.#outside.now());
    if (!this.#accepted.has(batchId)) this.#tell({ event: "batch-accepted", batch: batchId });
    this.#accepted.set(batchId, batch);
    const oldest = this.#accepted.keys().next();
    if (this.#accepted.size > REMEMBERED && !oldest.done) this.#accepted.delete(oldest.value);
    return batch;
  }

  async #unlessRefused(batchId: string): Promise<AcceptedBatch | null> {
    const now = this.#outside.now();
    const earlier = this.#refused.get(batchId);
    if (earlier !== undefined && now < earlier.until) return null;
    try {
      const batch = await this.get(batchId);
      this.#refused.delete(batchId);
      return batch;
    } catch (error) {
      if (error instanceof Unavailable) return null;
      if (!(error instanceof Refusal)) throw error;
      const pause = Math.min(MOST_REFUSED_SECONDS, earlier === undefined ? REFUSED_SECONDS : 2 * earlier.pause);
      this.#refused.set(batchId, { until: now + pause, pause });
      if (earlier === undefined) this.#tell({ event: "batch-refused", batch: batchId, detail: `${error.slug}: ${error.message}` });
      return null;
    }
  }
}
