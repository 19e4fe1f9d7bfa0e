import type { AcceptedBatch } from "./core/checks.js";
import { Refusal } from "./core/problems.js";
import type { Episode } from "./core/counters.js";
import { contents, drawPolicy } from "./core/report.js";
import type { LeaseReply } from "./core/wire.js";
import type { OpenBatch } from "./batches.js";
import { deliver, isStored, type Draft } from "./delivery.js";
import { play, type Environment } from "./environment.js";
import { Unavailable } from "./errors.js";
import { NodeParts, type NodeOptions } from "./node.js";
import { systemRandom } from "./random.js";

const POLL_SECONDS = 20;
const PAUSE_SECONDS = 0.25;
const LONGEST_PAUSE_SECONDS = 2;
const SHARE_SECONDS = 10; // before a node that holds its share of a batch asks for more

type Lease = LeaseReply["leases"][number];

/**
 * Serves batches for people whose episodes run in an environment, until `signal` is aborted.
 *
 * Everybody in `users` is asked once in a lifetime: the diary records this before the person's episode begins.
 * Throws Refusal `unauthorized` if the shuffler does not know the node.
 */
export async function serve(
  environment: Environment,
  users: readonly string[],
  options: NodeOptions,
  signal: AbortSignal,
): Promise<void> {
  const asked = new Set((await options.diary.entries()).map((entry) => entry.user));
  const server = new Server(environment, users.filter((user) => !asked.has(user)), options);
  for (let idle = 0; !signal.aborted; ) {
    idle = (await server.turn(signal)) ? 0 : idle + 1;
    const pause = Math.min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2 ** Math.min(idle, 10));
    if (idle > 0) await server.parts.outside.sleep(pause, signal).catch(() => undefined);
  }
}

class Server {
  readonly parts: NodeParts;
  readonly #environment: Environment;
  #waiting: string[];
  #hasQuota = true;
  #accepted = false;
  readonly #pausedUntil = new Map<string, number>();

  constructor(environment: Environment, users: string[], options: NodeOptions) {
    this.parts = new NodeParts(options, environment);
    this.#environment = environment;
    this.#waiting = users;
  }

  /** Polls once and serves each open batch; returns whether anybody was asked. */
  async turn(signal: AbortSignal): Promise<boolean> {
    let asked = 0;
    try {
      for (const open of await this.parts.batches.list(POLL_SECONDS, signal)) {
        if (!signal.aborted) asked += await this.#serve(open);
      }
    } catch (error) {
      if (error instanceof Refusal && error.slug === "unauthorized") throw error;
      if (!(error instanceof Refusal || error instanceof Unavailable)) throw error;
      if (!signal.aborted) this.parts.tell({ event: "trouble", detail: error.message });
    }
    return asked > 0;
  }

  async #serve({ batch, freeSlots }: OpenBatch): Promise<number> {
    const { batch_id } = batch.descriptor;
    if ((this.#pausedUntil.get(batch_id) ?? 0) > this.parts.now()) return 0;
    const most = Math.min(await this.parts.mostUsers(batch), this.#accepted ? freeSlots : 1);
    const users = this.#hasQuota ? this.#waiting.slice(0, most) : [];
    if (users.length === 0) {
      if (most > 0) await this.parts.decline(batch, "no-users");
      return 0;
    }
    const reply = await this.parts.client.lease(batch, users);
    this.#note(batch_id, reply);
    const leases = this.#inTime(batch, reply.leases);
    if (leases.length > 0) await this.#report(batch, leases);
    return leases.length;
  }

  #note(batchId: string, { refused, leases }: LeaseReply): void {
    const problems = new Set(refused.map((each) => each.problem));
    const unavailable = new Set(refused.filter((each) => each.problem === "user-unavailable").map((each) => each.user));
    this.#waiting = this.#waiting.filter((user) => !unavailable.has(user));
    if (problems.has("quota-exceeded")) this.#hasQuota = false;
    if (problems.has("share-exceeded")) this.#pausedUntil.set(batchId, this.parts.now() + SHARE_SECONDS);
    if (leases.length > 0) this.parts.tell({ event: "leased", batch: batchId, reports: leases.length });
  }

  /** Returns the leases that end late enough. The users of the other leases have not been asked. */
  #inTime(batch: AcceptedBatch, leases: readonly Lease[]): Lease[] {
    const each = this.parts.pace.reportSeconds(batch);
    const start = this.parts.now() + (batch.descriptor.episode_seconds ?? 0);
    return leases.filter((lease, i) => lease.expires_at > start + each * (i + 1));
  }

  async #report(batch: AcceptedBatch, leases: readonly Lease[]): Promise<void> {
    const [{ batch_id }, beta] = [batch.descriptor, this.parts.settings.max_beta];
    const entries = leases.map(({ user }) => {
      return { user, batch: batch_id, askedAt: Math.floor(this.parts.now()), epsilon: batch.epsilon, beta };
    });
    await this.parts.diary.put(entries.map((entry) => ({ ...entry, outcome: "asked", episode: null })));
    const asked = new Set(entries.map((entry) => entry.user));
    this.#waiting = this.#waiting.filter((user) => !asked.has(user));
    const start = performance.now();
    const outcomes = await this.#deliver(batch, leases.map(({ lease }) => this.#draft(batch, lease)));
    this.parts.pace.record((performance.now() - start) / 1000, leases.length * batch.messages);
    const ended = entries.map((entry, i) => ({ ...entry, outcome: outcomes[i] ?? "internal", episode: null }));
    await this.parts.diary.put(ended);
    const accepted = ended.filter((entry) => entry.outcome === "accepted").length;
    this.#accepted = accepted > 0;
    this.parts.tell({ event: "uploaded", batch: batch_id, reports: leases.length, accepted });
  }

  #draft(batch: AcceptedBatch, lease: string): Draft {
    let episode: Episode | null = null;
    try {
      episode = play(this.#environment, drawPolicy(batch.descriptor, systemRandom), batch.descriptor, systemRandom);
    } catch {
      // The environment failed: the report carries noise and padding. The error could tell about the person.
    }
    return { lease, contents: contents(batch, episode, systemRandom) };
  }

  async #deliver(batch: AcceptedBatch, drafts: readonly Draft[]): Promise<string[]> {
    try {
      const results = await deliver(this.parts, batch, drafts);
      return results.map(({ outcome }) => (isStored(outcome) ? "accepted" : outcome));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.parts.tell({ event: "trouble", batch: batch.descriptor.batch_id, detail: error.message });
      return drafts.map(() => error.slug);
    }
  }
}
