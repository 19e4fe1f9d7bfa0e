// The cards of a run's view. Each card draws one part of the run's state.

import { save } from "./api.js";
import { chart } from "./chart.js";
import { BatchesCard, SpeedCard } from "./batches.js";
import { deployForm } from "./deploy.js";
import { card, h, say, table } from "./dom.js";
import { count, estimate, isKnown, number } from "./format.js";
import { Head } from "./head.js";
import { policyPicture } from "./policy.js";

/** All cards of a run. */
export class Cards {
  constructor(run, view) {
    this.head = new Head(run, view);
    this.cards = [
      new PolicyCard(run, view),
      new ValueCard(run),
      new TruthCard(),
      new StagesCard(run),
      new BatchesCard(view),
      new SpeedCard(),
    ];
    const [policy, value, truth, stages, batches, speed] = this.cards.map((one) => one.element);
    this.form = run.spec.learner === "manual" && run.state === "running" ? deployForm(run, view) : { draw() {} };
    const left = h("div", { class: "stack" }, policy, value);
    const right = h("div", { class: "stack" }, this.form.element, truth);
    this.parts = [this.head, this.form, ...this.cards];
    this.body = h("div", { class: "cards", hidden: true }, left, right, stages, batches, speed); // until it is drawn
    this.elements = [this.head.element, this.body, this.head.foot];
  }
}

class ValueCard {
  constructor(run) {
    this.most = run.spec.horizon;
    this.chart = chart("value-chart", "Value of what was deployed, by episodes counted", {
      x: "episodes counted",
      y: "reward an episode",
      series: [
        { name: "private estimate", colour: "--c1", width: 2 },
        { name: "estimate \u2212 radius", colour: "--c1", hidden: true },
        { name: "estimate + radius", colour: "--c1", hidden: true },
        { name: "stage's best", colour: "--c2", dots: true },
        { name: "true value (supplied)", colour: "--c3", width: 3 },
      ],
      bands: [[3, 2, "--c1-soft"]],
      whiskers: "--c1",
    });
    this.none = h("p", { class: "empty" }, "No batch with rewards is counted yet.");
    const note = "Estimated from private counts alone, also of batches that only explore; the band is the estimate\u2019s radius, cut at the possible values.";
    this.element = card("value", "Value", this.none, this.chart.element, h("p", { class: "note" }, note));
  }

  draw({ truth }, events) {
    const stages = new Map(events.stages.map((stage) => [stage.deployment, stage]));
    const exact = new Map((truth?.deployments ?? []).map((index, i) => [index, truth.value[i]]));
    const rows = events.deployments.filter((one) => one.episodes !== undefined && (one.value !== null || stages.has(one.index)));
    this.none.hidden = rows.length > 0;
    this.chart.element.hidden = rows.length === 0;
    if (!rows.length) return;
    const near = (one, sign) => (one.value === null ? null : one.value + sign * one.radius);
    const columns = [
      rows.map((one) => one.episodes),
      rows.map((one) => one.value),
      rows.map((one) => near(one, -1)),
      rows.map((one) => near(one, 1)),
      rows.map((one) => stages.get(one.index)?.best_value ?? null),
      rows.map((one) => exact.get(one.index) ?? null),
    ];
    const last = rows.findLast((one) => one.value !== null) ?? rows.at(-1);
    this.chart.show(columns, `After ${count(last.episodes)} episodes: the newest measured batch earns ${estimate(last.value, last.radius)}.`, this.most);
  }
}

