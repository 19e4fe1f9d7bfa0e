import type { AcceptedBatch } from "./core/checks.js";
import { Batches, type NodeEvent } from "./batches.js";
import type { Way } from "./delivery.js";
import type { Diary } from "./diary.js";
import type { Shape } from "./environment.js";
import { OUTSIDE, ShufflerClient, type Outside } from "./http.js";
import { Pace } from "./pace.js";
import type { Sealer } from "./sealer.js";
import { demandsOf, shufflerUrls, type Settings } from "./settings.js";

export interface NodeOptions {
  readonly settings: Settings;
  readonly diary: Diary;
  readonly seal: Sealer;
  /** Is called with every event; no event names a person. */
  readonly tell?: (event: NodeEvent) => void;
  /** Tests replace the clock and the network. */
  readonly outside?: Outside;
}

/** The parts that a participant and a serving node have in common. */
export class NodeParts implements Way {
  readonly client: ShufflerClient;
  readonly batches: Batches;
  readonly seal: Sealer;
  readonly diary: Diary;
  readonly outside: Outside;
  readonly pace = new Pace();
  readonly settings: Settings;
  readonly tell: (event: NodeEvent) => void;

  constructor(options: NodeOptions, shape: Shape) {
    this.settings = options.settings;
    this.outside = options.outside ?? OUTSIDE;
    this.tell = options.tell ?? (() => undefined);
    this.diary = options.diary;
    this.seal = options.seal;
    this.client = new ShufflerClient(shufflerUrls(this.settings.shuffler_url), this.settings.node_token, this.outside);
    this.batches = new Batches(this.client, demandsOf(this.settings, shape), this.outside, this.tell);
  }

  now(): number {
    return this.outside.now();
  }

  /** Returns how many people may be asked for a batch now; tells the shuffler if this machine is too slow. */
  async mostUsers(batch: AcceptedBatch): Promise<number> {
    await this.pace.rehearse(batch, this.seal);
    const left = batch.descriptor.expires_at - this.now();
    const most = this.pace.mostUsers(batch, Math.min(this.batches.leaseSeconds, left));
    if (most === 0) await this.decline(batch, "too-slow");
    return left > (batch.descriptor.episode_seconds ?? 0) ? most : 0;
  }

  readonly #declined = new Map<string, number>();

  /** Tells the shuffler, every 20 seconds at most, why nobody is asked for a batch. */
  async decline(batch: AcceptedBatch, reason: "no-users" | "too-slow"): Promise<void> {
    const { batch_id } = batch.descriptor;
    const last = this.#declined.get(batch_id);
    if (last !== undefined && this.now() < last + 20) return;
    this.#declined.set(batch_id, this.now());
    if (last === undefined) this.tell({ event: "declined", batch: batch_id, detail: reason });
    await this.client.decline(batch_id, reason);
  }
}
