// A chart with its data table beside it. The picture is for eyes and is hidden from screen readers;
// a sentence and the table say the same. Arrow keys move the cursor when the figure has the focus.
// With fewer than three points, or only flat lines, there is no picture: the sentence says enough.

import uPlot from "./vendor/uPlot.esm.js";
import { h, say, table } from "./dom.js";
import { brief, isKnown, number } from "./format.js";

const HEIGHT = 240;
const FEW = 40;
const FONT = "11px system-ui, sans-serif";
const LIMIT = 1000;
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

/** A chart of `series` [{ name, colour, dash, width, dots, step, hidden }] over one x. `x` and `y`
 * name the axes. `bands` lists [upper series, lower series, colour]. `show(columns, sentence, limit)`
 * draws the chart: columns[0] is x, and y goes from zero to the largest value, but at most to `limit`.
 * A chart in a folded card is drawn when the card is opened. */
export function chart(id, title, { x, y, series, bands = [], whole = false, whiskers = null }) {
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
  let limit = Infinity;
  new ResizeObserver(() => draw()).observe(holder);

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
    const known = parts.filter(([, value]) => isKnown(value));
    return say(readout, known.map(([name, value]) => `${name} ${number(value)}`).join(" \u00b7 "));
  }

  const span = (_, __, high) => [0, 1.06 * (Math.min(high ?? 1, limit) || 1)];

  function draw() {
    if (!holder.clientWidth || !all[0].length) return;
    const drawn = (dots) => all.slice(1).filter((_, i) => Boolean(series[i].dots) === dots);
    const kept = thinned(drawn(false), drawn(true));
    const shown = all.map((column) => kept.map((i) => column[i]));
    holder.dataset.points = kept.length;
    if (plot === null) {
      plot = new uPlot(settings({ x, y, series, bands, whole, whiskers, width: holder.clientWidth, read, span }), shown, holder);
      charts.add(plot);
      return;
    }
    if (plot.width !== holder.clientWidth) plot.setSize({ width: holder.clientWidth, height: HEIGHT });
    plot.setData(shown);
  }

  return {
    element,
    show(found, text, largest = Infinity) {
      all = found;
      limit = largest;
      say(sentence, text);
      const telling = all[0].length > 2 && all.slice(1).some((line) => new Set(line.filter(isKnown)).size > 1);
      keys.hidden = figure.hidden = readout.hidden = !telling;
      marks.forEach((mark, i) => mark && (mark.hidden = !all[i + 1].some(isKnown)));
      draw();
      if (details.open) fillTable();
    },
  };
}

function key(one) {
  const mark = h("span", { class: `mark ${one.colour.slice(2)} ${one.dots ? "dots" : one.dash ? (one.dash[0] > 2 ? "dash" : "dotted") : ""}` });
  return one.hidden ? null : h("li", {}, mark, one.name);
}

function settings({ x, y, series, bands, whole, whiskers, width, read, span }) {
  const axis = {
    stroke: () => colour("--soft"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
    ...{ font: FONT, labelFont: FONT, labelSize: 18, labelGap: 0 },
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: span } },
    axes: [
      { ...axis, label: x, values: briefly, space: 64, size: 28, incrs: whole ? WHOLE : undefined },
      { ...axis, label: y, values: briefly, size: 52 },
    ],
    series: [{}, ...series.map(line)],
    bands: bands.map(([high, low, name]) => ({ series: [high, low], fill: () => colour(name) })),
    hooks: { setCursor: [read], draw: whiskers ? [(plot) => drawWhiskers(plot, whiskers)] : [] },
  };
}

const briefly = (_, ticks) => ticks.map((value) => (value === null ? "" : brief(value)));

/** If there are few points, draws the radius of each: a line from series 2 to series 3. */
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
      ? { show: true, size: 5, fill: () => colour(one.colour), stroke: () => colour(one.colour) }
      : { show: (_, __, from, to) => !one.hidden && to - from < FEW, size: 4 },
  };
}

/** Returns the indices, in order, of at most `LIMIT` points of `lines` and `dots`, lists of equal
 * length with nulls for missing values. Keeps the first and the last point, the smallest and
 * largest value of every line in every stretch, and all dots if they are not too many. */
export function thinned(lines, dots = []) {
  const { length } = lines[0] ?? dots[0];
  if (length <= LIMIT) return Array.from({ length }, (_, i) => i);
  const spots = new Set(dots.flatMap(known));
  if (2 * spots.size > LIMIT) return thinned([...lines, ...dots]);
  const room = LIMIT - 2 - spots.size;
  for (let stretches = Math.floor(room / 2); ; stretches = Math.floor(0.8 * stretches)) {
    const kept = new Set([0, length - 1, ...spots]);
    for (const line of lines) addExtremes(kept, line, stretches);
    if (kept.size <= LIMIT) return [...kept].sort((a, b) => a - b); // true once stretches <= room / (2 lines.length)
  }
}

const known = (line) => line.flatMap((value, i) => (isKnown(value) ? [i] : []));

function addExtremes(kept, line, stretches) {
  const size = line.length / stretches;
  for (let part = 0; part < stretches; part += 1) {
    let low = -1;
    let high = -1;
    for (let i = Math.floor(part * size); i < Math.floor((part + 1) * size); i += 1) {
      if (!isKnown(line[i])) continue;
      if (low < 0 || line[i] < line[low]) low = i;
      if (high < 0 || line[i] > line[high]) high = i;
    }
    if (low >= 0) kept.add(low).add(high);
  }
}
