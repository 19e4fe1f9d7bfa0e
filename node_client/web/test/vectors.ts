/**
 * The test vectors of docs/vectors, given to the core (docs/protocol.md, section 16).
 *
 * Runs in Node.js and in browsers: the files come from a function, and nothing here is of Node.js.
 */
import { epsilonOf, floorShare, overflow } from "../src/core/accountant.js";
import { type Bytes, bigEndian, concat, hex, type RandomBytes, unhex, utf8 } from "../src/core/bytes.js";
import { accept, type Demands } from "../src/core/checks.js";
import { checkSupport, type Episode, type Families, Layout, type Sizes, type Support } from "../src/core/counters.js";
import { batchId, keyId, type KeySource, maskFrom, opaqueId, open, sealer, sha256 } from "../src/core/crypto.js";
import { type Aggregation, analyzerKey, type Batch, type Envelope, parseDescriptor, readEnvelope, type Trust } from "../src/core/descriptor.js";
import { drawCounts, type Noise } from "../src/core/noise.js";
import { Refusal } from "../src/core/problems.js";
import * as report from "../src/core/report.js";
import * as wire from "../src/core/wire.js";

export type Load = (file: string) => Promise<string>;
type Row = { name: string } & Record<string, unknown>;
type Doc = Record<string, unknown>;

/** Throws if two values differ, compared as JSON. */
function same(what: string, got: unknown, expected: unknown): void {
  const [a, b] = [got, expected].map((value) => JSON.stringify(value));
  if (a !== b) throw new Error(`${what}: got ${a?.slice(0, 300)}, expected ${b?.slice(0, 300)}`);
}

function holds(what: string, condition: boolean): void {
  if (!condition) throw new Error(what);
}

const bytesOf = (row: Doc, member: string): Bytes => unhex(row[member] as string);

/** A source that gives these bytes, and fails where a test wants more of them. */
export function tape(bytes: Bytes): RandomBytes {
  let used = 0;
  return (size) => {
    holds("more bytes are drawn than the vector has", used + size <= bytes.length);
    return bytes.slice(used, (used += size));
  };
}

/** Returns all tests by name; `load` returns the text of a file of docs/vectors. */
export function vectorTests(load: Load): [name: string, run: () => Promise<void>][] {
  const tests: [string, (document: Doc, load: Load) => Promise<void>][] = [
    ["hpke.json", hpke],
    ["descriptors.json", descriptors],
    ["parsing.json", parsing],
    ["refusals.json", refusals],
    ["counters.json", counters],
    ["draws.json", draws],
    ["reports.json", reports],
    ["analyzer.json", analyzer],
    ["accountant.json", accountant],
    ["wire.json", wires],
  ];
  return tests.map(([file, run]) => [file, async () => run(JSON.parse(await load(file)) as Doc, load)]);
}

async function hpke(document: Doc): Promise<void> {
  for (const row of document["vectors"] as Row[]) {
    const info = bytesOf(row, "info");
    const opened = await open(bytesOf(row, "private"), info, bytesOf(row, "seal")).then(hex, () => null);
    same(row.name, opened, row["opens"] === true ? row["plaintext"] : null);
    if (row["opens"] !== true) continue;
    const seal = await sealer(bytesOf(row, "public"), info, keysFrom([bytesOf(row, "ephemeral")]));
    same(`${row.name}: seal`, hex(await seal(bytesOf(row, "plaintext"))), row["seal"]);
  }
  const rfc = document["rfc9180"] as Doc;
  const seal = await sealer(bytesOf(rfc, "pkRm"), bytesOf(rfc, "info"), keysFrom([bytesOf(rfc, "skEm")]));
  const sealed = await seal(new Uint8Array());
  same("RFC 9180: enc", hex(sealed.subarray(0, 32)), rfc["enc"]);
}

function envelopeOf(row: Doc): Envelope {
  const members = ["descriptor", "coordinator_signature", "batch_key", "shuffler_signature"];
  return readEnvelope(JSON.stringify(Object.fromEntries(members.map((member) => [member, row[member]]))));
}