class TruthCard {
  constructor() {
    const band = (name) => [
      { name, colour: "--c3", width: 2 },
      { name: "mean over runs", colour: "--c4", dash: [6, 4] },
      { name: "mean, low", colour: "--c4", hidden: true },
      { name: "mean, high", colour: "--c4", hidden: true },
    ];
    const bands = [[4, 3, "--c4-soft"]];
    const best = { name: "optimal value V*", colour: "--c2", dash: [2, 3] };
    this.regret = chart("regret-chart", "Cumulative regret, by episodes executed", { x: "episodes executed", y: "reward lost", series: [...band("regret of this run"), { name: "ceiling, V* K", colour: "--c2", dash: [2, 3] }], bands });
    this.value = chart("truth-chart", "True value of what was deployed, by episodes executed", { x: "episodes executed", y: "reward an episode", series: [...band("value in this run").map((one) => ({ ...one, step: true })), best], bands });
    this.none = h("p", { class: "empty" }, "Loading");
    this.note = h("p", { class: "note" });
    this.drawn = undefined;
    this.element = card("truth", "Regret and true value (simulated)", this.none, this.regret.element, this.value.element, this.note);
  }

  draw({ truth }) {
    if (truth === this.drawn) return;
    this.drawn = truth;
    const some = truth !== null && truth.regret.length > 0;
    say(this.none, "No true values. The operator of a simulated environment can supply them (riffle up and riffle run do). The coordinator does not know them.");
    this.none.hidden = some;
    for (const one of [this.regret.element, this.value.element, this.note]) one.hidden = !some;
    if (!some) return;
    const { bands } = truth;
    const x = bands ? union(truth.episodes, bands.episodes) : truth.episodes;
    const most = truth.optimal_value * truth.episodes.at(-1);
    const spread = (kind, at) => ["mean", "low", "high"].map((end) => (bands ? at(bands.episodes, bands[kind][end], x) : x.map(() => null)));
    this.regret.show([x, linear(truth.episodes, truth.regret, x), ...spread("regret", linear), x.map((at) => at * truth.optimal_value)], `After ${count(truth.episodes.at(-1))} episodes: regret ${number(truth.regret.at(-1))} of at most ${number(most)}.`, most);
    this.value.show([x, stepped(truth.episodes, truth.value, x), ...spread("value", stepped), x.map(() => truth.optimal_value)], `Newest deployment: ${number(truth.value.at(-1))} of at most ${number(truth.optimal_value)}.`, truth.optimal_value);
    const over = bands ? `Band: ${100 * bands.confidence} % Student t interval of the mean over ${bands.runs} runs of the same spec, cut at the possible values.` : "One run of this spec: no band.";
    say(this.note, `Supplied by the operator of the simulated environment, exact, and read by no learner. ${over}`);
  }
}

/** Sorted union of two sorted lists. */
function union(one, other) {
  return [...new Set([...one, ...other])].sort((a, b) => a - b);
}

/** Values at `x` of the line through (0, 0) and the points (xs, ys); null beyond the last point. */
function linear(xs, ys, x) {
  let i = 0;
  return x.map((at) => {
    while (i < xs.length && xs[i] < at) i += 1;
    if (i === xs.length) return null;
    const [x0, y0] = i === 0 ? [0, 0] : [xs[i - 1], ys[i - 1]];
    return y0 + ((ys[i] - y0) * (at - x0)) / (xs[i] - x0);
  });
}

/** For each of `x`, the y of the first point at or after it; null beyond the last point. */
function stepped(xs, ys, x) {
  let i = 0;
  return x.map((at) => {
    while (i < xs.length && xs[i] < at) i += 1;
    return i === xs.length ? null : ys[i];
  });
}

class StagesCard {
  constructor(run) {
    const size = (value) => (value === null || value === undefined ? "not counted" : count(value));
    this.table = table("stages-table", "Stages, newest first. The best value is an estimate, often too high. No policy earns over a radius more", [
      { name: "stage", text: (one) => count(one.stage) },
      { name: "episodes", text: (one) => count(one.episodes) },
      { name: `ruled out, of ${run.spec.horizon * run.spec.states * run.spec.actions} choices`, text: (one) => count(one.decisions_eliminated), title: "choices (step, state, action) that no active policy takes" },
      { name: "left", text: (one) => size(one.active_after) },
      { name: "best value", text: (one) => number(one.best_value, 3) },
      { name: "radius", text: (one) => number(one.radius, 2), title: "a policy this far below the best is dropped" },
    ], { empty: run.spec.learner === "manual" ? "A run by hand has no stages." : "No stage is finished yet.", page: 8 });
    this.left = h("p", { class: "sentence" });
    this.element = card("stages", "Stages", this.left, this.table.element);
  }

