// The page's frame: the present view, the token, and the report of failures.

import { token } from "./api.js";
import { dropCharts } from "./chart.js";
import { h } from "./dom.js";
import { Link } from "./link.js";
import { listView } from "./list.js";
import { runView } from "./view.js";

const main = document.getElementById("main");
const leave = document.getElementById("leave");
const link = new Link(document.getElementById("connection"), document.getElementById("alert"));
let shown = null;

function show(make) {
  shown?.abort();
  shown = new AbortController();
  dropCharts();
  link.idle();
  leave.hidden = token.get() === null;
  main.replaceChildren(make({ link, signal: shown.signal, refused }));
}

function refused(error) {
  if (error.status !== 401) return show(() => missing(error));
  token.forget();
  return show(() => signIn("The coordinator refused this token. Check it and enter it again."));
}

function missing(error) {
  document.title = "Riffle";
  const back = h("a", { href: "#/" }, "All runs");
  return h("div", { class: "card" }, h("h1", {}, "Not found"), h("p", {}, error.message), h("p", {}, back));
}

function signIn(trouble) {
  document.title = "Riffle";
  const input = h("input", { id: "token", type: "password", required: true, autocomplete: "off", "aria-describedby": "token-hint" });
  const hint = "It is in the file operator/coordinator_token of the network's folder, and is kept in this tab until you close it or forget it.";
  const form = h(
    "form",
    { id: "sign-in", class: "card", onsubmit: enter },
    h("h1", {}, "Operator"),
    trouble ? h("p", { class: "banner", role: "alert" }, trouble) : null,
    h("label", { for: "token" }, "Operator's token"),
    h("p", { class: "row" }, input, h("button", { type: "submit", class: "primary" }, "Enter")),
    h("p", { id: "token-hint", class: "note" }, hint),
  );

  function enter(event) {
    event.preventDefault();
    token.set(input.value.trim());
    route();
    main.focus();
  }

  queueMicrotask(() => input.focus());
  return form;
}

function route() {
  if (token.get() === null) return show(() => signIn(null));
  const found = /^#\/runs\/([0-9a-f]{32})$/.exec(location.hash);
  if (found) return show((context) => runView(found[1], context));
  document.title = "Runs \u00b7 Riffle";
  return show(listView);
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address after # is the view
  main.focus();
});
leave.addEventListener("click", () => {
  token.forget();
  route();
});
window.addEventListener("hashchange", () => {
  route();
  main.focus();
  window.scrollTo(0, 0);
});
route();
