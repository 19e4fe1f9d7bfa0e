// Tables that scroll inside their own frame, newest rows first, a page at a time.

import { h, say } from "./dom.js";

const PAGE = 15;

/** A table of `columns` [{ name, text(row), left }]; `show(rows)` draws it where it changed. */
export function table(id, caption, columns, { page = PAGE, empty = "Nothing yet.", onpage } = {}) {
  const body = h("tbody");
  const head = h("tr", {}, columns.map((one) => header(one)));
  const whole = h("table", {}, h("caption", {}, caption), h("thead", {}, head), body);
  const label = { role: "region", "aria-label": `${caption}, scrollable`, tabindex: "0" };
  const frame = h("div", { class: "scroll", ...label }, whole);
  const note = h("span", { class: "note" });
  const older = h("button", { type: "button", onclick: () => turn(1) }, "Older");
  const newer = h("button", { type: "button", onclick: () => turn(-1) }, "Newer");
  const pager = h("p", { class: "pager" }, newer, older, note);
  const none = h("p", { class: "empty" }, empty);
  const element = h("div", { id, class: "table" }, none, frame, pager);
  let rows = [];
  let skipped = 0;
  let drawn = null;

  function turn(by) {
    skipped = Math.max(0, skipped + by * page);
    onpage?.(shown());
    draw();
  }

  function shown() {
    const end = Math.max(0, rows.length - skipped);
    return rows.slice(Math.max(0, end - page), end).reverse();
  }

  function draw() {
    const found = shown().map((row) => columns.map((one) => one.text(row)));
    none.hidden = rows.length > 0;
    frame.hidden = !none.hidden ? true : false;
    pager.hidden = rows.length <= page;
    newer.disabled = skipped === 0;
    older.disabled = rows.length - skipped <= page;
    say(note, `${found.length} of ${rows.length}`);
    const text = JSON.stringify(found);
    if (text === drawn) return;
    drawn = text;
    body.replaceChildren(...found.map((cells) => line(cells, columns)));
  }

  return {
    element,
    show(found) {
      rows = found;
      draw();
    },
    shown,
  };
}

function header({ name, left, title }) {
  return h("th", { scope: "col", class: left ? "left" : null, title }, name);
}

function line(cells, columns) {
  const made = cells.map((text, i) =>
    h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: columns[i].left ? "left" : null }, text),
  );
  return h("tr", {}, made);
}
