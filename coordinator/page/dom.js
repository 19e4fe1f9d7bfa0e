// Elements without HTML strings: the page's policy forbids them.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `on...` properties are listeners, null and false attributes are left out. */
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

/** A card with a heading that names it. */
export function card(id, title, ...children) {
  const heading = h("h2", { id: `${id}-title` }, title);
  return h("section", { id, class: "card", "aria-labelledby": `${id}-title` }, heading, ...children);
}

/** A list of names and values. */
export function facts(id) {
  const list = h("dl", { id, class: "facts" });
  const values = new Map();
  return {
    element: list,
    set(name, value, note = "") {
      if (!values.has(name)) {
        const parts = [h("dd", {}), h("dd", { class: "note" })];
        list.append(h("div", {}, h("dt", {}, name), ...parts));
        values.set(name, parts);
      }
      say(values.get(name)[0], value);
      say(values.get(name)[1], note);
    },
  };
}
