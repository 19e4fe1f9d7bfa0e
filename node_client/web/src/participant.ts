import { unhex, hex } from "./core/bytes.js";
import type { AcceptedBatch } from "./core/checks.js";
import { Refusal } from "./core/problems.js";
import type { Episode } from "./core/counters.js";
import { contents, drawPolicy, drawReward } from "./core/report.js";
import type { UploadResult } from "./core/wire.js";
import { deliver, isStored, upload } from "./delivery.js";
import type { KeptEpisode, KeptStep, Participation } from "./diary.js";
import { EpisodeBuilder, type Shape } from "./environment.js";
import { refusal, Unavailable } from "./errors.js";
import { NodeParts, type NodeOptions } from "./node.js";
import { episodeEnds } from "./pace.js";
import { systemRandom } from "./random.js";

const LONGEST_SLEEP = 60; // A sleeping machine stops timers: the clock is read again.
const RETRY_SECONDS = 10;

/**
 * A node inside an app or a page, which drives the episodes of its people itself, at their own pace.
 *
 * If the person gives up or does not end in time, the report carries only noise and padding. Otherwise a missing
 * report could show what somebody did. Everything that must survive a restart is in the diary before anything leaves
 * the device.
 */
export class Participant {
  readonly #parts: NodeParts;
  readonly #shape: Shape;
  readonly #held = new Map<string, PersonLease>();
  readonly #ended = new Map<string, Participation>();
  readonly #asking = new Map<string, Promise<PersonLease>>();
  readonly #closing = new AbortController();

  private constructor(options: NodeOptions, shape: Shape) {
    this.#parts = new NodeParts(options, shape);
    this.#shape = shape;
  }

  /** Opens a participant, and continues episodes and reports that a restart interrupted. Throws InvalidSettings. */
  static async open(shape: Shape, options: NodeOptions): Promise<Participant> {
    const participant = new Participant(options, shape);
    for (const entry of await options.diary.entries()) {
      if (entry.episode === null) participant.#ended.set(entry.user, entry);
      else participant.#hold(entry, entry.episode);
    }
    return participant;
  }

  /** Returns everybody's entries: batch, guarantee and outcome. */
  async history(): Promise<readonly Participation[]> {
    return this.#parts.diary.entries();
  }

  /** Returns whether a batch still waits for reports. */
  async isOpen(batch: string): Promise<boolean> {
    return (await this.#parts.client.openIds()).includes(batch);
  }

  /**
   * Returns a person's place in a batch. Until the report is sent, each call returns this place, also after a restart.
   *
   * `user` has 32 hexadecimal digits (`newUser`, or the owner's HMAC of section 14). A person takes part once. Waits up
   * to `seconds`, 30 at most, for a batch with room. Throws Unavailable if none has room, and Refusal if the person was asked before or the shuffler refuses.
   */
  lease(user: string, seconds = 0): Promise<PersonLease> {
    const held = this.#held.get(user);
    if (held !== undefined) return Promise.resolve(held);
    const asking = this.#asking.get(user) ?? this.#ask(user, seconds).finally(() => this.#asking.delete(user));
    this.#asking.set(user, asking);
    return asking;
  }

  async #ask(user: string, seconds: number): Promise<PersonLease> {
    const earlier = this.#ended.get(user);
    if (earlier !== undefined && earlier.outcome !== "asking") {
      throw new Refusal("user-unavailable", "You have taken part before. Everybody takes part once only.");
    }
    for (const { batch } of await this.#parts.batches.list(seconds, this.#closing.signal)) {
      const lease = (await this.#parts.mostUsers(batch)) > 0 ? await this.#request(batch, user) : null;
      if (lease !== null) return lease;
    }
    throw new Unavailable("No batch has room now. Try again later.");
  }

  /** Ends the timers. Episodes and reports go on once the participant is opened again. */
  async close(): Promise<void> {
    this.#closing.abort();
    await this.#parts.diary.close();
  }

  /** Asks for a place in one batch; returns null if the batch has none. */
  async #request(batch: AcceptedBatch, user: string): Promise<PersonLease | null> {
    const parts = this.#parts;
    const { batch_id, episode_seconds } = batch.descriptor;
    const { epsilon, beta } = { epsilon: batch.epsilon, beta: parts.settings.max_beta };
    const entry = { user, batch: batch_id, askedAt: Math.floor(parts.now()), epsilon, beta };
    await parts.diary.put([{ ...entry, outcome: "asking", episode: null }]);
    const reply = await parts.client.lease(batch, [user]);
    const problem = reply.refused[0]?.problem;
    if (problem === "user-unavailable" || problem === "quota-exceeded") throw refusal(problem);
    const lease = reply.leases[0];
    const least = (episode_seconds ?? 0) + parts.pace.reportSeconds(batch);
    if (lease === undefined || parts.now() + least > lease.expires_at) return null;
    const episode: KeptEpisode = {
      lease: lease.lease,
      leaseEnds: lease.expires_at,
      ends: episodeEnds(batch, lease.expires_at, parts.now()),
      policy: drawPolicy(batch.descriptor, systemRandom),
      steps: [],
      sealed: null,
      batchKey: null,
    };
    const asked = { ...entry, outcome: "asked", episode };
    await parts.diary.put([asked]);
    parts.tell({ event: "leased", batch: batch_id, reports: 1 });
    return this.#hold(asked, episode);
  }

