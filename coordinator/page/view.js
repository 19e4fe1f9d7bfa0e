// One run, live: streams the run's events, and fetches the rest of its data now and then.

import { ask, Away, events } from "./api.js";
import { h } from "./dom.js";
import { repeat, sleep, visible } from "./link.js";
import { Cards } from "./cards.js";
import { apply, firstOpen, spoken, unknownRun } from "./state.js";

const STATUS_SECONDS = 3;
const SLOW_SECONDS = 10;
const BOOKS_SECONDS = 5;
const NUDGE_SECONDS = 0.5;
const DRAW_MILLISECONDS = 250;
const SPEAK_MILLISECONDS = 4000;
const WINDOW = 60;

/** The view of a run. */
export function runView(id, { link, signal, refused }) {
  const view = new RunView(id, { link, signal, refused });
  view.start();
  return view.element;
}

class RunView {
  constructor(id, context) {
    Object.assign(this, context);
    this.path = `/v1/runs/${id}`;
    this.id = id;
    this.events = unknownRun();
    this.known = { run: null, result: null, truth: undefined, books: new Map(), deployments: new Map() };
    this.element = h("div", { id: "run" }, h("p", { class: "note", role: "status" }, "Loading the run\u2026"));
    this.cards = null;
    this.spokenAt = 0;
  }

  start() {
    this.repeat(STATUS_SECONDS, () => this.status());
    this.repeat(0, () => this.follow());
    this.repeat(SLOW_SECONDS, () => this.answers());
    this.repeat(BOOKS_SECONDS, () => this.books());
  }

  repeat(seconds, work) {
    repeat(this.link, this.signal, seconds, work, this.refused);
  }

  ask(path) {
    return ask(this.path + path, { signal: this.signal });
  }

  get over() {
    return this.known.run !== null && this.known.run.state !== "running";
  }

  // -- requests ----------------------------------------------------------------------------------

  async status() {
    const over = this.over;
    this.known.run = await this.ask("");
    this.cards ??= this.build();
    this.draw();
    return !over; // asks once more after the end
  }

  async answers() {
    const settled = this.over && this.events.over !== null;
    const [result, truth] = await Promise.all([this.ask("/result"), this.ask("/truth")]);
    Object.assign(this.known, { result, truth });
    this.draw();
    return !settled;
  }

  async books() {
    const finished = this.over && this.events.over !== null && this.events.deployments.length > 0;
    const length = this.events.deployments.length;
    const first = firstOpen(this.events, this.known.books, length - WINDOW);
    if (length) await this.booksFrom(first);
    return !finished;
  }

  async booksFrom(first) {
    const { batches } = await this.ask(`/conservation?first=${first}&limit=${WINDOW}`);
    for (const one of batches) this.known.books.set(one.deployment, one);
    this.draw();
  }

  /** Fetches missing data of the deployments that the table of batches shows. */
  wanted(rows) {
    const missing = rows.filter((row) => !this.known.books.has(row.index)).map((row) => row.index);
    if (missing.length) this.booksFrom(Math.min(...missing)).catch((error) => this.failed(error));
  }

  async mixture(index) {
    const { deployments } = this.known;
    if (!deployments.has(index)) deployments.set(index, await this.ask(`/deployments/${index}`));
    return deployments.get(index).mixture;
  }

  failed(error) {
    if (error.name !== "AbortError" && !(error instanceof Away)) this.refused(error);
  }

  // -- events ------------------------------------------------------------------------------------

  /** Takes events until the service stops, the run ends or the tab is hidden. */
  async follow() {
    const stop = new AbortController();
    const leave = () => stop.abort();
    const hide = () => document.hidden && stop.abort();
    this.signal.addEventListener("abort", leave);
    document.addEventListener("visibilitychange", hide);
    try {
      for await (const found of events(this.id, this.events.last, stop.signal)) this.take(found);
    } catch (error) {
      if (error.name !== "AbortError" || this.signal.aborted) throw error;
    } finally {
      this.signal.removeEventListener("abort", leave);
      document.removeEventListener("visibilitychange", hide);
    }
    if (this.events.over === null) await sleep(1, this.signal); // the service stopped
    return this.events.over === null;
  }

  take(found) {
    this.link.up();
    const first = this.events.last === 0;
    for (const event of found) apply(this.events, event);
    this.draw();
    if (!first) this.speak(found);
    const ended = found.some((event) => event.kind === "stage_finished");
    if (first || ended || this.events.over !== null) this.nudge();
  }

  /** Fetches everything again soon, because something changed. */
  async nudge() {
    if (this.nudged) return;
    this.nudged = true;
    await sleep(NUDGE_SECONDS, this.signal);
    await visible(this.signal);
    this.nudged = false;
    if (this.signal.aborted) return;
    for (const work of [this.status(), this.answers(), this.books()]) work.catch((error) => this.failed(error));
  }

  speak(found) {
    const texts = found.map(spoken).filter((text) => text !== null);
    const now = Date.now();
    const last = this.events.over !== null;
    if (!texts.length || (now - this.spokenAt < SPEAK_MILLISECONDS && !last)) return;
    this.spokenAt = now;
    document.getElementById("news").replaceChildren(h("p", {}, texts.at(-1)));
  }

  // -- drawing -----------------------------------------------------------------------------------

  build() {
    const cards = new Cards(this.known.run, this);
    this.element.replaceChildren(...cards.elements);
    document.title = `${this.known.run.name} \u00b7 Riffle`;
    return cards;
  }

  draw() {
    this.changed = true;
    if (this.waiting || this.cards === null) return;
    this.waiting = true;
    setTimeout(() => this.drawPart(0), this.drawn ? DRAW_MILLISECONDS : 0);
    this.drawn = true;
  }

  /** Draws one part in each frame, so that no frame is late. Starts again if something changed meanwhile. */
  drawPart(part) {
    requestAnimationFrame(() => {
      if (this.signal.aborted) return;
      if (part === 0) this.changed = false;
      this.waiting = part + 1 < this.cards.parts.length;
      this.cards.parts[part].draw(this.known, this.events);
      if (this.waiting) return this.drawPart(part + 1);
      this.cards.body.hidden = false;
      if (this.changed) this.draw();
    });
  }
}
