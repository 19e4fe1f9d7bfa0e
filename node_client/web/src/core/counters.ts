/** The counters of a batch, and which of them an episode feeds (docs/protocol.md, section 5). */
import { FormError } from "./json.js";

/** X, A and H. */
export interface Sizes {
  readonly states: number;
  readonly actions: number;
  readonly horizon: number;
}

/** An episode: H + 1 states, H actions, H reward bits. */
export interface Episode {
  readonly states: readonly number[];
  readonly actions: readonly number[];
  readonly rewards: readonly number[];
}

/** For each state and action, the states that may follow. */
export type Successors = readonly (readonly (readonly number[])[])[];

/** A declared support (section 5.4). */
export interface Support {
  readonly start: readonly number[];
  readonly next: readonly Successors[];
}

export type Families = "paper" | "lean" | "joint";

const MOST_TRANSITIONS = 16_777_216;

/** A step with a declared support: the states that can be reached, and what may follow them. */
interface Step {
  readonly states: readonly number[];
  readonly next: Successors;
}

/** Throws FormError unless a support is valid. */
export function checkSupport(support: Support, sizes: Sizes): void {
  const { states: X, actions: A, horizon: H } = sizes;
  const tables = support.next;
  if (tables.length !== 1 && tables.length !== H) throw new FormError("support: next must have 1 or H tables");
  let listed = 0;
  for (const row of tables.flat()) {
    if (row.length !== A) throw new FormError("support: a state must have a list for each action");
    for (const states of row) listed += checkStates(states, X);
  }
  if (tables.some((table) => table.length !== X)) throw new FormError("support: a table must have a row for each state");
  if ((listed * H) / tables.length > MOST_TRANSITIONS) throw new FormError("support: too many transitions");
  if (checkStates(support.start, X) === 0) throw new FormError("support: start must not be empty");
  for (const step of steps(support, H)) {
    if (pairsOf(step).some((states) => states.length === 0)) {
      throw new FormError("support: a state and action that can occur has no successor");
    }
  }
}

function checkStates(states: readonly number[], X: number): number {
  const ascending = states.every((state, i) => state < X && state > (i === 0 ? -1 : states[i - 1]));
  if (!ascending) throw new FormError("support: states must be ascending and below X");
  return states.length;
}

function* steps(support: Support, H: number): Generator<Step> {
  let states: readonly number[] = support.start;
  for (let h = 0; h < H; h++) {
    const step = { states, next: support.next[h % support.next.length] };
    yield step;
    states = [...new Set(pairsOf(step).flat())].sort((a, b) => a - b);
  }
}

/** Returns the successors of each state and action that can occur, in the order of the counters. */
function pairsOf(step: Step): (readonly number[])[] {
  return step.states.flatMap((x) => step.next[x]);
}

/** Returns whether `support` has every transition that can happen under `other` (check 20). */
export function covers(support: Support, other: Support, H: number): boolean {
  const here = steps(support, H);
  for (const there of steps(other, H)) {
    const { states, next } = here.next().value as Step;
    const reached = new Set(states);
    if (!there.states.every((x) => reached.has(x) && coversRow(next[x], there.next[x]))) return false;
  }
  return true;
}

function coversRow(row: Successors[number], other: Successors[number]): boolean {
  return other.every((states, a) => {
    const possible = new Set(row[a]);
    return states.every((state) => possible.has(state));
  });
}

/** One step of an episode: the numbers of its transition and of its visit, and its reward bit. */
interface Increment {
  readonly transition: number;
  readonly visit: number;
  readonly reward: number;
}

type Family = "joint" | "transitions" | "visits" | "rewards";

/** The counters of a batch, in their order. */
export class Layout {
  /** How many (h, x, a, x') are counted, and how many (h, x, a). */
  private readonly transitions: number;
  private readonly visits: number;