  #hold(entry: Participation, episode: KeptEpisode): PersonLease {
    const held = new PersonLease(this.#parts, this.#shape, entry, episode, (ended) => {
      this.#held.delete(ended.user);
      this.#ended.set(ended.user, ended);
    });
    this.#held.set(entry.user, held);
    void this.#watch(held);
    return held;
  }

  /** Sends noise when the episode's time is over, and tries again until the report has an outcome. */
  async #watch(held: PersonLease): Promise<void> {
    const { outside } = this.#parts;
    try {
      while (held.isOpen) {
        const left = held.endsAt - outside.now();
        await outside.sleep(Math.min(left, LONGEST_SLEEP), this.#closing.signal);
      }
      for (;;) {
        await held.giveUp().catch((error: unknown) => {
          this.#parts.tell({ event: "trouble", detail: error instanceof Error ? error.message : "unknown" });
        });
        if (held.isOver) return;
        await outside.sleep(RETRY_SECONDS, this.#closing.signal);
      }
    } catch {
      // The participant is closed. The next start continues this episode.
    }
  }
}

/** One person's place in a batch, and their episode. */
export class PersonLease {
  readonly #parts: NodeParts;
  readonly #shape: Shape;
  readonly #onEnd: (entry: Participation) => void;
  #entry: Participation;
  #episode: KeptEpisode | null;
  #delivery: Promise<void> | null = null;

