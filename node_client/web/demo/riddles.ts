import type { Shape } from "../src/index.js";

export interface Riddle {
  readonly question: string;
  /** The hint of each action: a letter, or a clue. */
  readonly hints: readonly [string, string];
  /** The first answer is right; the page shows them in alphabetical order. */
  readonly answers: readonly [string, string, string];
}

export const RIDDLES: readonly Riddle[] = [
  {
    question: "What gets wetter the more it dries?",
    hints: ["The answer begins with T.", "It hangs in a bathroom."],
    answers: ["A towel", "A river", "A sponge"],
  },
  {
    question: "What has many keys and opens no door?",
    hints: ["The answer begins with P.", "It can be heard next door."],
    answers: ["A piano", "A jailer", "A map"],
  },
  {
    question: "What travels around the world and stays in a corner?",
    hints: ["The answer begins with S.", "A letter needs one."],
    answers: ["A stamp", "An anchor", "The moon"],
  },
];

/** States: at the start, after a right answer, after a wrong one. An action is a kind of hint. */
export const [START, RIGHT, WRONG] = [0, 1, 2] as const;

const NEXT = [RIGHT, WRONG];

/** The episode: a riddle is a step, and the reward is 1 for a right answer. */
export const SHAPE: Shape = {
  states: 3,
  actions: 2,
  horizon: RIDDLES.length,
  rewards: [0, 1],
  support: { start: [START], next: [[START, RIGHT, WRONG].map(() => [NEXT, NEXT])] },
  homogeneous: false,
};
