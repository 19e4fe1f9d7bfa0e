// Cards about batches: where every message went, and how fast.

import { chart } from "./chart.js";
import { card, h, say, table } from "./dom.js";
import { count, many, number } from "./format.js";

/** Shows where every report and message of a batch went. */
export class BatchesCard {
  constructor(view) {
    this.view = view;
    this.fill = h("meter", { min: "0", max: "10", "aria-label": "Fill of the open batch, in tenths" });
    this.filled = h("p", { class: "sentence", role: "status" });
    this.open = h("div", { class: "row open" }, this.fill, this.filled);
    this.sums = h("p", { class: "sentence" });
    const sent = (row) => row.book?.shuffler ?? {};
    this.table = table("batches-table", "Batches, newest first. Opened and failed count messages, the other columns reports", [
      { name: "batch", text: (row) => String(row.index) },
      { name: "stage", text: (row) => `${row.stage} ${row.purpose}`, left: true },
      { name: "state", text: (row) => row.state, left: true },
      { name: "n", text: (row) => count(row.n) },
      { name: "accepted", text: (row) => count(sent(row).accepted) },
      { name: "forwarded", text: (row) => count(sent(row).forwarded) },
      { name: "opened", text: (row) => count(row.book?.opened) },
      { name: "failed", text: (row) => count(row.book?.failed) },
      { name: "\u03b5 spent", text: (row) => number(row.epsilon) },
      { name: "counts", text: plausibility, left: true },
      { name: "balanced", text: balance, left: true },
    ], { empty: "Nothing is deployed yet.", onpage: (rows) => view.wanted(rows) });
    const note = "Balanced: accepted = forwarded + held + dropped at the shuffler, and opened + failed = n L here. Only the shuffler\u2019s operator sees refusals and the reports of a short batch. Every user is in one batch of all runs, so a user spends the largest \u03b5, not the sum.";
    this.element = card("batches", "Batches", this.open, this.table.element, this.sums, h("p", { class: "note" }, note));
  }

  draw({ books }, { deployments }) {
    const rows = deployments.map((one) => ({ ...one, book: books.get(one.index) }));
    this.table.show(rows);
    this.meter(rows.findLast((row) => row.state === "issued"));
    const found = rows.filter((row) => row.book && (row.state !== "issued" || row.book.balanced === false)).map((row) => row.book);
    const known = found.filter((book) => book.balanced !== null);
    const wrong = known.filter((book) => !book.balanced).length;
    const troubles = found.filter((book) => book.trouble);
    const about = known.length ? `${many(known.length, "batch", "batches")} checked, ${wrong || "none"} out of balance.` : "No batch could be checked.";
    say(this.sums, troubles.length ? `${about} ${troubles.length} without the shuffler\u2019s record: ${troubles.at(-1).trouble}` : about);
    this.sums.hidden = found.length === 0;
  }

  meter(row) {
    this.open.hidden = !row;
    if (!row) return;
    const tenths = row.book?.shuffler?.fill_tenths;
    const told = tenths !== null && tenths !== undefined;
    this.fill.hidden = !told;
    if (told) this.fill.value = tenths;
    say(this.filled, told ? `Batch ${row.index}, for ${many(row.n, "report")}: ${tenths ? `at least ${tenths} tenths` : "less than a tenth"} full.` : `Batch ${row.index}, for ${many(row.n, "report")}, is filling; how far is not shown.`);
  }
}

function plausibility({ suspicious, test, deviation }) {
  if (suspicious === undefined) return "\u2013";
  return suspicious ? `SUSPICIOUS: ${test} off by ${number(deviation, 3)} sd` : "plausible";
}

function balance({ book, state }) {
  if (!book) return "\u2013";
  if (state === "issued" && book.balanced !== false) return "not yet"; // its counts are not known yet
  if (book.balanced === null) return "not known";
  return book.balanced ? "yes" : "NO";
}

/** Shows messages a second, from issue to count, and where the time went. */
export class SpeedCard {
  constructor() {
    this.rate = chart("rate-chart", "Messages a second, from issue to count", {
      x: "batch",
      y: "messages a second",
      whole: true,
      series: [{ name: "messages/s", colour: "--c1", width: 2 }],
    });
    this.times = table("times-table", "Where the time went, all batches", [
      { name: "step", text: ([name]) => name, left: true },
      { name: "seconds", text: ([, value]) => number(value, 3) },
    ]);
    this.work = h("p", { class: "sentence" });
    this.element = card("speed", "Throughput", this.work, h("div", { class: "trio" }, this.rate.element, this.times.element));
  }

  draw({ result }, { deployments }) {
    say(this.work, `${count(result?.messages_counted)} messages opened, ${count(result?.failed)} failed.`);
    const rows = deployments.filter((one) => one.state === "counted" && one.settledAt > one.issuedAt);
    this.rate.element.hidden = rows.length === 0;
    const rate = (one) => one.total / (one.settledAt - one.issuedAt);
    if (rows.length) this.rate.show([rows.map((one) => one.index), rows.map(rate)], `Newest batch: ${number(rate(rows.at(-1)), 3)} messages/s.`);
    const times = Object.entries(result?.timings ?? {});
    this.times.element.hidden = times.length === 0;
    this.times.show(times.reverse());
  }
}
