import type { RandomBytes } from "./core/bytes.js";
import type { Episode, Support } from "./core/counters.js";
import type { Descriptor } from "./core/descriptor.js";
import { drawReward } from "./core/report.js";
import { InvalidSettings } from "./errors.js";
import { uniform } from "./random.js";

/** An owner's declaration of an environment. States, actions and steps are numbered from 0. */
export interface Shape {
  readonly states: number;
  readonly actions: number;
  readonly horizon: number;
  /** The least and the greatest reward of a step. */
  readonly rewards: readonly [number, number];
  /** The possible transitions; null: not declared. */
  readonly support: Support | null;
  /** True if all steps are alike; null: not declared. */
  readonly homogeneous: boolean | null;
}

/** An environment that runs by itself. */
export interface Environment extends Shape {
  /** Returns the first state. */
  begin(random: RandomBytes): number;
  /** Returns the next state (null if the episode ends early) and the reward. */
  step(step: number, state: number, action: number, random: RandomBytes): readonly [number | null, number];
}

/** Runs one episode under a policy; keeps only one random bit of each reward. */
export function play(
  environment: Environment,
  policy: readonly (readonly number[])[],
  descriptor: Descriptor,
  random: RandomBytes,
): Episode {
  const episode = new EpisodeBuilder(environment, policy, environment.begin(random));
  while (!episode.isComplete) {
    const { step, state } = episode;
    const [next, reward] = environment.step(step, state, episode.action, random);
    episode.add(drawReward(descriptor, reward, random), next);
  }
  return episode.episode;
}

/** The states, actions and reward bits of an episode, step by step. */
export class EpisodeBuilder {
  readonly #shape: Shape;
  readonly #policy: readonly (readonly number[])[];
  readonly #states: number[];
  readonly #actions: number[] = [];
  readonly #rewards: (0 | 1)[] = [];

  constructor(shape: Shape, policy: readonly (readonly number[])[], state: number) {
    this.#shape = shape;
    this.#policy = policy;
    this.#states = [state];
  }

  get episode(): Episode {
    return { states: this.#states, actions: this.#actions, rewards: this.#rewards };
  }

  /** The number of the next step. */
  get step(): number {
    return this.#actions.length;
  }

  get state(): number {
    return this.#states[this.step] ?? -1;
  }

  get isComplete(): boolean {
    return this.step >= this.#shape.horizon;
  }

  /** The policy's action for the next step. */
  get action(): number {
    const action = this.#policy[this.step]?.[this.state];
    if (action === undefined) throw new RangeError(`state ${this.state} does not exist at step ${this.step}`);
    return action;
  }

  /** Adds a step. After an early end (null), the episode stays in the absorbing state X - 1, without rewards. */
  add(reward: 0 | 1, next: number | null): void {
    const absorbing = this.#shape.states - 1;
    this.#push(reward, next ?? absorbing);
    while (next === null && !this.isComplete) this.#push(0, absorbing);
  }

  #push(reward: 0 | 1, next: number): void {
    this.#actions.push(this.action);
    this.#rewards.push(reward);
    this.#states.push(next);
  }
}

/** An environment from tables: `P[h][x][a][y]`, `r[h][x][a]` and `d1[x]`, as in docs/protocol.md, section 18. */
export class TabularEnvironment implements Environment {
  readonly states: number;
  readonly actions: number;
  readonly horizon: number;
  readonly rewards = [0, 1] as const;
  readonly support: Support;
  readonly homogeneous: boolean;
  readonly #P: readonly (readonly (readonly (readonly number[])[])[])[];
  readonly #r: readonly (readonly (readonly number[])[])[];
  readonly #d1: readonly number[];

  constructor(tables: { P: number[][][][]; r: number[][][]; d1: number[] }) {
    const { P, r, d1 } = tables;
    if (!Array.isArray(P) || !Array.isArray(r) || !Array.isArray(d1) || P.length !== r.length) {
      throw new InvalidSettings("an environment has the tables P, r and d1, of the same number of steps");
    }
    [this.#P, this.#r, this.#d1] = [P, r, d1];
    [this.horizon, this.states, this.actions] = [P.length, d1.length, P[0]?.[0]?.length ?? 0];
    const next = P.map((step) => step.map((row) => row.map(positive)));
    this.homogeneous = [P, r].every((table) => new Set(table.map((step) => JSON.stringify(step))).size === 1);
    this.support = { start: positive(d1), next };
  }

  begin(random: RandomBytes): number {
    return draw(this.#d1, random);
  }

  step(step: number, state: number, action: number, random: RandomBytes): readonly [number, number] {
    return [draw(this.#P[step]?.[state]?.[action] ?? [], random), this.#r[step]?.[state]?.[action] ?? 0];
  }
}

function positive(probabilities: readonly number[]): number[] {
  return probabilities.flatMap((probability, index) => (probability > 0 ? [index] : []));
}

function draw(probabilities: readonly number[], random: RandomBytes): number {
  let left = uniform(random);
  for (const [index, probability] of probabilities.entries()) {
    left -= probability;
    if (left < 0) return index;
  }
  return positive(probabilities).at(-1) ?? 0; // Rounding left a little.
}
