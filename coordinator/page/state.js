// The state of a run, built from its events, and the answer that the run has so far. No network, no DOM.

import { count, number, when } from "./format.js";

export const OVER = { run_finished: "finished", run_failed: "failed", run_stopped: "stopped" };
const SETTLED = ["counted", "rejected", "abandoned"];

/** Returns a run before its first event. */
export function unknownRun() {
  return { last: 0, over: null, deployments: [], stages: [], counted: 0, settled: -1 };
}

const CHANGES = {
  deployment_issued(run, data, at) {
    run.deployments[data.index] = { ...data, state: "issued", issuedAt: at };
  },
  batch_sealed(run, data, at) {
    change(run, data, { state: "sealed", sealedAt: at, executed: data.episodes });
  },
  batch_counted(run, data, at) {
    run.counted += data.n;
    const { value = null, radius = null } = data;
    change(run, data, { value, radius, ...opened(data), episodes: run.counted, state: "counted", settledAt: at });
    run.settled = data.index;
  },
  batch_rejected(run, data, at) {
    change(run, data, { ...opened(data), state: "rejected", settledAt: at });
  },
  batch_abandoned(run, data, at) {
    change(run, data, { state: "abandoned", executed: data.episodes, settledAt: at });
  },
  stage_finished(run, data) {
    // The event follows the count that ended the stage, in one transaction.
    const before = run.stages.at(-1)?.policy ?? null;
    run.stages.push({ ...data, deployment: run.settled, before });
  },
};

const opened = ({ messages: total, epsilon, failed, beta, suspicious, test, deviation }) =>
  ({ total, epsilon: Number(epsilon), failed, beta, suspicious, test, deviation });

function change(run, data, values) {
  Object.assign(run.deployments[data.index], values);
}

/** Applies an event. An event that was applied before changes nothing. */
export function apply(run, event) {
  if (event.id <= run.last) return;
  run.last = event.id;
  CHANGES[event.kind]?.(run, event.data, event.at);
  if (event.kind in OVER) run.over = OVER[event.kind];
}

/** Whether a deployment's batch is settled. */
export const isSettled = (deployment) => SETTLED.includes(deployment.state);

/** The index of the first deployment from `least` on that may still change, or else of the last one. */
export function firstOpen(run, books, least) {
  const open = (_, index) => index >= least && !isSettled(books.get(index) ?? {});
  const index = run.deployments.findIndex(open);
  return index < 0 ? Math.max(0, run.deployments.length - 1) : index;
}

/** Returns the announcement of an event for screen readers, or null. */
export function spoken(event) {
  const { data } = event;
  const texts = {
    batch_counted: () => `Batch ${data.index} counted: ${data.n} reports${data.suspicious ? ", suspicious" : ""}.`,
    batch_rejected: () => `Batch ${data.index} rejected: ${data.suspicious ? "its counts are suspicious" : "too many dishonest reports"}.`,
    batch_abandoned: () => `Batch ${data.index} abandoned.`,
    stage_finished: () => `Stage ${data.stage} finished.`,
    run_finished: () => "The run is finished.",
    run_failed: () => `The run failed: ${data.message}`,
    run_stopped: () => "The run was stopped.",
  };
  return texts[event.kind]?.() ?? null;
}

const BEGUN = { finished: "Learned", failed: "Until the run failed", stopped: "Until the run was stopped" };
const NONE_YET = { running: "None yet", finished: "None: the run ended too early", failed: "None: the run failed", stopped: "None: the run was stopped" };

/** The answer of a run so far: { value, settled, title, sure }. Without an answer, value is null.
 * `inUse`: whether the newest batch runs the learned policy; `best`: the optimal value, if known;
 * `doubt`: a warning, or ""; `listed`: for the list of runs, which knows neither true values nor the shuffler's record. */
