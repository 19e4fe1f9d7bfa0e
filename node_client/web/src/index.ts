/** The public API of riffle-node. Names that are not exported here are private. */

export { Refusal } from "./core/problems.js";
export { memoryDiary, type Diary, type Participation } from "./diary.js";
export { TabularEnvironment, type Environment, type Shape } from "./environment.js";
export { InvalidSettings, Unavailable } from "./errors.js";
export { browserDiary } from "./indexeddb.js";
export type { NodeOptions } from "./node.js";
export { Participant, type PersonLease } from "./participant.js";
export { newUser } from "./random.js";
export { sealHere, workerSealer, type Sealer } from "./sealer.js";
export { serve } from "./serve.js";
export { readSettings, type Settings } from "./settings.js";
