// Deploys a policy by hand. The form is a table of choices, or the whole policy as JSON if the table
// would be too large to fill in.

import { ask } from "./api.js";
import { card, h, say } from "./dom.js";
import { count } from "./format.js";

const LARGEST_TABLE = 400;

/** The form of a manual run: { element, draw }. It first shows the policy that was deployed last. */
export function deployForm(run, view) {
  const { states, actions, horizon } = run.spec;
  const editor = states * horizon <= LARGEST_TABLE ? grid(states, actions, horizon) : written(states, horizon);
  const episodes = h("input", { id: "deploy-n", type: "number", min: "1", step: "1", required: true, inputmode: "numeric" });
  const answer = h("p", { role: "status", class: "answer" });
  let started = 0;
  const send = h("button", { type: "submit", class: "primary" }, "Deploy");
  const form = h(
    "form",
    { id: "deploy-form", onsubmit: submit },
    h("fieldset", {}, h("legend", {}, `Policy: an action (0 to ${actions - 1}) for every step and state`), editor.element),
    h("p", { class: "row" }, h("label", { for: "deploy-n" }, "Episodes, n"), episodes, send),
    answer,
  );

  async function submit(event) {
    event.preventDefault();
    send.disabled = true;
    answer.className = "answer";
    try {
      const body = { policy: editor.policy(), episodes: Number(episodes.value) };
      const made = await ask(`/v1/runs/${run.id}/deployments`, { method: "POST", body });
      say(answer, `Deployment ${made.index} is issued: ${made.n} episodes, ${made.messages} messages a report.`);
      view.nudge();
    } catch (error) {
      answer.className = "answer wrong";
      say(answer, `Not deployed: ${error.message}`);
    } finally {
      send.disabled = false;
    }
  }

  const element = card("deploy", "Deploy by hand", form);

  function draw({ run: { state, spec, episodes: used } }, { deployments }) {
    element.hidden = state !== "running";
    episodes.placeholder = `1 to ${count(spec.episodes - used)}`;
    if (deployments.length && !started++) view.mixture(deployments.length - 1).then(({ policies }) => editor.start(policies[0]));
  }

  return { element, draw };
}

function grid(states, actions, horizon) {
  const options = () => Array.from({ length: actions }, (_, action) => h("option", { value: action }, String(action)));
  const choices = Array.from({ length: horizon }, (_, step) =>
    Array.from({ length: states }, (_, x) => h("select", { "aria-label": `action at step ${step} in state ${x}` }, options())),
  );
  const head = h("tr", {}, h("td", {}), choices.map((_, step) => h("th", { scope: "col" }, `h${step}`)));
  const rows = Array.from({ length: states }, (_, x) =>
    h("tr", {}, h("th", { scope: "row" }, `x${x}`), choices.map((column) => h("td", {}, column[x]))),
  );
  const fills = Array.from({ length: actions }, (_, action) =>
    h("button", { type: "button", onclick: () => fill(action) }, `All ${action}`),
  );

  function fill(action) {
    for (const one of choices.flat()) one.value = String(action);
  }

  const frame = { class: "scroll", role: "region", tabindex: "0", "aria-label": "Policy editor, scrollable" };
  const whole = h("div", frame, h("table", { class: "editor" }, h("caption", { class: "unseen" }, "Actions, states down and steps across"), h("thead", {}, head), h("tbody", {}, rows)));
  return {
    element: h("div", {}, whole, actions <= 12 ? h("p", { class: "row" }, fills) : null),
    policy: () => choices.map((column) => column.map((one) => Number(one.value))),
    start: (policy) => choices.forEach((column, step) => column.forEach((one, x) => (one.value = String(policy[step][x])))),
  };
}

function written(states, horizon) {
  const hint = `A list of ${horizon} lists of ${states} actions, as JSON.`;
  const text = h("textarea", { id: "deploy-policy", rows: "8", required: true, spellcheck: "false", "aria-label": hint });
  return {
    element: h("div", {}, h("p", { class: "note" }, hint), text),
    start: (policy) => (text.value = JSON.stringify(policy)),
    policy() {
      try {
        return JSON.parse(text.value);
      } catch {
        throw new Error("the policy is not JSON");
      }
    },
  };
}
