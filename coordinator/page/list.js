// All runs, newest first.

import { ask } from "./api.js";
import { h, say } from "./dom.js";
import { count, number, when } from "./format.js";
import { repeat } from "./link.js";

const SECONDS = 3;
const NAMES = ["Run", "State", "Environment", "Learner", "Episodes counted", "\u03b5", "Started"];

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
    const shown = runs.filter((run) => words.every((word) => searched(run).includes(word)));
    none.hidden = shown.length > 0;
    frame.hidden = !none.hidden;
    none.replaceChildren(...(runs.length ? [h("p", {}, "No run matches.")] : welcome()));
    say(found, `${shown.length} of ${runs.length} runs`);
    const lines = shown.map((run) => row(rows, run));
    const same = lines.length === body.children.length && lines.every((line, i) => body.children[i] === line);
    if (!same) body.replaceChildren(...lines); // left alone otherwise, so that focus stays
  }

  repeat(link, signal, SECONDS, async () => {
    runs = (await ask("/v1/runs", { signal })).runs.reverse();
    draw();
  }, refused);
  return element;
}

const searched = (run) => `${run.name} ${run.spec.environment} ${run.spec.learner} ${run.state} ${run.id}`.toLowerCase();

function welcome() {
  return [
    h("p", {}, "There are no runs yet. Create one with ", h("code", {}, "riffle run"), " or by ", h("code", {}, "POST /v1/runs"), ". It appears here by itself."),
  ];
}

/** A run's row, made once and then kept up to date. */
function row(rows, run) {
  if (!rows.has(run.id)) rows.set(run.id, newRow(run));
  const { line, state, progress, bar } = rows.get(run.id);
  state.className = `state ${run.state}`;
  say(state, run.trouble ? `${run.state}, waiting` : run.state);
  say(progress, `${count(run.episodes)} of ${count(run.spec.episodes)}`);
  bar.value = run.episodes;
  return line;
}

function newRow(run) {
  const state = h("span", {});
  const progress = h("span", {});
  const bar = h("progress", { max: run.spec.episodes, "aria-label": `episodes counted of ${run.name}` });
  const link = h("a", { href: `#/runs/${run.id}` }, run.name);
  const line = h(
    "tr",
    {},
    h("th", { scope: "row", class: "left" }, link, h("span", { class: "note id" }, run.id.slice(0, 8))),
    [[state], [run.spec.environment], [run.spec.learner], [bar, progress], [number(run.spec.epsilon)], [when(run.created_at)]].map(
      (parts, i) => h("td", { class: "left", "data-name": NAMES[i + 1] }, parts),
    ),
  );
  return { line, state, progress, bar };
}
