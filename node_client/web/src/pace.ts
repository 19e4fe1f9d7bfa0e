import type { AcceptedBatch } from "./core/checks.js";
import { contents, sealTarget } from "./core/report.js";
import { systemRandom } from "./random.js";
import type { Sealer } from "./sealer.js";

const SLOWEST = 0.5; // part of a lease that one report may take
const PORTION = 0.25; // part of a lease within which all reports of a request should be done
const MOST_USERS = 64;
const KEPT = 0.7; // weight of earlier measurements
const EPISODE_SHARE = 0.5; // part of a lease that an episode may take, beside the descriptor's time

/** The speed at which this machine makes reports. It limits how many people are asked, so that no report is late. */
export class Pace {
  #seconds = 0;
  #messages = 0;

  /** Measures the speed with a report of noise, which is thrown away. Nobody is asked for it. */
  async rehearse(batch: AcceptedBatch, seal: Sealer): Promise<void> {
    if (this.#messages > 0) return;
    const start = performance.now();
    await seal(sealTarget(batch), contents(batch, null, systemRandom));
    this.record((performance.now() - start) / 1000, batch.messages);
  }

  /** Records that this many messages took `seconds` together. */
  record(seconds: number, messages: number): void {
    this.#seconds = KEPT * this.#seconds + seconds;
    this.#messages = KEPT * this.#messages + messages;
  }

  /** Returns the seconds that one report takes. */
  reportSeconds(batch: AcceptedBatch): number {
    return (batch.messages * this.#seconds) / Math.max(1, this.#messages);
  }

  /** Returns how many people may be asked at once; 0 if this machine is too slow for the batch. */
  mostUsers(batch: AcceptedBatch, leaseSeconds: number): number {
    const each = this.reportSeconds(batch);
    if (each > SLOWEST * leaseSeconds) return 0;
    return Math.max(1, Math.min(MOST_USERS, Math.floor((PORTION * leaseSeconds) / Math.max(each, 1e-6))));
  }
}

/** Returns the time (seconds since 1970) by which a person's episode must be over, so that the report is in time. */
export function episodeEnds(batch: AcceptedBatch, leaseEnds: number, now: number): number {
  const given = batch.descriptor.episode_seconds ?? 0;
  return now + given + EPISODE_SHARE * Math.max(0, leaseEnds - now - given);
}
