/** A node's requests, and how the node reads the answers (docs/protocol.md, sections 13 and 14). */
import { type Bytes, join, utf8 } from "./bytes.js";
import { hex16 } from "./descriptor.js";
import * as json from "./json.js";
import { PROBLEMS } from "./problems.js";

/** A request. Browsers do not let a page set `accept-encoding`. */
export interface Request {
  readonly method: "GET" | "POST";
  readonly target: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Bytes | null;
}

/** Open batches with free slots; `lease_seconds` is the life of a lease granted now. */
export interface BatchList {
  readonly batches: readonly { readonly batch_id: string; readonly free_slots: number }[];
  readonly lease_seconds: number;
}

export interface Lease {
  readonly user: string;
  readonly slot: number;
  readonly lease: string;
  readonly expires_at: number;
}

export interface LeaseReply {
  readonly leases: readonly Lease[];
  readonly refused: readonly { readonly user: string; readonly problem: string }[];
}

export interface UploadResult {
  readonly lease: string;
  readonly outcome: string;
}

const MOST_USERS = 2048;
const MOST_FRAMES = 2048;
const LONGEST_WAIT = 300;
const URN = "urn:riffle:problem:";

const slug = json.text(/^[a-z-]+$/);
const batchList = json.record<BatchList>({
  batches: json.list(json.record({ batch_id: hex16, free_slots: json.integer(0) })),
  lease_seconds: json.integer(1),
});
const leaseReply = json.record<LeaseReply>({
  leases: json.list(json.record<Lease>({ user: hex16, slot: json.integer(0), lease: hex16, expires_at: json.integer(0) })),
  refused: json.list(json.record({ user: hex16, problem: slug })),
});
const uploadReply = json.record<{ results: UploadResult[] }>({
  results: json.list(json.record<UploadResult>({ lease: hex16, outcome: slug })),
});

function headersOf(token: string): Record<string, string> {
  return { authorization: `Bearer ${token}`, "accept-encoding": "identity" };
}

function get(token: string, target: string): Request {
  return { method: "GET", target, headers: headersOf(token), body: null };
}

function postJson(token: string, target: string, document: object): Request {
  const headers = { ...headersOf(token), "content-type": "application/json" };
  return { method: "POST", target, headers, body: utf8(JSON.stringify(document)) };
}

/** Asks for open batches with free slots; waits for one up to `seconds`, 0 to 30 (section 13.4). */
export function listRequest(token: string, seconds: number): Request {
  return get(token, `/v1/batches?wait=${seconds}&accepting=1`);
}

/** Asks for the envelope of a batch (section 13.5). */
export function descriptorRequest(token: string, batchId: string): Request {
  return get(token, `/v1/batches/${batchId}`);
}

/** Asks for slots for 1 to 2048 users; throws RangeError for another number (section 13.6). */
export function leaseRequest(token: string, batchId: string, users: readonly string[]): Request {
  if (users.length < 1 || users.length > MOST_USERS) throw new RangeError(`a request names 1 to ${MOST_USERS} users`);
  return postJson(token, `/v1/batches/${batchId}/leases`, { users });
}

/** Uploads 1 to 2048 frames, sealed to the batch key of this id (section 13.7). */
export function uploadRequest(token: string, batchId: string, batchKeyId: string, frames: readonly Bytes[]): Request {
  if (frames.length < 1 || frames.length > MOST_FRAMES) throw new RangeError(`an upload has 1 to ${MOST_FRAMES} frames`);
  const headers = { ...headersOf(token), "content-type": "application/octet-stream", "riffle-batch-key": batchKeyId };
  return { method: "POST", target: `/v1/batches/${batchId}/reports`, headers, body: join(frames) };
}

/** Says why the node asks nobody for an open batch (section 13.8). */
export function declineRequest(token: string, batchId: string, reason: "no-users" | "too-slow"): Request {
  return postJson(token, `/v1/batches/${batchId}/declined`, { reason });
}

/** Returns the problem of a final refusal, or null if the same request may succeed later (13.3). */
export function finalProblem(status: number, body: string): { slug: string; detail: string } | null {
  const document = documentOf(body);
  const [type, detail] = [document.get("type"), document.get("detail")];
  if (typeof type !== "string" || !type.startsWith(URN)) return null;
  const found = type.slice(URN.length);
  if (PROBLEMS.get(found) !== status || status === 408 || status === 429 || status >= 500) return null;
  return { slug: found, detail: typeof detail === "string" ? detail : "" };
}

function documentOf(body: string): Map<string, json.Json> {
  try {
    const document = json.parseJson(body);
    if (document instanceof Map) return document;
  } catch (error) {
    if (!(error instanceof json.FormError)) throw error;
  }
  return new Map();
}

/** Returns the seconds of a `Retry-After` header, at most 300; 0 without one, or if it is no number. */
export function retryAfter(header: string | null): number {
  return header !== null && /^[0-9]+$/.test(header) ? Math.min(Number(header), LONGEST_WAIT) : 0;
}

/** Reads the list of batches; throws FormError, as all readers of answers do. */
export function readBatchList(body: string): BatchList {
  return batchList(json.parseJson(body));
}

/** Reads the answer to a lease request. The answer must name each of `users` once, and only slots below n. */
export function readLeaseReply(body: string, users: readonly string[], n: number): LeaseReply {
  const reply = leaseReply(json.parseJson(body));
  const named = [...reply.leases, ...reply.refused].map(({ user }) => user).sort();
  const asked = [...new Set(users)].sort();
  if (named.join() !== asked.join()) throw new json.FormError("the answer names other users");
  if (reply.leases.some(({ slot }) => slot >= n)) throw new json.FormError("a slot is not in the batch");
  return reply;
}

/** Reads the answer to an upload, which must have one result for each frame, in the frames' order. */
export function readUploadReply(body: string, leases: readonly string[]): readonly UploadResult[] {
  const { results } = uploadReply(json.parseJson(body));
  if (results.map(({ lease }) => lease).join() !== leases.join()) throw new json.FormError("the answer names other leases");
  return results;
}

/** Reads a file of pinned public keys; throws FormError unless each line is a key (section 14). */
export function readPins(text: string): string[] {
  const lines = text.split(/\r\n|\n|\r/).map((line) => line.replace(/#.*$/, "").trim());
  const keys = lines.filter((line) => line !== "");
  if (/[^ -~\t\n\r]/.test(text) || keys.length === 0 || !keys.every((key) => /^[0-9a-f]{64}$/.test(key))) {
    throw new json.FormError("a file of pins has public keys only, 64 hexadecimal digits a line");
  }
  return keys;
}
