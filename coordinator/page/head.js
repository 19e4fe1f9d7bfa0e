// The head of a run's view: the answer, how sure it is, what to do next, and buttons to stop and download.

import { ask, download } from "./api.js";
import { h, labelled, say } from "./dom.js";
import { count, many, number, when } from "./format.js";
import { answer, nextStep } from "./state.js";

const FILES = ["stages", "ledger", "deployments", "conservation"];

/** The head of a run. */
export class Head {
  constructor(run, view) {
    this.view = view;
    this.state = h("span", { id: "run-state" });
    this.bar = h("progress", { max: run.spec.episodes, "aria-label": "Share of the run\u2019s episodes counted" });
    this.doubt = h("p", { class: "banner", role: "alert", hidden: true });
    [this.title, this.sure, this.next] = [h("h2", { id: "answer-title" }), h("p", { id: "sure" }), h("p", { id: "next", role: "status" })];
    this.answer = h("p", { class: "answer", role: "status" });
    this.stop = h("button", { id: "stop", type: "button", class: "danger", onclick: () => this.dialog.showModal() }, "Stop run");
    this.dialog = this.question(run);
    [this.privacy, this.episodes] = [h("p"), h("p")];
    this.element = h(
      "section",
      { class: "head", "aria-labelledby": "run-name" },
      h("div", { class: "row wide" }, h("a", { class: "crumb", href: "#/" }, "All runs"), h("h1", { id: "run-name" }, run.name), this.state, h("span", { class: "grow" }), this.stop),
      h("section", { id: "answer", class: "card", "aria-labelledby": "answer-title" }, labelled(null, { Answer: this.title, "How sure": [this.sure, this.doubt], Next: this.next })),
      labelled("figures", { Privacy: this.privacy, Episodes: [this.episodes, this.bar] }),
      this.dialog,
    );
    this.foot = h("section", { "aria-label": "About this run" }, this.files(run), this.answer, h("p", { class: "note about" }, about(run)));
  }

  files(run) {
    const buttons = FILES.map((name) =>
      h("button", { type: "button", onclick: () => this.save(`/v1/runs/${run.id}/${name}.csv`) }, name),
    );
    return h("div", { class: "row files", role: "group", "aria-label": "Download CSV" }, h("span", { class: "note" }, "Download as CSV"), buttons);
  }

  async save(path) {
    say(this.answer, "");
    try {
      await download(path);
    } catch (error) {
      say(this.answer, `Not downloaded: ${error.message}`);
    }
  }

  question(run) {
    const keep = h("button", { type: "button", onclick: () => this.dialog.close() }, "Keep it running");
    const stop = h("button", { type: "button", class: "danger", id: "stop-really", onclick: () => this.stopped(run) }, "Stop it");
    return h(
      "dialog",
      { "aria-labelledby": "stop-title", "aria-describedby": "stop-text" },
      h("h2", { id: "stop-title" }, `Stop ${run.name}?`),
      h("p", { id: "stop-text" }, "Its open batch is given up, and the users who reported to it cannot report again. A batch that is full is still counted. A stopped run cannot go on."),
      h("p", { class: "row" }, keep, stop),
    );
  }

  async stopped(run) {
    this.dialog.close();
    try {
      await ask(`/v1/runs/${run.id}/stop`, { method: "POST" });
      say(this.answer, "The run is stopped.");
    } catch (error) {
      say(this.answer, `Not stopped: ${error.message}`);
    }
    this.view.nudge();
  }

  draw({ run, result, truth, books }, { deployments }) {
    this.state.className = `state ${run.state}`;
    say(this.state, run.state);
    this.bar.value = run.episodes;
    this.stop.hidden = run.state !== "running";
    const last = deployments.at(-1);
    const [doubt, act] = doubts(deployments, [...books.values()], result);
    const found = answer(run, { inUse: last?.purpose === "exploit", best: truth?.regret.length ? truth.optimal_value : Infinity, doubt });
    say(this.title, found.title);
    say(this.sure, found.sure);
    say(this.doubt, doubt);
    this.doubt.hidden = !doubt;
    say(this.next, nextStep(run, last, found, act));
    const { epsilon, beta, episodes } = run.spec;
    say(this.privacy, `Promised to every user: at most \u03b5 = ${number(epsilon)} (\u03b2 = ${number(beta).replace("-", "\u2212")}), and no second report. Spent by each user who reported: ${result ? `\u03b5 = ${number(result.epsilon)}` : "loading"}.`);
    say(this.episodes, `${count(run.episodes)} of ${count(episodes)} counted (${Math.floor((100 * run.episodes) / episodes)} %).`);
  }
}

/** Returns why the answer is in doubt (or ""), and what to do before the answer is used. */
function doubts(deployments, books, result) {
  const suspicious = deployments.filter((one) => one.suspicious).length;
  const missing = books.filter((book) => book.trouble).length;
  const lies = `This holds only if reports are honest. ${many(suspicious, "batch", "batches")} of ${count(deployments.length)} with counts that are very unlikely from honest reports: somebody lies, or the environment does not start as declared.`;
  const unchecked = `This holds only if the shuffler neither lost nor added reports. This page cannot check that: the shuffler\u2019s record is missing for ${missing === books.length ? "all" : `${count(missing)} of the`} ${many(books.length, "batch", "batches")} that were looked at (of ${count(deployments.length)}).`;
  const beyond = `Some users spent more than the privacy budget${result?.epsilon === "Infinity" ? ": seeded noise, or noise that nobody can rely on, has no bound" : ""}.`;
  const acts = [suspicious && "Find out who sent the suspicious counts (see Batches) before you use the policy.", missing && "Ask the shuffler\u2019s operator for the missing records. Without them, use the policy only if you trust that operator."];
  return [[suspicious && lies, missing && unchecked, result?.within_budget === false && beyond].filter(Boolean).join(" "), acts.find(Boolean)];
}

function about({ id, spec, created_at, ended_at }) {
  const sizes = `${spec.states} states, ${spec.actions} actions, ${spec.horizon} steps`;
  const times = ended_at ? `${when(created_at)} to ${when(ended_at)}` : `since ${when(created_at)}`;
  return `${spec.environment} (${sizes}) \u00b7 ${spec.learner} \u00b7 trust model ${spec.trust} \u00b7 ${spec.aggregation} \u00b7 ${times} \u00b7 ${id}`;
}