  /** `layer` is the one step that is counted; null counts all steps. */
  constructor(
    readonly sizes: Sizes,
    readonly families: Families,
    readonly layer: number | null,
    readonly support: Support | null,
  ) {
    const { states: X, actions: A } = sizes;
    if (support === null) {
      this.visits = this.rows * X * A;
      this.transitions = this.visits * X;
      return;
    }
    this.visits = this.transitions = 0;
    for (const [h, step] of [...steps(support, sizes.horizon)].entries()) {
      if (!this.counts(h)) continue;
      this.visits += step.states.length * A;
      this.transitions += transitionsOf(step);
    }
  }

  /** S, the number of steps that are counted. */
  private get rows(): number {
    return this.layer === null ? this.sizes.horizon : 1;
  }

  private counts(h: number): boolean {
    return this.layer === null || this.layer === h;
  }

  private get order(): Family[] {
    if (this.families === "joint" && this.layer === null) return ["joint"];
    const order: Family[] = ["transitions"];
    if (this.families === "paper") order.push("visits");
    if (this.layer === null) order.push("rewards");
    return order;
  }

  private sizeOf(family: Family): number {
    if (family === "joint") return 2 * this.transitions;
    return family === "transitions" ? this.transitions : this.visits;
  }

  /** C, the number of counters. It is also the index of the dummy. */
  get counters(): number {
    return this.order.reduce((size, family) => size + this.sizeOf(family), 0);
  }

  /** The number of bytes of an index (w). */
  get width(): number {
    let width = 1;
    while (256 ** width <= this.counters) width++;
    return width;
  }

  /** The most counters that one user's episode feeds. */
  get cells(): number {
    return this.order.length * this.rows;
  }

  /**
   * Returns the indices of an episode's increments, at most `cells` of them (section 5.3).
   *
   * Returns null if the episode does not fit the sizes, or is outside the support.
   */
  encode(episode: Episode): number[] | null {
    if (!this.fits(episode)) return null;
    const increments = this.support === null ? this.increments(episode) : this.possible(episode, this.support);
    if (increments === null) return null;
    const indices: number[] = [];
    let offset = 0;
    for (const family of this.order) {
      for (const { transition, visit, reward } of increments) {
        if (family === "joint") indices.push(offset + 2 * transition + reward);
        else if (family === "transitions") indices.push(offset + transition);
        else if (family === "visits" || reward === 1) indices.push(offset + visit);
      }
      offset += this.sizeOf(family);
    }
    return indices;
  }

  private fits({ states, actions, rewards }: Episode): boolean {
    const { states: X, actions: A, horizon: H } = this.sizes;
    const parts = [[states, H + 1, X], [actions, H, A], [rewards, H, 2]] as const;
    return parts.every(([values, size, bound]) => {
      return values.length === size && values.every((v) => Number.isInteger(v) && v >= 0 && v < bound);
    });
  }

  private increments({ states, actions, rewards }: Episode): Increment[] {
    const { states: X, actions: A } = this.sizes;
    return actions.flatMap((a, h) => {
      if (!this.counts(h)) return [];
      const visit = ((this.layer === null ? h : 0) * X + states[h]) * A + a;
      return [{ visit, transition: visit * X + states[h + 1], reward: rewards[h] }];
    });
  }

  private possible({ states, actions, rewards }: Episode, support: Support): Increment[] | null {
    const increments: Increment[] = [];
    let [visits, transitions] = [0, 0];
    for (const [h, step] of [...steps(support, this.sizes.horizon)].entries()) {
      const [place, successor] = [step.states.indexOf(states[h]), step.next[states[h]][actions[h]].indexOf(states[h + 1])];
      if (place < 0 || successor < 0) return null;
      if (!this.counts(h)) continue;
      const pair = place * this.sizes.actions + actions[h];
      const before = pairsOf(step).slice(0, pair).reduce((sum, list) => sum + list.length, 0);
      increments.push({ visit: visits + pair, transition: transitions + before + successor, reward: rewards[h] });
      visits += step.states.length * this.sizes.actions;
      transitions += transitionsOf(step);
    }
    return increments;
  }
}

function transitionsOf(step: Step): number {
  return pairsOf(step).reduce((sum, states) => sum + states.length, 0);
}
