// A policy as a picture, states down and steps across, with what changed since the policy before.
// A change has a frame and a corner mark besides its number, so no colour is needed to see it.

import { h, say, svg, table } from "./dom.js";

const CELL = 34;
const LEFT = 44;
const TOP = 24;
const STATES = 24;
const COLOURS = 6;

/** A picture of one policy (H, X), which `show(policy, before, name)` draws. */
export function policyPicture(id) {
  const holder = h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Policy picture, scrollable" });
  const sentence = h("p", { id: `${id}-text`, class: "sentence" });
  const from = h("select", { "aria-label": "States shown", onchange: () => draw() });
  const columns = [
    { name: "step", text: (row) => String(row.h) },
    { name: "state", text: (row) => String(row.x) },
    { name: "action", text: (row) => String(row.action) },
    { name: "before", text: (row) => (row.before === null ? "\u2013" : String(row.before)) },
    { name: "changed", text: (row) => (row.changed ? "yes" : "no") },
  ];
  const data = table(`${id}-table`, "Policy, one row a step and state", columns, { page: 24 });
  const details = h("details", {}, h("summary", {}, "Data table: policy"), data.element);
  const element = h("div", { id, class: "policy" }, from, holder, sentence, details);
  let shown = null;

  function draw() {
    const first = Number(from.value || 0);
    holder.replaceChildren(picture(shown, first, `${id}-text`));
  }

  return {
    element,
    show(policy, before, name) {
      const text = JSON.stringify([policy, before, name]);
      if (shown?.text === text) return;
      shown = { policy, before, text };
      offer(from, policy[0].length);
      draw();
      const rows = cells(shown).reverse();
      const changed = rows.filter((row) => row.changed).length;
      const since = before === null ? "there is none before it to compare with" : `${changed} of ${rows.length} choices changed since the one before`;
      say(sentence, `${name}: ${policy[0].length} states, ${policy.length} steps; ${since}.`);
      data.show(rows);
    },
  };
}

function offer(select, states) {
  select.hidden = states <= STATES;
  if (select.options.length === Math.ceil(states / STATES)) return;
  const starts = Array.from({ length: Math.ceil(states / STATES) }, (_, i) => i * STATES);
  const options = starts.map((x) => h("option", { value: x }, `states ${x} to ${Math.min(states, x + STATES) - 1}`));
  select.replaceChildren(...options);
}

function cells({ policy, before }) {
  return policy.flatMap((row, step) =>
    row.map((action, x) => {
      const old = before?.[step]?.[x] ?? null;
      return { h: step, x, action, before: old, changed: old !== null && old !== action };
    }),
  );
}

function picture(shown, first, described) {
  const last = Math.min(shown.policy[0].length, first + STATES);
  const width = LEFT + shown.policy.length * CELL;
  const height = TOP + (last - first) * CELL;
  const drawn = cells(shown).filter((one) => one.x >= first && one.x < last);
  const steps = shown.policy.map((_, step) => label(LEFT + (step + 0.5) * CELL, TOP - 9, "middle", `h${step}`));
  const states = Array.from({ length: last - first }, (_, i) =>
    label(LEFT - 8, TOP + (i + 0.5) * CELL + 4, "end", `x${first + i}`),
  );
  const attributes = { class: "policy-svg", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": described };
  return svg("svg", attributes, steps, states, drawn.map((one) => cell(one, one.x - first)));
}

const label = (x, y, anchor, text) => svg("text", { x, y, class: "axis", "text-anchor": anchor }, text);

function cell(one, row) {
  const x = LEFT + one.h * CELL + 1;
  const y = TOP + row * CELL + 1;
  const side = CELL - 2;
  const box = { x, y, width: side, height: side, rx: 4, class: `cell a${one.action % COLOURS}` };
  const parts = [svg("rect", box)];
  if (one.changed) {
    parts.push(svg("rect", { x: x + 1.5, y: y + 1.5, width: side - 3, height: side - 3, rx: 3, class: "changed" }));
    parts.push(svg("path", { d: `M${x + side - 11} ${y + 2}h9v9z`, class: "corner" }));
  }
  parts.push(svg("text", { x: x + side / 2, y: y + side / 2 + 5, "text-anchor": "middle", class: `action a${one.action % COLOURS}` }, String(one.action)));
  const was = one.changed ? `, was ${one.before}` : "";
  return svg("g", {}, svg("title", {}, `step ${one.h}, state ${one.x}: action ${one.action}${was}`), parts);
}
