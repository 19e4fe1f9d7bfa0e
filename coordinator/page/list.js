// All runs, newest first.

import { ask } from "./api.js";
import { h, say } from "./dom.js";
import { count, many, when } from "./format.js";
import { repeat } from "./link.js";
import { answer, nextStep } from "./state.js";

const SECONDS = 3;
const NAMES = ["Run", "Episodes counted", "Answer", "How sure", "Next"];

/** The view of all runs. */
export function listView({ link, signal, refused }) {
  const search = h("input", { id: "filter", type: "search", placeholder: "name, environment, learner or state", oninput: () => draw() });
  const found = h("p", { class: "note", role: "status" });
  const body = h("tbody");
  const head = h("thead", {}, h("tr", {}, NAMES.map((name) => h("th", { scope: "col", class: "left" }, name))));
  const whole = h("table", { class: "runs" }, h("caption", { class: "unseen" }, "Runs, newest first"), head, body);
  const frame = h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Runs, scrollable" }, whole);
  const none = h("div", { class: "card empty", hidden: true });
  const bar = h("p", { class: "row" }, h("label", { for: "filter" }, "Find"), search, found);
  const element = h("div", { id: "list" }, h("h1", {}, "Runs"), bar, none, frame);
  const rows = new Map();
  let runs = null;

  function draw() {
    if (runs === null) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => words.every((word) => `${run.name} ${run.spec.environment} ${run.spec.learner} ${run.state} ${run.id}`.toLowerCase().includes(word)));
    none.hidden = shown.length > 0;
    frame.hidden = !none.hidden;
    none.replaceChildren(...(runs.length ? ["No run matches."] : ["There are no runs yet. Create one with ", h("code", {}, "riffle run"), " or by ", h("code", {}, "POST /v1/runs"), ". It appears here by itself."]));
    say(found, `${shown.length} of ${runs.length} runs`);
    const lines = shown.map((run) => row(rows, run));
    const same = lines.length === body.children.length && lines.every((line, i) => body.children[i] === line);
    if (!same) body.replaceChildren(...lines); // otherwise the rows stay, and so does the focus
  }

  repeat(link, signal, SECONDS, async () => {
    runs = (await ask("/v1/runs", { signal })).runs.reverse();
    draw();
  }, refused);
  return element;
}

/** A run's row, made once and then kept up to date. */
function row(rows, run) {
  if (!rows.has(run.id)) rows.set(run.id, newRow(run));
  const { line, state, progress, title, sure, next, bar } = rows.get(run.id);
  const doubt = run.suspicious_batches ? `In doubt: ${many(run.suspicious_batches, "batch has", "batches have")} suspicious counts.` : "";
  const found = answer(run, { listed: true, doubt });
  state.className = `state ${run.state}`;
  say(state, run.trouble ? `${run.state}, waiting` : run.state);
  say(progress, `${count(run.episodes)} of ${count(run.spec.episodes)}`);
  say(title, found.title);
  say(sure, found.sure);
  say(next, nextStep(run, undefined, found, doubt ? "Open the run: its page says what to do about the suspicious counts." : "Open the run: its page has the policy."));
  bar.value = run.episodes;
  return line;
}

function newRow(run) {
  const [state, progress, title, sure, next] = Array.from({ length: 5 }, () => h("span", {}));
  const bar = h("progress", { max: run.spec.episodes, "aria-label": `episodes counted of ${run.name}` });
  const link = h("a", { href: `#/runs/${run.id}` }, run.name);
  const about = h("p", { class: "note" }, `${run.spec.environment}, ${run.spec.learner}, ${when(run.created_at)}`);
  const cells = [[h("div", {}, progress, bar)], [title], [sure], [next]].map((parts, i) => h("td", { class: "left", "data-name": NAMES[i + 1] }, parts));
  return { line: h("tr", {}, h("th", { scope: "row", class: "left" }, link, " ", state, about), cells), state, progress, title, sure, next, bar };
}
