// The state of a run, built from its events. No network and no DOM here.

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
    const outcome = { total: data.messages, failed: data.failed, dishonest: data.dishonest };
    const spent = { epsilon: Number(data.epsilon), beta: data.beta };
    const { suspicious, test, deviation } = data;
    const known = { value, radius, ...outcome, ...spent, suspicious, test, deviation, episodes: run.counted };
    change(run, data, { ...known, state: "counted", settledAt: at });
    run.settled = data.index;
  },
  batch_rejected(run, data, at) {
    const outcome = { total: data.messages, failed: data.failed, dishonest: data.dishonest };
    const spent = { epsilon: Number(data.epsilon), beta: data.beta };
    const { suspicious, test, deviation } = data;
    change(run, data, { ...outcome, ...spent, suspicious, test, deviation, state: "rejected", settledAt: at });
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
