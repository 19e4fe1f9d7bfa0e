// The head of a run's view: trouble, the answer, how sure it is, what to do next; stop, download.

import { ask, download } from "./api.js";
import { facts, h, say } from "./dom.js";
import { count, number, when } from "./format.js";
import { answer, nextStep } from "./state.js";

const FILES = ["stages", "ledger", "deployments", "conservation"];

/** The head of a run. */
export class Head {
  constructor(run, view) {
    this.view = view;
    this.state = h("span", { id: "run-state" });
    this.bar = h("progress", { max: run.spec.episodes, "aria-label": "Episodes counted" });
    [this.trouble, this.doubt] = ["status", "alert"].map((role) => h("p", { class: "banner", role, hidden: true }));
    [this.title, this.sure, this.next] = [h("h2", { id: "answer-title" }), h("p", { id: "sure" }), h("p", { id: "next" })];
    this.answer = h("p", { class: "answer", role: "status" });
    this.stop = h("button", { id: "stop", type: "button", class: "danger", onclick: () => this.dialog.showModal() }, "Stop run");
    this.dialog = this.question(run);
    this.facts = facts("figures");
    this.element = h(
      "section",
      { class: "head", "aria-labelledby": "run-name" },
      h("p", { class: "crumb" }, h("a", { href: "#/" }, "All runs")),
      h("div", { class: "row wide" }, h("h1", { id: "run-name" }, run.name), this.state, h("span", { class: "grow" }), this.stop),
      this.trouble,
      this.doubt,
      h("section", { id: "answer", class: "card", "aria-labelledby": "answer-title" }, this.title, this.sure, this.next, this.facts.element, this.bar),
      h("p", { class: "note about" }, about(run)),
      this.files(run),
      this.answer,
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
    const suspicious = events.deployments.filter((one) => one.suspicious).length;
    say(this.doubt, `${suspicious} of ${count(run.deployments)} batches have counts that are very unlikely from honest reports: somebody lies, or the environment does not start as declared.`);
    this.doubt.hidden = suspicious === 0;
    const found = answer({ run, result }, events);
    say(this.title, headline(run, found));
    say(this.sure, found.sure ?? `No value is known before the first ${run.spec.learner === "manual" ? "batch" : "stage"} is counted.`);
    say(this.next, `Next: ${nextStep({ run }, events, found)}`);
    this.figures(run, result, truth, found);
  }

  figures({ spec, ...run }, result, truth, found) {
    const set = (name, value, note) => this.facts.set(name, value, note);
    set("Value of the answer", number(found.value, 3), "an episode, an estimate; each reward is scaled to [0, 1]");
    set("Active policies", active(spec, run), spec.learner === "manual" ? "deployed by hand" : `after stage ${run.stage}`);
    set("Privacy spent, \u03b5", result ? number(result.epsilon) : "\u2013", `of ${number(spec.epsilon)} for each user, at \u03b2 = ${number(spec.beta)}`);
    set("Episodes counted", count(run.episodes), `${Math.floor((100 * run.episodes) / spec.episodes)} % of ${count(spec.episodes)}`);
    if (!truth?.regret.length) return;
    set("Newest deployment earns", number(truth.value.at(-1)), `${number((100 * truth.value.at(-1)) / truth.optimal_value, 3)} % of the best, ${number(truth.optimal_value)}; exact. Exploring earns less.`);
    set("Regret, exact", number(truth.regret.at(-1)), `of at most ${number(truth.optimal_value * truth.episodes.at(-1))}`);
  }
}

function headline({ state }, { value, settled }) {
  if (value === null) return state === "running" ? "No answer yet" : "No answer: the run ended too early";
  const policy = `a policy that earns an estimated ${number(value, 3)} an episode`;
  if (!settled) return `A guess, not settled: ${policy}`;
  return state === "running" ? `So far: ${policy}` : `Learned: ${policy}`;
}

function about({ id, spec, created_at, ended_at }) {
  const sizes = `${spec.states} states, ${spec.actions} actions, ${spec.horizon} steps`;
  const times = ended_at ? `${when(created_at)} to ${when(ended_at)}` : `since ${when(created_at)}`;
  return `${spec.environment} (${sizes}) \u00b7 ${spec.learner} \u00b7 trust model ${spec.trust} \u00b7 ${spec.aggregation} \u00b7 ${times} \u00b7 ${id}`;
}

/** The size of the active set; a set that is not enumerated has none. */
function active(spec, run) {
  if (spec.learner === "manual" || run.stage === 0) return "\u2013";
  return run.active === null ? "not counted" : count(run.active);
}
