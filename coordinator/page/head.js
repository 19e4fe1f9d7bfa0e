// The head of a run's view: what it is, how far it is, stop it, download its tables.

import { ask, download } from "./api.js";
import { facts, h, say } from "./dom.js";
import { count, estimate, number, when } from "./format.js";

const FILES = ["stages", "ledger", "deployments", "conservation"];

/** The head of a run. */
export class Head {
  constructor(run, view) {
    this.view = view;
    this.state = h("span", { id: "run-state" });
    this.bar = h("progress", { max: run.spec.episodes, "aria-label": "Episodes counted" });
    this.trouble = h("p", { class: "banner", role: "status", hidden: true });
    this.answer = h("p", { class: "answer", role: "status" });
    this.stop = h("button", { id: "stop", type: "button", class: "danger", onclick: () => this.dialog.showModal() }, "Stop run");
    this.dialog = this.question(run);
    this.facts = facts("figures");
    this.element = h(
      "section",
      { class: "head", "aria-labelledby": "run-name" },
      h("p", { class: "crumb" }, h("a", { href: "#/" }, "All runs")),
      h("div", { class: "row wide" }, h("h1", { id: "run-name" }, run.name), this.state, h("span", { class: "grow" }), this.files(run), this.stop),
      h("p", { class: "note about" }, about(run)),
      this.bar,
      this.trouble,
      this.answer,
      this.facts.element,
      this.dialog,
    );
  }

  files(run) {
    const buttons = FILES.map((name) =>
      h("button", { type: "button", onclick: () => this.save(`/v1/runs/${run.id}/${name}.csv`) }, name),
    );
    return h("div", { class: "row files", role: "group", "aria-label": "Download CSV" }, h("span", { class: "note" }, "CSV"), buttons);
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

  draw({ run, result, truth }, events) {
    this.state.className = `state ${run.state}`;
    say(this.state, run.state);
    this.bar.value = run.episodes;
    this.stop.hidden = run.state !== "running";
    this.trouble.hidden = !(run.trouble || run.message);
    say(this.trouble, run.trouble ? `Waiting: ${run.trouble}` : run.message);
    this.figures(run, result, truth, events);
  }

  figures(run, result, truth, events) {
    const { spec } = run;
    const share = Math.floor((100 * run.episodes) / spec.episodes);
    const last = events.deployments.findLast((one) => one.value !== null && one.value !== undefined);
    const set = (name, value, note) => this.facts.set(name, value, note);
    set("Episodes counted", count(run.episodes), `${share} % of ${count(spec.episodes)}`);
    set("Newest value estimate", last ? estimate(last.value, last.radius) : "\u2013", last ? `batch ${last.index}, 1 \u2212 \u03b4 = ${1 - spec.delta}` : "no rewards counted yet");
    set("Active policies", active(run), spec.learner === "manual" ? "deployed by hand" : `stage ${run.stage}`);
    set("Privacy spent, \u03b5", result ? number(result.epsilon) : "\u2013", `of ${number(spec.epsilon)}, at \u03b2 = ${number(spec.beta)}`);
    set("Messages opened", result ? count(result.messages_counted) : "\u2013", result ? `${count(result.failed)} failed` : "");
    set("Policy switches", result ? count(result.policy_switches) : "\u2013", `${count(run.deployments)} deployments`);
    const known = truth?.regret.length;
    set("Regret, exact", known ? number(truth.regret.at(-1)) : "\u2013", known ? "from supplied true values" : "no true values supplied");
  }
}

function about({ id, spec, created_at, ended_at }) {
  const sizes = `${spec.states} states, ${spec.actions} actions, ${spec.horizon} steps`;
  const times = ended_at ? `${when(created_at)} to ${when(ended_at)}` : `since ${when(created_at)}`;
  return `${spec.environment} (${sizes}) \u00b7 ${spec.learner} \u00b7 trust model ${spec.trust} \u00b7 ${spec.aggregation} \u00b7 ${times} \u00b7 ${id}`;
}

/** The size of the active set; a set that is not enumerated has none. */
function active(run) {
  if (run.spec.learner === "manual" || run.stage === 0) return "\u2013";
  return run.active === null ? "not counted" : count(run.active);
}