function demandsOf(owner: Doc): Demands {
  return {
    coordinatorKey: owner["coordinator_key"] as string,
    shufflerKey: owner["shuffler_key"] as string,
    shufflerId: owner["shuffler_id"] as string,
    epsilon: owner["epsilon"] as number,
    beta: owner["beta"] as number,
    dishonestFraction: owner["dishonest_fraction"] as number,
    environment: owner["environment"] as string,
    states: owner["states"] as number,
    actions: owner["actions"] as number,
    horizon: owner["horizon"] as number,
    rewardLow: owner["reward_low"] as number,
    rewardHigh: owner["reward_high"] as number,
    support: owner["support"] as Support | null,
    homogeneous: owner["homogeneous"] as boolean | null,
    trustModels: owner["trust_models"] as Trust[],
    aggregations: owner["aggregations"] as Aggregation[],
    maxOwnerShare: owner["max_owner_share"] as number,
    analyzerKeys: owner["analyzer_keys"] as string[] | null,
    maxSeconds: owner["max_seconds"] as number,
    shortestEpoch: owner["shortest_epoch"] as number | null,
    maxEpisodeSeconds: owner["max_episode_seconds"] as number,
    tolerance: 1,
  };
}

async function descriptors(document: Doc): Promise<void> {
  for (const row of document["vectors"] as Row[]) {
    const demands = demandsOf({ ...(document["owner"] as Doc), ...(row["owner"] as Doc) });
    const asked = (JSON.parse(row["descriptor"] as string) as Doc)["batch_id"] as string;
    const batch = await accept(envelopeOf(row), asked, demands, document["now"] as number);
    const { layout, digest, messages, messageBytes, reportBytes, ownerSlots } = batch;
    const got = [hex(digest), layout.counters, layout.width, layout.cells, messages, messageBytes, reportBytes, ownerSlots];
    const members = ["digest", "counters", "width", "cells", "messages", "message_bytes", "report_bytes", "owner_slots"];
    same(row.name, got, members.map((member) => row[member]));
  }
  for (const row of document["batch_ids"] as Doc[]) {
    same("batch id", await batchId(row["run_id"] as string, row["deployment"] as number), row["batch_id"]);
  }
  for (const row of document["key_ids"] as Doc[]) same("key id", await keyId(bytesOf(row, "public")), row["key_id"]);
  for (const row of document["owner_slots"] as Doc[]) {
    same("owner's slots", floorShare(row["owner_share"] as number, row["n"] as number), row["owner_slots"]);
  }
}

/** Returns the problem and the check of the Refusal that something throws; nothing if it throws none. */
async function refusalOf(attempt: Promise<unknown>): Promise<[check: number, problem: string | null]> {
  try {
    await attempt;
  } catch (error) {
    if (error instanceof Refusal) return [error.check, error.slug];
    throw error;
  }
  return [0, null];
}

async function parsing(document: Doc): Promise<void> {
  for (const row of document["vectors"] as Row[]) {
    let text = row["descriptor"] as string;
    for (const [mark, part] of Object.entries((row["repeat"] ?? {}) as Record<string, { text: string; times: number }>)) {
      text = text.replaceAll(mark, part.text.repeat(part.times));
    }
    const [, problem] = await refusalOf(parseDescriptor(utf8(text)));
    same(row.name, problem, row["problem"]);
  }
}

async function refusals(document: Doc): Promise<void> {
  for (const row of document["vectors"] as Row[]) {
    const demands = demandsOf({ ...(document["owner"] as Doc), ...(row["owner"] as Doc) });
    const attempt = accept(envelopeOf(row), row["asked"] as string, demands, document["now"] as number);
    same(row.name, await refusalOf(attempt), [row["check"], row["problem"]]);
  }
}

