/** A person's episode in an app: their steps reach the analyzer, and nothing else about them does. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Refusal } from "../src/core/problems.js";
import { memoryDiary, type Diary } from "../src/diary.js";
import type { Shape } from "../src/environment.js";
import { Participant, type PersonLease } from "../src/participant.js";
import { newUser } from "../src/random.js";
import { sealHere } from "../src/sealer.js";
import { FakeShuffler } from "./fake-shuffler.js";

const SHAPE: Shape = { states: 2, actions: 2, horizon: 2, rewards: [0, 1], support: null, homogeneous: null };
const DUMMY = 32; // joint counters of all steps: 2 × 2 × 2 × 2 × 2
const EXACT = "central joint all any"; // a report of its data and dummies, without noise

function opened(shuffler: FakeShuffler, diary: Diary = memoryDiary()): Promise<Participant> {
  return Participant.open(SHAPE, { settings: shuffler.settings(), diary, seal: sealHere, outside: shuffler });
}

/** Plays an episode of states 0, 1, 1 with all rewards, some seconds a step; returns the index of each step. */
async function play(shuffler: FakeShuffler, lease: PersonLease, seconds = 22): Promise<number[]> {
  const indices: number[] = [];
  for (const [h, x] of [[0, 0], [1, 1]] as const) {
    const action = lease.act(x);
    shuffler.pass(seconds);
    await lease.record(x, 1, 1);
    indices.push((((h * 2 + x) * 2 + action) * 2 + 1) * 2 + 1);
  }
  return indices;
}

/** The indices of the one message of a report of trust `central`. */
async function indices(shuffler: FakeShuffler, user: string): Promise<number[]> {
  const messages = await shuffler.opened(user);
  assert.equal(messages.length, 1);
  return [...messages[0]!];
}

test("an episode at human pace is reported, step by step", async () => {
  const [shuffler, user] = [new FakeShuffler(EXACT), newUser()];
  const participant = await opened(shuffler);
  const lease = await participant.lease(user);
  const expected = await play(shuffler, lease);
  await lease.report();
  assert.deepEqual(await indices(shuffler, user), expected);
  const [entry] = await participant.history();
  assert.deepEqual([entry!.outcome, entry!.episode], ["accepted", null]);
  await assert.rejects(participant.lease(user), (error: Refusal) => error.slug === "user-unavailable");
  await participant.close();
});

test("who gives up sends no step", async () => {
  const [shuffler, user] = [new FakeShuffler(EXACT), newUser()];
  const participant = await opened(shuffler);
  const lease = await participant.lease(user);
  await lease.record(0, 1, 1);
  await lease.giveUp();
  assert.deepEqual(await indices(shuffler, user), [DUMMY, DUMMY]);
  await assert.rejects(lease.record(1, 1, 1), Refusal);
  await participant.close();
});

test("an episode whose time is over sends no step", async () => {
  const [shuffler, user] = [new FakeShuffler(EXACT), newUser()];
  const participant = await opened(shuffler);
  const lease = await participant.lease(user);
  await lease.record(0, 1, 1);
  await shuffler.passUntil(() => lease.isOver);
  assert.ok(shuffler.now() <= lease.participation.askedAt + shuffler.leaseSeconds);
  assert.deepEqual(await indices(shuffler, user), [DUMMY, DUMMY]);
  await participant.close();
});

test("an episode goes on after a restart, under the same policy", async () => {
  const [shuffler, user, diary] = [new FakeShuffler(EXACT), newUser(), memoryDiary()];
  const first = await opened(shuffler, diary);
  const before = await first.lease(user);
  const action = before.act(0);
  await before.record(0, 1, 1);
  await first.close();
  const second = await opened(shuffler, diary);
  const lease = await second.lease(user);
  assert.equal(lease.step, 1);
  const last = lease.act(1);
  await lease.record(1, 0, 0);
  await lease.report();
  assert.deepEqual(await indices(shuffler, user), [(action * 2 + 1) * 2 + 1, ((3 * 2 + last) * 2 + 0) * 2]);
  await second.close();
});

test("lost answers change nothing: the same bytes are sent again", async () => {
  const [shuffler, user] = [new FakeShuffler(EXACT), newUser()];
  const participant = await opened(shuffler);
  const lease = await participant.lease(user);
  const expected = await play(shuffler, lease);
  shuffler.lostAnswers = 3;
  const [sent] = await Promise.all([lease.report(), shuffler.passUntil(() => lease.isOver)]);
  assert.equal(sent, undefined);
  assert.deepEqual([shuffler.uploads, lease.participation.outcome], [4, "accepted"]);
  assert.deepEqual(await indices(shuffler, user), expected);
  await participant.close();
});

test("interleaved people do not mix, and all messages of a report open", async () => {
  const shuffler = new FakeShuffler("messages joint all any");
  const participant = await opened(shuffler);
  const users = Array.from({ length: 20 }, newUser);
  const leases = await Promise.all(users.map((user) => participant.lease(user)));
  const policies = leases.map((lease) => [lease.act(0), lease.act(1)]);
  assert.ok(new Set(policies.map((policy) => policy.join())).size > 1, "the policies of a mixture are drawn apart");
  const expected = await Promise.all(leases.map((lease) => play(shuffler, lease, 1)));
  await Promise.all(leases.map((lease) => lease.report()));
  for (const [i, user] of users.entries()) {
    const messages = await shuffler.opened(user);
    const found = messages.map((message) => message[0]);
    assert.equal(found.length, 18);
    assert.ok(expected[i]!.every((index) => found.includes(index)));
  }
  await participant.close();
});