  constructor(
    parts: NodeParts,
    shape: Shape,
    entry: Participation,
    episode: KeptEpisode,
    onEnd: (entry: Participation) => void,
  ) {
    [this.#parts, this.#shape, this.#entry, this.#episode, this.#onEnd] = [parts, shape, entry, episode, onEnd];
  }

  /** The batch, the guarantee and the outcome so far. */
  get participation(): Participation {
    return this.#entry;
  }

  /** When the episode must be over (seconds since 1970); after this, the report is noise only. */
  get endsAt(): number {
    return this.#episode?.ends ?? 0;
  }

  /** True while steps can be recorded. */
  get isOpen(): boolean {
    return this.#openSteps !== null && this.#parts.now() < this.endsAt;
  }

  /** True once the report has its outcome. */
  get isOver(): boolean {
    return this.#episode === null;
  }

  /** The state in which the next step begins; null before the first step. */
  get state(): number | null {
    return this.#openSteps?.at(-1)?.next ?? null;
  }

  /** The number of the next step; the horizon once all are recorded. */
  get step(): number {
    const steps = this.#openSteps ?? [];
    return steps.at(-1)?.next === null ? this.#shape.horizon : steps.length;
  }

  /** Returns the policy's action for the next step, in the state of the person. */
  act(state: number): number {
    this.#requireOpen();
    const action = this.#episode?.policy[this.step]?.[state];
    if (action === undefined) throw new RangeError(`state ${state} or step ${this.step} does not exist`);
    return action;
  }

  /**
   * Records the next step: its state, the reward of the action that `act` named, and the state that followed (null: the
   * episode ended early). The step is in the diary when this returns. Only one random bit of the reward is kept.
   */
  async record(state: number, reward: number, next: number | null): Promise<void> {
    const steps = this.#requireOpen();
    const [low, high] = this.#shape.rewards;
    const [last, bad] = [steps.at(-1), next !== null && !(Number.isInteger(next) && next >= 0 && next < this.#shape.states)];
    if (!(reward >= low && reward <= high) || bad) throw new RangeError("the reward or the next state is out of its range");
    if (last !== undefined && last.next !== state) throw new RangeError("a step begins where the last one ended");
    this.act(state);
    const { descriptor } = await this.#parts.batches.get(this.#entry.batch);
    const step: KeptStep = { state, reward: drawReward(descriptor, reward, systemRandom), next };
    await this.#keep({ steps: [...steps, step] });
  }

  /**
   * Sends the report; returns when the shuffler has stored it. Throws Refusal if the shuffler refuses the report. Throws
   * Unavailable if the shuffler is away, and sends the report later.
   */
  async report(): Promise<void> {
    this.#requireOpen();
    if (this.step < this.#shape.horizon) throw new RangeError(`${this.step} of ${this.#shape.horizon} steps are recorded`);
    await this.#send();
  }

  /** Erases the episode, and sends noise and padding in its place. Changes nothing once `report` was called. */
  async giveUp(): Promise<void> {
    if (this.#delivery === null && this.#openSteps !== null) await this.#keep({ steps: null });
    await this.#send();
  }

  get #openSteps(): readonly KeptStep[] | null {
    return this.#episode?.sealed === null ? this.#episode.steps : null;
  }

  #requireOpen(): readonly KeptStep[] {
    const steps = this.#openSteps;
    if (steps === null || !this.isOpen) {
      throw new Refusal("late", "This episode is over: its report is sent, or noise in its place.");
    }
    return steps;
  }

  #send(): Promise<void> {
    this.#delivery ??= this.#deliver().finally(() => {
      this.#delivery = null;
    });
    return this.#delivery;
  }

  async #deliver(): Promise<void> {
    const kept = this.#episode;
    if (kept === null) return;
    let outcome: string;
    try {
      if (this.#parts.now() >= kept.leaseEnds) throw refusal("late");
      outcome = (await this.#upload(kept))[0]?.outcome ?? "internal";
    } catch (error) {
      if (error instanceof Refusal) await this.#end(error.slug);
      throw error;
    }
    await this.#end(isStored(outcome) ? "accepted" : outcome);
    if (!isStored(outcome)) throw refusal(outcome);
  }

  async #upload(kept: KeptEpisode): Promise<readonly UploadResult[]> {
    const batch = await this.#parts.batches.get(this.#entry.batch);
    const draft = { lease: kept.lease, contents: contents(batch, this.#recorded(kept), systemRandom) };
    if (kept.sealed === null) {
      return deliver(this.#parts, batch, [draft], async ([sealed], batchKey) => {
        await this.#keep({ steps: null, sealed: hex(sealed ?? new Uint8Array()), batchKey });
      });
    }
    if (kept.batchKey !== hex(batch.batchKey)) throw refusal("outdated-key");
    return upload(this.#parts, batch, [draft], [unhex(kept.sealed)]);
  }

  #recorded({ steps, policy }: KeptEpisode): Episode | null {
    if (steps === null || steps[0] === undefined || this.step < this.#shape.horizon) return null;
    const builder = new EpisodeBuilder(this.#shape, policy, steps[0].state);
    for (const step of steps) builder.add(step.reward, step.next);
    return builder.episode;
  }

  async #keep(changes: Partial<KeptEpisode>): Promise<void> {
    if (this.#episode === null) return;
    const episode = { ...this.#episode, ...changes };
    await this.#parts.diary.put([{ ...this.#entry, episode }]);
    this.#episode = episode;
  }

  async #end(outcome: string): Promise<void> {
    this.#entry = { ...this.#entry, outcome, episode: null };
    this.#episode = null;
    await this.#parts.diary.put([this.#entry]);
    this.#parts.tell({ event: "uploaded", batch: this.#entry.batch, reports: 1, accepted: outcome === "accepted" ? 1 : 0 });
    this.#onEnd(this.#entry);
  }
}