  draw(_, { stages }) {
    this.table.show(stages);
    const last = stages.at(-1);
    this.left.hidden = !last;
    if (last) say(this.left, isKnown(last.active_after) ? `After stage ${last.stage}: ${count(last.active_after)} of ${count(stages[0].active_before)} policies are left.` : "The active set is not enumerated: its size is not counted.");
  }
}

const [BEST, SO_FAR] = [" (best)", " (best so far)"];

class PolicyCard {
  constructor(run, view) {
    this.view = view;
    this.picture = policyPicture("policy-picture");
    this.choice = h("select", { id: "policy-of", onchange: () => this.chosen() });
    this.none = h("p", { class: "empty" }, "Nothing is deployed yet.");
    const row = h("p", { class: "row" }, h("label", { for: "policy-of" }, "Policy of"), this.choice, h("button", { type: "button", onclick: () => save(new Blob([JSON.stringify(this.policy)]), `${run.id.slice(0, 8)}-policy.json`) }, "Download the policy"));
    const legend = h("p", { class: "note" }, "Rows are states x, columns are steps h, numbers are actions. A frame with a corner mark shows a change since the policy before.");
    this.tried = h("p", { class: "sentence" }, "A policy to try, not an answer.");
    this.shown = h("div", {}, this.tried, row, this.picture.element, legend);
    this.element = card("policy", "Policy", this.none, this.shown);
    this.events = null;
    this.options = "";
    this.touched = false;
  }

  draw({ run }, events) {
    this.events = events;
    this.tried.hidden = run.stage > 0;
    const last = events.stages.length - 1;
    const mark = run.state === "running" ? SO_FAR : BEST;
    const stages = events.stages.map((one, i) => [`s${i}`, `stage ${one.stage}${i === last ? mark : ""}`]).reverse();
    const best = events.stages.length ? null : run.value_estimate;
    const deployed = events.deployments.slice(-40).map((one) => [`d${one.index}`, `deployment ${one.index}${isKnown(best) && one.value === best ? mark : ""}`]).reverse();
    const options = [...stages, ...deployed];
    this.none.hidden = options.length > 0;
    this.shown.hidden = options.length === 0;
    const text = JSON.stringify(options);
    if (text === this.options) return;
    this.options = text;
    const kept = this.touched ? this.choice.value : (options.find(([, name]) => name.endsWith(mark)) ?? options[0])?.[0];
    if (!options.length) return;
    this.choice.replaceChildren(...options.map(([value, name]) => h("option", { value }, name)));
    if (options.some(([value]) => value === kept)) this.choice.value = kept;
    this.update();
  }

  chosen() {
    this.touched = true;
    this.update();
  }

  update() {
    const index = Number(this.choice.value.slice(1));
    if (this.choice.value[0] === "d") return this.deployed(index).catch((error) => this.view.failed(error));
    const { stage, policy, before } = this.events.stages[index];
    return this.show(policy, before, `Stage ${stage}, best policy`);
  }

  /** Shows the likeliest policy of a deployment, and what changed since the previous deployment. */
  async deployed(index) {
    const [now, before] = await Promise.all([this.view.mixture(index), index > 0 ? this.view.mixture(index - 1) : null]);
    if (this.choice.value !== `d${index}`) return;
    const [policy, share] = likeliest(now);
    const name = now.weights.length > 1 ? `Deployment ${index}, likeliest of ${now.weights.length} policies (probability ${number(share, 3)})` : `Deployment ${index}`;
    this.show(policy, before ? likeliest(before)[0] : null, name);
  }

  show(policy, before, name) {
    this.policy = policy;
    this.picture.show(policy, before, name);
  }
}

function likeliest({ policies, probabilities }) {
  const share = Math.max(...probabilities);
  return [policies[probabilities.indexOf(share)], share];
}
