import { readPins } from "./core/wire.js";
import type { Demands } from "./core/checks.js";
import type { Aggregation, Trust } from "./core/descriptor.js";
import { InvalidSettings } from "./errors.js";
import type { Shape } from "./environment.js";

/** An owner's settings. The members are those of section 18 of docs/protocol.md. */
export interface Settings {
  /** `https://host:port`, several joined by commas; `http` on loopback only. */
  readonly shuffler_url: string;
  readonly shuffler_id: string;
  readonly shuffler_key: string;
  readonly coordinator_key: string;
  /** Keys of analyzers that the owner trusts, 64 hexadecimal digits each. */
  readonly analyzer_keys: readonly string[];
  /** The token of this node, from its enrolment. */
  readonly node_token: string;
  readonly environment: string;
  readonly max_epsilon: number;
  readonly max_beta: number;
  readonly min_dishonest_fraction: number;
  readonly max_owner_share: number;
  readonly max_batch_seconds: number;
  readonly max_episode_seconds: number;
  readonly trust_models: readonly Trust[];
  readonly aggregations: readonly Aggregation[];
}

const DAY = 86_400;
const KEY = /^[0-9a-f]{64}$/;
const LOOPBACK = /^(localhost|127(\.\d{1,3}){3}|\[::1\])$/;

/** Returns the shuffler's addresses. Throws InvalidSettings. */
export function shufflerUrls(text: string): URL[] {
  return text.split(",").map((part) => {
    let url: URL;
    try {
      url = new URL(part.trim());
    } catch {
      throw new InvalidSettings(`shuffler_url: ${part} is no address`);
    }
    const plain = url.protocol === "http:" && LOOPBACK.test(url.hostname);
    if (url.protocol !== "https:" && !plain) {
      throw new InvalidSettings(`shuffler_url: ${part} needs https; http is for loopback only`);
    }
    return url;
  });
}

/** Reads settings from a JSON value. Throws InvalidSettings, which names the first wrong member. */
export function readSettings(document: unknown): Settings {
  if (typeof document !== "object" || document === null) throw new InvalidSettings("the settings are no JSON object");
  const members = document as Readonly<Record<string, unknown>>;
  function take<T>(name: string, is: (value: unknown) => boolean, wanted: string, otherwise?: T): T {
    const value = members[name] ?? otherwise;
    if (value === undefined) throw new InvalidSettings(`${name} is missing: give ${wanted}`);
    if (!is(value)) throw new InvalidSettings(`${name} must be ${wanted}`);
    return value as T;
  }
  const text = (name: string) => take<string>(name, isText, "a text");
  const key = (name: string) => take<string>(name, isKey, "a key of 64 lower-case hexadecimal digits");
  const number = (name: string, low: number, high: number, otherwise?: number) =>
    take<number>(name, within(low, high), `a number from ${low} to ${high}`, otherwise);
  const list = <T extends string>(name: string, known: readonly T[], otherwise: readonly T[]) =>
    take<readonly T[]>(name, someOf(known), `a list of some of: ${known.join(", ")}`, otherwise);
  const urls = shufflerUrls(text("shuffler_url"));
  const share = urls.every((url) => LOOPBACK.test(url.hostname)) ? 1 : 0.05;
  return {
    shuffler_url: text("shuffler_url"),
    shuffler_id: text("shuffler_id"),
    shuffler_key: key("shuffler_key"),
    coordinator_key: key("coordinator_key"),
    analyzer_keys: take("analyzer_keys", isPins, "a list of keys, at least one"),
    node_token: text("node_token"),
    environment: text("environment"),
    max_epsilon: number("max_epsilon", 0, 100),
    max_beta: number("max_beta", 0, 1),
    min_dishonest_fraction: number("min_dishonest_fraction", 0, 1),
    max_owner_share: number("max_owner_share", 0, 1, share),
    max_batch_seconds: number("max_batch_seconds", 1, 2 ** 53, 31 * DAY),
    max_episode_seconds: number("max_episode_seconds", 0, 15 * DAY, 7 * DAY),
    trust_models: list("trust_models", ["shuffle", "local", "central"], ["shuffle"]),
    aggregations: list("aggregations", ["messages", "sums"], ["messages"]),
  };
}

function isText(value: unknown): boolean {
  return typeof value === "string" && value !== "";
}

function isKey(value: unknown): boolean {
  return typeof value === "string" && KEY.test(value);
}

function isPins(value: unknown): boolean {
  try {
    return Array.isArray(value) && readPins(value.join("\n")).length > 0;
  } catch {
    return false;
  }
}

function within(low: number, high: number): (value: unknown) => boolean {
  return (value) => typeof value === "number" && value >= low && value <= high;
}

function someOf(known: readonly string[]): (value: unknown) => boolean {
  return (value) => Array.isArray(value) && value.length > 0 && value.every((each) => known.includes(each as string));
}

/** Returns what this owner demands of a batch. */
export function demandsOf(settings: Settings, shape: Shape): Demands {
  return {
    coordinatorKey: settings.coordinator_key,
    shufflerKey: settings.shuffler_key,
    shufflerId: settings.shuffler_id,
    epsilon: settings.max_epsilon,
    beta: settings.max_beta,
    dishonestFraction: settings.min_dishonest_fraction,
    environment: settings.environment,
    states: shape.states,
    actions: shape.actions,
    horizon: shape.horizon,
    rewardLow: shape.rewards[0],
    rewardHigh: shape.rewards[1],
    support: shape.support,
    homogeneous: shape.homogeneous,
    trustModels: settings.trust_models,
    aggregations: settings.aggregations,
    maxOwnerShare: settings.max_owner_share,
    analyzerKeys: settings.analyzer_keys,
    maxSeconds: settings.max_batch_seconds,
    shortestEpoch: null, // No epochs: this node keeps no ledger, so a person reports once in a lifetime.
    maxEpisodeSeconds: settings.max_episode_seconds,
    tolerance: 1.0001, // Section 12.5: the core's accountant may be a little coarser than the coordinator's.
  };
}
