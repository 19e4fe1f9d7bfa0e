import type { AcceptedBatch } from "./core/checks.js";
import { hex, type Bytes } from "./core/bytes.js";
import { keyId } from "./core/crypto.js";
import { readEnvelope, type Envelope } from "./core/descriptor.js";
import { Refusal } from "./core/problems.js";
import * as wire from "./core/wire.js";
import { Unavailable } from "./errors.js";
import { uniform, systemRandom } from "./random.js";

const MOST_BYTES = 33_554_432; // of an answer
const ATTEMPTS = 6;
const ANSWER_SECONDS = 30;
const FORBIDDEN_IN_BROWSERS = "accept-encoding"; // browsers set it themselves

/** The time and the network; tests replace them. */
export interface Outside {
  /** Seconds since 1970. */
  now(): number;
  sleep(seconds: number, signal?: AbortSignal): Promise<void>;
  fetch(url: URL, init: RequestInit): Promise<Response>;
}

export const OUTSIDE: Outside = {
  now: () => Date.now() / 1000,
  fetch: (url, init) => fetch(url, init),
  sleep: (seconds, signal) =>
    new Promise((resolve, reject) => {
      const stop = () => {
        clearTimeout(timer);
        reject(new Unavailable("The node was stopped."));
      };
      const timer = setTimeout(() => {
        signal?.removeEventListener("abort", stop);
        resolve();
      }, seconds * 1000);
      if (signal?.aborted) stop();
      else signal?.addEventListener("abort", stop, { once: true });
    }),
};

/** A temporary fault, after which the request is repeated. */
class Passing extends Error {
  readonly pause: number;

  constructor(detail: string, pause = 0) {
    super(detail);
    this.pause = pause;
  }
}

/**
 * A node's requests, with the retries of section 13.3. All methods throw Refusal for a final problem of the shuffler, and
 * Unavailable if the shuffler does not answer as it should after 6 tries.
 */
export class ShufflerClient {
  readonly #urls: readonly URL[];
  readonly #token: string;
  readonly #outside: Outside;
  #turn = 0;

  constructor(urls: readonly URL[], token: string, outside: Outside = OUTSIDE) {
    this.#urls = urls;
    this.#token = token;
    this.#outside = outside;
  }

  list(waitSeconds: number, signal?: AbortSignal): Promise<wire.BatchList> {
    const limits = { waitSeconds, ...(signal && { signal }) };
    return this.#call(wire.listRequest(this.#token, waitSeconds), wire.readBatchList, limits);
  }