async function counters(document: Doc): Promise<void> {
  for (const row of document["vectors"] as Row[]) {
    const sizes = row as unknown as Sizes;
    const support = row["support"] as Support | null;
    if (support !== null) checkSupport(support, sizes);
    const layout = new Layout(sizes, row["families"] as Families, row["layer"] as number | null, support);
    const sizesOf = [layout.counters, layout.width, layout.cells];
    same(row.name, sizesOf, [row["counters"], row["width"], row["cells"]]);
    for (const episode of row["episodes"] as (Episode & Doc)[]) same(row.name, layout.encode(episode), episode["indices"]);
  }
  for (const row of document["widths"] as Doc[]) {
    const layout = new Layout(row as unknown as Sizes, "joint", null, null);
    same("width", [layout.counters, layout.width], [row["counters"], row["width"]]);
  }
  return Promise.resolve();
}

/** Returns the batches of descriptors.json by name. */
async function batches(load: Load): Promise<Map<string, Batch>> {
  const rows = (JSON.parse(await load("descriptors.json")) as { vectors: Row[] }).vectors;
  const parsed = rows.map(async (row) => [row.name, await parseDescriptor(utf8(row["descriptor"] as string))] as const);
  return new Map(await Promise.all(parsed));
}

async function draws(document: Doc, load: Load): Promise<void> {
  const named = await batches(load);
  const base = named.get("messages joint all any")!.descriptor;
  for (const row of document["policies"] as Doc[]) {
    const weights = row["weights"] as number[];
    const policies = weights.map((_, i) => [[i]]);
    const word = bigEndian(row["word"] as number, 4).reverse();
    same("policy", report.drawPolicy({ ...base, policies, weights }, tape(word)), [[row["policy"]]]);
  }
  for (const row of document["rewards"] as Doc[]) {
    const range = { reward_low: row["reward_low"] as number, reward_high: row["reward_high"] as number };
    same("reward", report.drawReward({ ...base, ...range }, row["reward"] as number, tape(bytesOf(row, "word_le"))), row["bit"]);
  }
  for (const row of document["flips"] as Doc[]) {
    const batch = named.get(row["descriptor"] as string)!;
    const episode = row["states"] === null ? null : (row as unknown as Episode);
    same("flips", hex(report.contents(batch, episode, tape(bytesOf(row, "words_le")))), row["plaintext"]);
  }
  for (const row of document["overflow"] as Doc[]) {
    const [data, slots] = [row["data"] as number[], row["noise_slots"] as number];
    const kept = report.keep(row["noise"] as number[], slots, tape(bytesOf(row, "keys_le")));
    const size = (row["data_slots"] as number) + slots;
    same("overflow", report.padded(data, kept, size, row["dummy"] as number), row["indices"]);
  }
  for (const row of document["noise"] as (Doc & Noise)[]) {
    const noise: Noise = { ...row, kind: "bernoulli" };
    const ones = drawCounts(row["counters"] as number, noise, tape(bytesOf(row, "bytes")));
    same("noise", Array.from(ones), row["ones"]);
  }
}

function importPrivate(key: Bytes): Promise<CryptoKey> {
  const pkcs8 = concat(unhex("302e020100300506032b656e04220420"), key);
  return crypto.subtle.importKey("pkcs8", pkcs8, "X25519", false, ["deriveBits"]);
}

/** A source that gives the key pairs of these private keys, in their order. */
function keysFrom(privateKeys: readonly Bytes[]): KeySource {
  let used = 0;
  return async () => {
    const privateKey = await importPrivate(privateKeys[used++]!);
    const basePoint = await crypto.subtle.importKey("raw", bigEndian(9, 32).reverse(), "X25519", true, []);
    const own = await crypto.subtle.deriveBits({ name: "X25519", public: basePoint }, privateKey, 256);
    return { privateKey, publicKey: await crypto.subtle.importKey("raw", own, "X25519", true, []) };
  };
}

/** Returns the ephemeral keys of a vector's report. */
async function keysOf(name: string, count: number): Promise<KeySource> {
  const keys = Array.from({ length: count }, (_, i) => sha256(utf8(`riffle vectors: ${name} ${i}`)));
  return keysFrom(await Promise.all(keys));
}

