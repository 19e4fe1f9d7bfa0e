// Work that is repeated while a view is shown, and the notice that the coordinator is away.

import { Away, Refused } from "./api.js";
import { h, say } from "./dom.js";

const FIRST_PAUSE = 1;
const LONGEST_PAUSE = 10;

/** Tells the reader whether the coordinator answers. */
export class Link {
  constructor(status, alert) {
    this.status = status;
    this.alert = alert;
    this.down = false;
  }

  up() {
    this.down = false;
    document.body.classList.remove("stale");
    this.alert.replaceChildren();
    say(this.status, "Connected");
  }

  away(error) {
    if (!this.down) {
      const next = "What is shown is as of before; trying again by itself.";
      this.alert.replaceChildren(h("p", { class: "banner" }, `${error.message} ${next}`));
    }
    this.down = true;
    document.body.classList.add("stale");
    say(this.status, "Not connected");
  }

  idle() {
    this.down = false;
    document.body.classList.remove("stale");
    this.alert.replaceChildren();
    say(this.status, "");
  }
}

/** Waits. Ends immediately when the reader leaves the view. */
export function sleep(seconds, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, seconds * 1000);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}

/** Waits until somebody can see the page. Ends immediately when the reader leaves the view. */
export function visible(signal) {
  if (!document.hidden || signal.aborted) return Promise.resolve();
  return new Promise((done) => {
    const stop = new AbortController();
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      stop.abort();
      done();
    };
    document.addEventListener("visibilitychange", look, { signal: stop.signal });
    signal.addEventListener("abort", look, { signal: stop.signal });
  });
}

/** Repeats `work` every `seconds` until `work` returns false or the reader leaves the view. Waits
 * longer while the coordinator is away, and does nothing while the page is hidden. */
export async function repeat(link, signal, seconds, work, refused) {
  let pause = FIRST_PAUSE;
  while (!signal.aborted) {
    await visible(signal);
    if (signal.aborted) return;
    try {
      const more = await work();
      if (signal.aborted) return;
      link.up();
      pause = FIRST_PAUSE;
      if (more === false) return;
      await sleep(seconds, signal);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (error instanceof Refused) return refused(error);
      if (!(error instanceof Away)) throw error;
      link.away(error);
      await sleep(pause, signal);
      pause = Math.min(LONGEST_PAUSE, pause * 2);
    }
  }
}
