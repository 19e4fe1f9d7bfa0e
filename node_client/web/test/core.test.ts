/** Tests of the core beyond the vectors. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { epsilonOf } from "../src/core/accountant.js";
import { type Bytes, bigEndian, concat, utf8 } from "../src/core/bytes.js";
import { convolve } from "../src/core/convolution.js";
import { barsUntil, type Descriptor, mayReport, parseDescriptor } from "../src/core/descriptor.js";
import { FormError, parseJson } from "../src/core/json.js";
import { drawReward, vectorOf } from "../src/core/report.js";
import * as wire from "../src/core/wire.js";

const [ANN, BOB, LEASE] = ["aa".repeat(16), "bb".repeat(16), "00".repeat(16)];
const VECTORS = JSON.parse(readFileSync("../../docs/vectors/descriptors.json", "utf8")) as { vectors: { descriptor: string }[] };
const TEXT = VECTORS.vectors[0]!.descriptor;

const isMalformed = (error: { slug?: string }): boolean => error.slug === "malformed";

test("a descriptor has no byte order mark, and is UTF-8", async () => {
  const data = utf8(TEXT);
  const latin: Bytes = concat(data.slice(0, 30), bigEndian(0xe9, 1), data.slice(30));
  assert.equal((await parseDescriptor(data)).messages, 18);
  await assert.rejects(parseDescriptor(concat(bigEndian(0xefbbbf, 3), data)), isMalformed);
  await assert.rejects(parseDescriptor(latin), isMalformed);
});

test("a deep text is refused, and takes no stack", () => {
  assert.throws(() => parseJson("[".repeat(1_000_000)), FormError);
  assert.throws(() => parseJson('{"a":'.repeat(1_000_000)), FormError);
});

test("a person reports once, or once in each epoch", () => {
  const forever = { epoch_seconds: null, expires_at: 1_250 } as Descriptor;
  const monthly = { epoch_seconds: 100, expires_at: 1_250 } as Descriptor; // the epoch from 1,200 to 1,300
  assert.deepEqual([barsUntil(forever), barsUntil(monthly)], [Infinity, 1_300]);
  assert.deepEqual([mayReport(0, forever), mayReport(1, forever), mayReport(Infinity, forever)], [true, false, false]);
  assert.deepEqual([mayReport(0, monthly), mayReport(1_200, monthly), mayReport(1_201, monthly)], [true, true, false]);
});

test("an answer about leases names the users asked for, each once, and slots of the batch", () => {
  const lease = (user: string, slot: number) => ({ user, slot, lease: LEASE, expires_at: 5 });
  const read = (leases: object[], refused: object[]) => wire.readLeaseReply(JSON.stringify({ leases, refused }), [ANN, BOB], 10);
  const refused = { user: BOB, problem: "late" };
  assert.equal(read([lease(BOB, 9), lease(ANN, 0)], []).leases.length, 2);
  assert.equal(read([lease(ANN, 0)], [refused]).refused[0]!.problem, "late");
  for (const wrong of [[lease(ANN, 0)], [lease(ANN, 0), lease(ANN, 1)], [lease(ANN, 0), lease(BOB, 10)]]) {
    assert.throws(() => read(wrong, []), FormError);
  }
  assert.throws(() => read([lease(ANN, 0), lease(BOB, 1)], [refused]), FormError);
});

test("an answer about an upload has a result for each frame, in order", () => {
  const body = JSON.stringify({ results: [ANN, BOB].map((lease) => ({ lease, outcome: "accepted" })) });
  assert.equal(wire.readUploadReply(body, [ANN, BOB]).length, 2);
  assert.throws(() => wire.readUploadReply(body, [BOB, ANN]), FormError);
  assert.throws(() => wire.readUploadReply(body, [ANN]), FormError);
});

test("a reward outside its range has no bit", () => {
  const d = { reward_low: 0, reward_high: 2 } as Descriptor;
  const ones = (size: number) => new Uint8Array(size).fill(255);
  assert.deepEqual([drawReward(d, 2, ones), drawReward(d, 1, ones)], [1, 0]);
  for (const reward of [-0.1, 2.1, NaN]) assert.throws(() => drawReward(d, reward, ones), RangeError);
});

test("words of a vector wrap around", () => {
  assert.deepEqual([...vectorOf([0, 0, 1], [65_535, 255], 2)], [1, 0, 0, 1]);
});

test("a convolution's error is below its bound, which is tiny", () => {
  const shape = (size: number, by: number) => Float64Array.from({ length: size }, (_, i) => Math.exp(-(((i - size / 2) / by) ** 2)) / by);
  const [a, b] = [shape(700, 60), shape(300, 20)];
  const [fast, exact] = [convolve(a, b, 1), convolve(a, b, 0)];
  const error = fast.product.reduce((most, value, i) => Math.max(most, Math.abs(value - exact.product[i]!)), 0);
  assert.ok(0 < error && error < fast.error && fast.error < 1e-14 && exact.error === 0);
  assert.deepEqual([...convolve(Float64Array.of(1, 2), Float64Array.of(3, 4, 5), 0).product], [3, 10, 13, 10]);
});

test("no batch keeps the accountant busy for long", () => {
  const noise = { kind: "bernoulli", bits: 1, p_numerator: 1, p_log2: 3 } as const;
  const event = { noise, n: 200, dishonestFraction: 0, cells: 2, counters: 32, noiseSlots: 32, wordBits: null };
  assert.ok(epsilonOf(event, 1e-5, 1e-9) > 1);
  assert.equal(epsilonOf({ ...event, n: 2 ** 32, noise: { ...noise, bits: 2 ** 28 } }, 1e-5, 1), Infinity);
  assert.ok(epsilonOf({ ...event, cells: 3000, counters: 6000, wordBits: 16 }, 1e-5, 1) > 100);
});
