// The REST routes, with the operator's token. The token stays in this tab's session storage and in
// the Authorization header: never in an address, never on disk.

import { OVER } from "./state.js";

const KEY = "riffle-operator-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The coordinator answered with a problem document. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? `status ${status}`);
    this.status = status;
  }
}

/** The coordinator does not answer, or answers that it cannot serve the request now. */
export class Away extends Error {}

async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      signal,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers: { Authorization: `Bearer ${token.get()}`, ...headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Away("The coordinator does not answer.");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  if (answer.status >= 500) throw new Away(problem.detail ?? `status ${answer.status}`);
  throw new Refused(answer.status, problem);
}

/** Returns the JSON that a route answers. */
export async function ask(path, options) {
  return (await call(path, options)).json();
}

/** Saves a route's answer as a file. */
export async function download(path) {
  const answer = await call(path);
  const named = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") ?? "");
  save(await answer.blob(), named ? named[1] : "riffle.csv");
}

/** Saves a blob as a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Yields lists of a run's events after number `last`: first past events, then new events as they
 * come. Reads the stream itself, because an EventSource cannot send the Authorization header. */
export async function* events(run, last, signal) {
  const past = await ask(`/v1/runs/${run}/history?after=${last}`, { signal });
  if (past.events.length) {
    last = past.events.at(-1).id;
    yield past.events;
    if (past.events.at(-1).kind in OVER) return;
  }
  const headers = { "Last-Event-ID": String(last) };
  const answer = await call(`/v1/runs/${run}/events`, { headers, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await read(reader);
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    const found = blocks.map(parsed).filter((event) => event !== null);
    if (found.length) yield found;
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Away("The connection to the coordinator broke.");
  }
}

function parsed(block) {
  const fields = {};
  for (const line of block.split("\n")) {
    const end = line.indexOf(":");
    if (end > 0) fields[line.slice(0, end)] = line.slice(end + 1).trim();
  }
  if (fields.data === undefined) return null;
  const { at, ...data } = JSON.parse(fields.data);
  return { id: Number(fields.id), kind: fields.event, at, data };
}