async function reports(document: Doc, load: Load): Promise<void> {
  const named = await batches(load);
  const envelopes = JSON.parse(await load("descriptors.json")) as { vectors: Row[] };
  for (const row of document["vectors"] as Row[]) {
    const batch = named.get(row["descriptor"] as string)!;
    const envelope = envelopes.vectors.find(({ name }) => name === row["descriptor"])!;
    const data = batch.layout.encode((row["episode"] ?? { states: [], actions: [], rewards: [] }) as Episode) ?? [];
    same(`${row.name}: data`, data, row["data"]);
    const contents = contentsOf(row, batch, data);
    const target = report.sealTarget({ ...batch, batchKey: bytesOf(envelope, "batch_key"), epsilon: 0 });
    const sealed = await report.sealReport(target, contents, await keysOf(row.name, batch.messages + 1));
    same(`${row.name}: report`, hex(sealed), row["report"]);
    same(`${row.name}: size`, sealed.length, batch.reportBytes);
    const frame = report.frame(row["lease"] as string, sealed);
    same(`${row.name}: frame`, hex(frame).slice(0, (row["frame"] as string).length), row["frame"]);
  }
}

/** Returns what a vector's report says; compares it with what the core makes of data and noise. */
function contentsOf(row: Row, batch: Batch, data: number[]): Bytes {
  const { descriptor: d, layout } = batch;
  const expected = d.word_bits === null ? unhex((row["plaintexts"] as string[]).join("")) : null;
  if (d.trust === "local") return expected!; // draws.json has flips
  const noise = (row["noise"] ?? []) as number[];
  if (d.word_bits !== null) {
    const words = (row["vector"] as number[]).map((word) => bigEndian(word, d.word_bits! / 8).reverse());
    const vector = report.vectorOf(data, noise, d.word_bits / 8);
    same(`${row.name}: vector`, hex(vector), hex(concat(...words)));
    return vector;
  }
  const kept = (row["kept"] as number[] | undefined) ?? report.copies(noise);
  const size = d.trust === "central" ? layout.cells : batch.messages;
  const contents = report.plaintexts(report.padded(data, kept, size, layout.counters), layout.width);
  same(`${row.name}: plaintexts`, hex(contents), hex(expected!));
  return contents;
}

async function analyzer(document: Doc, load: Load): Promise<void> {
  const opened = document["opened"] as Doc;
  const [messages, width, C] = [bytesOf(opened, "messages"), opened["width"] as number, opened["counters"] as number];
  const histogram = new Array<number>(C + 1).fill(0);
  const failed: number[] = [];
  for (let i = 0; i * (48 + width) < messages.length; i++) {
    const message = messages.slice(i * (48 + width), (i + 1) * (48 + width));
    const plain = await open(bytesOf(opened, "private"), bytesOf(opened, "info"), message).catch(() => null);
    const index = plain === null ? C + 1 : plain.reduce((sum, byte) => 256 * sum + byte, 0);
    if (index > C) failed.push(i);
    else histogram[index]!++;
  }
  same("opened", [histogram, failed], [opened["histogram"], opened["failed"]]);
  await summed(document["sum"] as Doc, load);
}

/** Subtracts the masks of a vector's sum. A point of low order has the secret of 32 zeros. */
async function summed(row: Doc, load: Load): Promise<void> {
  const batch = (await batches(load)).get(row["descriptor"] as string)!;
  const wordBytes = batch.descriptor.word_bits! / 8;
  const keys = bytesOf(row, "keys");
  const analyzerPrivate = await importPrivate(bytesOf(row, "private"));
  let sum = bytesOf(row, "sum");
  for (let i = 0; i < keys.length; i += 32) {
    const own = keys.slice(i, i + 32);
    const point = await crypto.subtle.importKey("raw", own, "X25519", true, []);
    const agreed = await crypto.subtle.deriveBits({ name: "X25519", public: point }, analyzerPrivate, 256).catch(() => new ArrayBuffer(32));
    const mask = await maskFrom(new Uint8Array(agreed), own, batch.digest, sum.length);
    const one = bigEndian(1, wordBytes).reverse();
    const ones = concat(...Array.from({ length: sum.length / wordBytes }, () => one));
    sum = report.addWords(sum, report.addWords(mask.map((byte) => 255 - byte), ones, wordBytes), wordBytes); // minus: the two's complement
  }
  const counts = Array.from({ length: sum.length / wordBytes }, (_, i) => {
    return sum.slice(i * wordBytes, (i + 1) * wordBytes).reduceRight((total, byte) => 256 * total + byte, 0);
  });
  same("sum", counts, row["counts"]);
  same("analyzer's key", hex(analyzerKey(batch.descriptor)).length, 64);
}

