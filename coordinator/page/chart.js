// A chart with its data table beside it. The picture is for eyes and is hidden from screen readers;
// a sentence and the table say the same. Arrow keys move the cursor when the figure has the focus.

import uPlot from "./vendor/uPlot.esm.js";
import { h, say } from "./dom.js";
import { brief, number } from "./format.js";
import { table } from "./table.js";
import { thinned } from "./thin.js";

const HEIGHT = 220;
const FEW = 40;
const WHOLE = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
const charts = new Set();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const one of charts) one.redraw(false);
});

/** Drops the charts of the view that the reader left. */
export function dropCharts() {
  for (const one of charts) one.destroy();
  charts.clear();
}

/** A chart of `series` [{ name, colour, dash, width, dots, step, quiet }] over one x; `bands` pairs
 * series (upper, lower, colour). Quiet series do not stretch the y axis. `show(columns, sentence)`
 * draws it: columns[0] is x. */
export function chart(id, title, { x, series, bands = [], log = false, whole = false, whiskers = null }) {
  const holder = h("div", { class: "plot", "aria-hidden": "true" });
  const sentence = h("p", { id: `${id}-text`, class: "sentence" });
  const readout = h("output", { class: "readout" });
  const named = [x, ...series.map((one) => one.name)];
  const columns = named.map((name, i) => ({ name, text: (row) => number(row[i]) }));
  const data = table(`${id}-table`, title, columns);
  const marks = series.map(key);
  const keys = h("ul", { class: "keys", "aria-hidden": "true" }, marks);
  const figure = h(
    "div",
    { class: "figure", tabindex: "0", role: "group", "aria-label": title, "aria-describedby": sentence.id, onkeydown: move },
    holder,
  );
  const details = h("details", {}, h("summary", {}, `Data table: ${title}`), data.element);
  const element = h("div", { id, class: "chart" }, keys, figure, readout, sentence, details);
  let plot = null;
  let all = named.map(() => []);

  details.addEventListener("toggle", () => details.open && fillTable());

  function fillTable() {
    data.show(all[0].map((_, i) => all.map((column) => column[i])));
  }

  function move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !plot || event.target !== figure) return;
    event.preventDefault();
    const length = plot.data[0].length;
    const index = Math.min(length - 1, Math.max(0, (plot.cursor.idx ?? (step > 0 ? -1 : length)) + step));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: 10 });
    read(plot);
  }

  function read(found) {
    const index = found.cursor.idx;
    if (index === null || index === undefined) return say(readout, "");
    const parts = named.map((name, i) => [name, found.data[i][index]]);
    const known = parts.filter(([, value]) => value !== null && value !== undefined);
    return say(readout, known.map(([name, value]) => `${name} ${number(value)}`).join(" \u00b7 "));
  }

  function make(columnsShown) {
    const options = settings({ series, bands, log, whole, whiskers, width: holder.clientWidth, read });
    plot = new uPlot(options, columnsShown, holder);
    charts.add(plot);
    new ResizeObserver(() => holder.clientWidth && plot.setSize(size(holder))).observe(holder);
  }

  return {
    element,
    show(found, text) {
      all = found;
      say(sentence, text);
      marks.forEach((mark, i) => mark && (mark.hidden = all[i + 1].every((value) => value === null)));
      if (!holder.clientWidth) return;
      const drawn = (dots) => all.slice(1).filter((_, i) => Boolean(series[i].dots) === dots);
      const kept = thinned(drawn(false), drawn(true));
      const shown = all.map((column) => kept.map((i) => column[i]));
      holder.dataset.points = kept.length;
      if (plot === null) make(shown);
      else plot.setData(shown);
      if (details.open) fillTable();
    },
  };
}

const size = (holder) => ({ width: holder.clientWidth, height: HEIGHT });

function key(one) {
  const mark = h("span", { class: `mark ${one.colour.slice(2)} ${one.dots ? "dots" : one.dash ? "dash" : ""}` });
  return one.hidden ? null : h("li", {}, mark, one.name);
}

function settings({ series, bands, log, whole, whiskers, width, read }) {
  const axis = {
    stroke: () => colour("--soft"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (plot) => span(plot, series) } },
    axes: [
      { ...axis, values: briefly, space: 64, size: 28, incrs: whole ? WHOLE : undefined },
      { ...axis, values: briefly, size: 52 },
    ],
    series: [{}, ...series.map(line)],
    bands: bands.map(([high, low, name]) => ({ series: [high, low], fill: () => colour(name) })),
    hooks: { setCursor: [read], draw: whiskers ? [(plot) => drawWhiskers(plot, whiskers)] : [] },
  };
}

const briefly = (_, ticks) => ticks.map((value) => (value === null ? "" : brief(value)));

/** Draws each point's radius (series 2 to 3) if there are few points. */
function drawWhiskers(plot, name) {
  if (plot.data[0].length > FEW) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = colour(name);
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  plot.data[0].forEach((x, i) => {
    if (plot.data[2][i] === null) return;
    const at = plot.valToPos(x, "x", true);
    ctx.moveTo(at, plot.valToPos(plot.data[2][i], "y", true));
    ctx.lineTo(at, plot.valToPos(plot.data[3][i], "y", true));
  });
  ctx.stroke();
  ctx.restore();
}

function line(one) {
  return {
    label: one.name,
    stroke: () => (one.hidden ? "transparent" : colour(one.colour)),
    width: one.dots ? 0 : (one.width ?? 1.75),
    dash: one.dash,
    spanGaps: true,
    paths: one.step ? uPlot.paths.stepped({ align: -1 }) : undefined,
    points: one.dots
      ? { show: true, size: 8, fill: () => colour(one.colour), stroke: () => colour(one.colour) }
      : { show: (_, __, from, to) => !one.hidden && to - from < FEW, size: 4 },
  };
}

/** The range of y: all values of the series that are not quiet, with some room above. */
function span(plot, series) {
  let low = 0;
  let high = -Infinity;
  series.forEach((one, i) => {
    if (one.quiet) return;
    for (const value of plot.data[i + 1]) {
      if (value === null || value === undefined) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  });
  if (high <= low) high = low + 1;
  return [low, high + (high - low) * 0.12];
}