export function answer(run, { inUse = false, best = Infinity, doubt = "", listed = false }) {
  const byHand = run.spec.learner === "manual";
  const { radius } = run;
  if (run.value_estimate === null || (byHand && radius === null)) {
    const missing = run.state === "failed" ? failure(run).cause : byHand ? "no batch is counted" : "the first stage of learning is not finished";
    return { value: null, settled: false, title: NONE_YET[run.state], sure: `Not known${run.state === "running" ? " yet" : ""}, because ${missing}.` };
  }
  const value = Math.min(run.value_estimate, best);
  const settled = radius === null || radius < value;
  const began = !settled ? "A guess" : doubt ? "In doubt" : (BEGUN[run.state] ?? (inUse ? "Learned and in use" : "So far"));
  const found = { value, settled, title: `${began}: a policy that earns about ${number(value, 3)} an episode` };
  if (radius === null) return { ...found, sure: "Not known: this learner states no error." };
  const probability = `probability ${number(100 * (1 - run.spec.delta))} %`;
  const word = !settled ? "Not sure" : radius < value / 2 ? "Quite sure" : "Sure of a wide range only";
  const grade = `${word}: with ${probability}`;
  const unless = settled && doubt ? { sure: listed ? doubt : `In doubt, as the box says. Without this doubt it would be sure with ${probability}.` } : {};
  if (settled && listed && !byHand) return { ...found, title: `${began}: a policy within ${number(radius, 2)} an episode of the best`, sure: `${word}: ${probability}, if the shuffler neither lost nor added reports, which its page checks.`, ...unless };
  if (!byHand) return { ...found, ...bounded(found, radius, grade, { began, best, explores: run.state === "running" && !inUse }), ...unless };
  const [low, high] = [-1, 1].map((sign) => number(Math.max(0, value + sign * radius), 2));
  return { ...found, sure: `${grade}, it earns between ${low} and ${high}. Another policy may earn more.`, ...unless };
}

/** Title and certainty of a learner's answer. A stage bounds how far its policy is below the best one. */
function bounded({ value, settled, title }, radius, grade, { began, best, explores }) {
  const [worth, loss] = [number(value, 3), number(radius, 2)];
  const more = explores ? " The run still explores, so the policy may change." : "";
  if (!settled) return { title: `A guess: a policy that may earn up to ${loss} an episode less than the best`, sure: `${grade}, no policy earns over ${loss} more. But that is more than the guess itself seems to earn, ${worth}.${more}` };
  const known = `The best policy earns ${number(best, 3)}, as the supplied true values say.`;
  if (value === best) return { title: `${began}: a policy that earns between ${number(value - radius, 3)} and ${worth} an episode`, sure: `${grade}. ${known}${more}` };
  return { title: `${title}, at most ${loss} (${number((100 * radius) / value, 2)}\u00a0%) less than the best`, sure: `${grade}, no policy earns over ${loss} more. The ${worth} is an estimate and may be too high. ${best < Infinity ? known : ""}${more}`.trim() };
}

/** Why a run failed, and what its message asks to check. */
function failure(run) {
  const [cause, check] = run.message.split("; check ");
  return { cause, act: check ? `Check ${check}` : "Mend the cause, and choose users who have not reported yet" };
}

/** What a run's operator should do next. `last`: the newest deployment; `act`: what to do with an answer. */
export function nextStep(run, last, { value, settled }, act = "Use the policy: download it under Policy.") {
  const use = value !== null && settled ? act : "";
  if (run.state === "failed") return `${use} ${failure(run).act}, then start a new run (riffle run).${value === null ? "" : ` Cause: ${failure(run).cause}.`}`.trim();
  if (run.state !== "running") return use || `Start a new run${run.state === "stopped" ? "" : " with more episodes"} (riffle run). This one is over.`;
  if (run.trouble) return `${use} Mend this, and the run goes on by itself: ${run.trouble}.`.trim();
  if (run.spec.learner === "manual" && (!last || isSettled(last))) return `Deploy ${value === null ? "a policy" : "another policy, or this one again to be surer,"} under Deploy by hand. ${count(run.spec.episodes - run.episodes)} episodes are left.`;
  if (last?.purpose === "exploit") return `${use} The run ends by itself.`;
  const check = value === null && last?.state === "issued" ? ` If batch ${last.index} is not full by ${when(last.issuedAt + run.spec.batch_seconds)}, check that nodes run.` : "";
  return `Nothing to do: the run goes on by itself while nodes report.${check}`;
}