  /** Returns the ids of all open batches, also of those without a free slot. */
  async openIds(): Promise<string[]> {
    const request = { ...wire.listRequest(this.#token, 0), target: "/v1/batches" };
    const { batches } = await this.#call(request, wire.readBatchList);
    return batches.map((batch) => batch.batch_id);
  }

  descriptor(batchId: string): Promise<Envelope> {
    return this.#call(wire.descriptorRequest(this.#token, batchId), readEnvelope);
  }

  lease(batch: AcceptedBatch, users: readonly string[]): Promise<wire.LeaseReply> {
    const { batch_id, n } = batch.descriptor;
    return this.#call(wire.leaseRequest(this.#token, batch_id, users), (body) => wire.readLeaseReply(body, users, n));
  }

  async decline(batchId: string, reason: "no-users" | "too-slow"): Promise<void> {
    await this.#call(wire.declineRequest(this.#token, batchId, reason), () => null);
  }

  /** Uploads frames, and repeats the same bytes until each frame has an outcome or the batch has ended. */
  async upload(batch: AcceptedBatch, leases: readonly string[], frames: readonly Bytes[]): Promise<readonly wire.UploadResult[]> {
    const { batch_id, expires_at } = batch.descriptor;
    const request = wire.uploadRequest(this.#token, batch_id, await keyId(batch.batchKey), frames);
    return this.#call(request, (body) => wire.readUploadReply(body, leases), { deadline: expires_at });
  }

  async #call<T>(request: wire.Request, read: (body: string) => T, limits: Limits = {}): Promise<T> {
    for (let retry = 0; ; retry += 1) {
      try {
        return read(await this.#try(request, limits));
      } catch (error) {
        if (limits.signal?.aborted) throw new Unavailable("The node was stopped.");
        if (error instanceof Refusal || !(error instanceof Error)) throw error;
        const most = Math.min(5, 0.2 * 2 ** Math.min(retry, 30));
        const pause = (error instanceof Passing ? error.pause : 0) + most * uniform(systemRandom);
        this.#giveUp(error.message, retry, pause, limits.deadline);
        await this.#outside.sleep(pause, limits.signal);
      }
    }
  }

  #giveUp(reason: string, retry: number, pause: number, deadline: number | undefined): void {
    if (deadline === undefined && retry + 1 >= ATTEMPTS) {
      throw new Unavailable(`The shuffler does not answer as it should (${reason}). Try again later.`);
    }
    if (deadline !== undefined && this.#outside.now() + pause >= deadline) {
      throw new Refusal("late", `The batch ended before the report arrived: ${reason}.`);
    }
  }

  /** Sends a request once, to the next address; returns the body of a 200. */
  async #try(request: wire.Request, limits: Limits): Promise<string> {
    const url = new URL(request.target, this.#urls[this.#turn % this.#urls.length]);
    const ending = new AbortController();
    const stop = () => {
      ending.abort();
    };
    limits.signal?.addEventListener("abort", stop, { once: true });
    const timer = setTimeout(stop, (ANSWER_SECONDS + (limits.waitSeconds ?? 0)) * 1000);
    try {
      const response = await this.#outside.fetch(url, { ...initOf(request), signal: ending.signal });
      const body = await boundedBody(response);
      if (response.status === 200) return body;
      const problem = wire.finalProblem(response.status, body);
      if (problem !== null) throw new Refusal(problem.slug, `The shuffler refused: ${problem.detail}`);
      const pause = wire.retryAfter(response.headers.get("retry-after"));
      throw new Passing(`it answered with status ${response.status}`, pause);
    } catch (error) {
      this.#turn += 1;
      throw ending.signal.aborted ? new Passing("it did not answer in time") : error;
    } finally {
      clearTimeout(timer);
      limits.signal?.removeEventListener("abort", stop);
    }
  }
}

interface Limits {
  readonly signal?: AbortSignal;
  readonly waitSeconds?: number;
  /** The time (seconds since 1970) after which no request is repeated. Without a deadline, 6 tries are made. */
  readonly deadline?: number;
}

function initOf(request: wire.Request): RequestInit {
  const inBrowser = typeof document !== "undefined";
  const headers = Object.entries(request.headers).filter(
    ([name]) => !inBrowser || name.toLowerCase() !== FORBIDDEN_IN_BROWSERS,
  );
  return {
    method: request.method,
    headers,
    body: request.body,
    redirect: "error",
    cache: "no-store",
    credentials: "omit",
    referrerPolicy: "no-referrer",
  };
}

async function boundedBody(response: Response): Promise<string> {
  if ((response.headers.get("content-encoding") ?? "identity") !== "identity") throw new Passing("a compressed answer");
  const reader = response.body?.getReader();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let text = "";
  for (let size = 0; reader !== undefined; ) {
    const { done, value } = (await reader.read()) as { done: boolean; value?: Uint8Array };
    if (done || value === undefined) break;
    size += value.length;
    if (size > MOST_BYTES) {
      await reader.cancel();
      throw new Passing(`its answer has more than ${MOST_BYTES} bytes`);
    }
    text += decoder.decode(value, { stream: true });
  }
  return text + decoder.decode();
}

/** Returns whether two batches have the same descriptor, whatever their batch keys. */
export function sameDigest(a: AcceptedBatch, b: AcceptedBatch): boolean {
  return hex(a.digest) === hex(b.digest);
}