async function accountant(document: Doc): Promise<void> {
  for (const row of document["vectors"] as Row[]) {
    const event = {
      noise: { kind: "bernoulli" as const, ...(row["noise"] as Omit<Noise, "kind">) },
      n: row["n"] as number,
      dishonestFraction: row["gamma"] as number,
      cells: row["cells"] as number,
      counters: row["counters"] as number,
      noiseSlots: row["noise_slots"] as number,
      wordBits: row["word_bits"] as number | null,
    };
    const [eta, wanted] = [overflow(event), row["overflow"] as number];
    holds(`${row.name}: eta ${eta}, not ${wanted}`, Math.abs(eta - wanted) <= 2e-6 * wanted || Math.max(eta, wanted) < 1e-290);
    const [lower, upper] = [row["lower"] as number, (row["upper"] ?? Infinity) as number];
    const epsilon = epsilonOf(event, row["beta"] as number, Number.isFinite(upper) ? upper : lower);
    // "The recipe lies within its stated distance of upper, also above it" (section 12.4).
    const within = epsilon >= lower && (epsilon <= upper * 1.00003 || epsilon === upper);
    holds(`${row.name}: epsilon ${epsilon}, not from ${lower} to ${upper}`, within);
  }
  return Promise.resolve();
}

async function wires(document: Doc): Promise<void> {
  const batch = "e21a33c4b8fa370fc240e76326204821";
  const requests = document["requests"] as Doc[];
  const upload = requests.find((row) => (row["target"] as string).endsWith("/reports"))!;
  const made = [
    wire.listRequest("TOKEN", 20),
    wire.descriptorRequest("TOKEN", batch),
    wire.leaseRequest("TOKEN", batch, ["11".repeat(16)]),
    wire.uploadRequest("TOKEN", batch, (upload["headers"] as Record<string, string>)["riffle-batch-key"]!, [bytesOf(upload, "body")]),
    wire.declineRequest("TOKEN", batch, "no-users"),
  ];
  const sorted = (headers: object): unknown => Object.entries(headers).sort();
  made.forEach((request, i) => {
    const row = requests[i]!;
    const got = [request.method, request.target, sorted(request.headers), hex(request.body ?? new Uint8Array())];
    same(`request ${request.target}`, got, [row["method"], row["target"], sorted(row["headers"] as object), row["body"]]);
  });
  for (const row of document["answers"] as Doc[]) {
    const problem = wire.finalProblem(row["status"] as number, row["body"] as string);
    same(`answer ${row["body"] as string}`, problem?.slug ?? null, row["final"] ?? null);
    if ("wait" in row) same("wait", wire.retryAfter((row["retry_after"] ?? null) as string | null), row["wait"]);
  }
  for (const row of document["pins"] as Doc[]) same(`pins ${row["text"] as string}`, orNull(() => wire.readPins(row["text"] as string)), row["keys"]);
  for (const row of document["lease_requests"] as Doc[]) {
    const users = new Array<string>(row["users"] as number).fill("11".repeat(16));
    same("lease request", orNull(() => wire.leaseRequest("TOKEN", batch, users)) !== null, row["valid"]);
  }
  for (const row of document["user_ids"] as Doc[]) {
    same("user id", await opaqueId(bytesOf(row, "key"), row["name"] as string), row["id"]);
  }
}

function orNull<T>(make: () => T): T | null {
  try {
    return make();
  } catch {
    return null;
  }
}
