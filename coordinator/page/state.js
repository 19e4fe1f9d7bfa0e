// The state of a run, built from its events, and what it says so far. No network and no DOM here.

import { count, isKnown, number } from "./format.js";

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

/** Apply an event; one that was seen before changes nothing. */
export function apply(run, event) {
  if (event.id <= run.last) return;
  run.last = event.id;
  CHANGES[event.kind]?.(run, event.data, event.at);
  if (event.kind in OVER) run.over = OVER[event.kind];
}

/** Whether a deployment's batch is settled. */
export const isSettled = (deployment) => SETTLED.includes(deployment.state);

/** The first deployment, from `least` on, whose record may still change; else the last. */
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

/** The answer of a run so far: { value, radius, settled, sure }; value is null before the first. The
 * radius is that of the last stage (SDP-PE), or of the batch that measured the answer. */
export function answer({ run, result }, { deployments, stages }) {
  const confidence = `${number(100 * (1 - run.spec.delta))} % confidence`;
  const stage = stages.at(-1);
  if (stage) {
    const sure = `With ${confidence}, no policy is better by more than ${number(stage.radius, 2)}. The estimate of its value is less sure.`;
    return found(stage.best_value, stage.radius, sure);
  }
  if (!result?.policy || run.stage === 0) return { value: null };
  const value = result.value_estimate;
  const measured = deployments.findLast((one) => one.value === value);
  const newest = measured ?? deployments.findLast((one) => isKnown(one.value));
  if (!newest) return found(value, Infinity, "This learner states no error, and no batch has measured a value.");
  const [low, high] = [-1, 1].map((sign) => number(Math.max(0, newest.value + sign * newest.radius), 2));
  const range = `between ${low} and ${high} (${confidence})`;
  const sure = measured
    ? `Batch ${newest.index} measured it: ${range}. Other policies may be better.`
    : `This learner states no error. The newest measured batch, ${newest.index}, earned ${range}.`;
  return found(value, newest.radius, sure);
}

const found = (value, radius, sure) => ({ value, radius, sure, settled: radius < value });

const ENDED = {
  failed: "Remove the cause above and start a new run: a failed run cannot go on, and its users cannot report again.",
  stopped: "Start a new run to learn more: a stopped run cannot go on.",
};

/** What the operator of a run does next. */
export function nextStep({ run }, { deployments }, { value, settled }) {
  if (run.state in ENDED) return ENDED[run.state];
  if (run.state === "finished") return settled ? "Use the policy below." : "Run again with more episodes: the error is as large as the value.";
  if (run.trouble) return "Remove the cause above; the run then goes on by itself.";
  if (run.spec.learner !== "manual") return value === null ? "Wait for the first stage: the run goes on by itself while nodes report." : "Wait: the run goes on by itself while nodes report.";
  const last = deployments.at(-1);
  if (last && !isSettled(last)) return `Wait: batch ${last.index} is filling or being counted.`;
  return `Deploy a policy below: ${count(run.spec.episodes - run.episodes)} episodes are left.`;
}
