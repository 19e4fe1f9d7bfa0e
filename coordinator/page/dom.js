// Elements without HTML strings, which the page's policy forbids: cards, labelled lines, tables.

import { count } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const PAGE = 15;
const OPEN = ["deploy", "policy"];
const PHONE = "(max-width: 520px)";

/** An element. Properties `on...` are listeners; attributes that are null or false are left out. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an element's text only when it differs, so that nothing is announced or laid out twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A card with a heading that names it and folds it. On a phone, only the cards of `OPEN` start unfolded. */
export function card(id, title, ...children) {
  const heading = h("summary", {}, h("h2", { id: `${id}-title` }, title));
  const fold = h("details", { open: OPEN.includes(id) || !matchMedia(PHONE).matches }, heading, ...children);
  return h("section", { id, class: "card", "aria-labelledby": `${id}-title` }, fold);
}

/** A list of names, each with the elements that it names. */
export function labelled(id, lines) {
  return h("dl", { id }, Object.entries(lines).flatMap(([name, parts]) => [h("dt", {}, name), h("dd", {}, parts)]));
}

/** A table of `columns` [{ name, text(row), left }], newest rows first, a page at a time; `show(rows)`
 * draws it if a shown text changed. On a phone every row is a block, and each value has its column's name. */
export function table(id, caption, columns, { page = PAGE, empty = "Nothing yet.", onpage } = {}) {
  const body = h("tbody");
  const head = h("tr", {}, columns.map(({ name, left, title }) => h("th", { scope: "col", class: left ? "left" : null, title }, name)));
  const whole = h("table", {}, h("caption", {}, caption), h("thead", {}, head), body);
  const frame = h("div", { class: "scroll", role: "region", "aria-label": `${caption}, scrollable`, tabindex: "0" }, whole);
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
    frame.hidden = rows.length === 0;
    pager.hidden = rows.length <= page;
    newer.disabled = skipped === 0;
    older.disabled = rows.length - skipped <= page;
    say(note, `${skipped + 1} to ${skipped + found.length} of ${count(rows.length)}`);
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

function line(cells, columns) {
  const made = cells.map((text, i) =>
    h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: columns[i].left ? "left" : null, "data-name": columns[i].name }, text),
  );
  return h("tr", {}, made);
}
