/**
 * A shuffler in memory with a clock of its own, which serves a batch of docs/vectors/descriptors.json.
 *
 * It has the vectors' private keys, so it opens each report down to its indices.
 */
import { readFileSync } from "node:fs";

import { type Bytes, concat, hex, unhex } from "../src/core/bytes.js";
import { open, SEALS } from "../src/core/crypto.js";
import { readSettings, type Settings } from "../src/settings.js";
import type { Outside } from "../src/http.js";
import { Unavailable } from "../src/errors.js";

interface Vectors {
  readonly now: number;
  readonly keys: Record<"coordinator" | "shuffler" | "analyzer" | "batch", { private: string; public: string }>;
  readonly vectors: readonly (Record<string, string> & { name: string; digest: string })[];
}

interface Sleeper {
  readonly until: number;
  readonly wake: () => void;
}

export class FakeShuffler implements Outside {
  readonly #vectors = JSON.parse(readFileSync("../../docs/vectors/descriptors.json", "utf8")) as Vectors;
  readonly #envelope: Vectors["vectors"][number];
  readonly #leases = new Map<string, { user: string; slot: number; lease: string; expires_at: number }>();
  #sleepers: Sleeper[] = [];
  #time = this.#vectors.now;
  /** The stored reports, by lease. */
  readonly reports = new Map<string, Bytes>();
  readonly leaseSeconds = 600;
  /** The number of uploads that are stored, but whose answers are then lost. */
  lostAnswers = 0;
  uploads = 0;

  constructor(name: string) {
    this.#envelope = this.#vectors.vectors.find((row) => row.name === name)!;
  }

  settings(): Settings {
    const { coordinator, shuffler, analyzer } = this.#vectors.keys;
    return readSettings({
      shuffler_url: "http://127.0.0.1:1",
      shuffler_id: "shuffler-1",
      shuffler_key: shuffler.public,
      coordinator_key: coordinator.public,
      analyzer_keys: [analyzer.public],
      node_token: "token",
      environment: "Example-v0",
      max_epsilon: 30,
      max_beta: 0.01,
      min_dishonest_fraction: 0.05,
      trust_models: ["shuffle", "central"],
    });
  }

  now(): number {
    return this.#time;
  }

  sleep(seconds: number, signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#sleepers.push({ until: this.#time + seconds, wake: resolve });
      const stop = () => {
        reject(new Unavailable("The node was stopped."));
      };
      if (signal?.aborted) stop();
      signal?.addEventListener("abort", stop);
    });
  }

  /** Lets time pass: everybody wakes whose time has come. */
  pass(seconds: number): void {
    this.#time += seconds;
    const due = this.#sleepers.filter(({ until }) => until <= this.#time);
    this.#sleepers = this.#sleepers.filter(({ until }) => until > this.#time);
    for (const { wake } of due) wake();
  }

  /** Lets time pass, a second at a time, until something holds. */
  async passUntil(holds: () => boolean): Promise<void> {
    for (let i = 0; !holds(); i++) {
      if (i > 2000) throw new Error("it does not come to pass");
      this.pass(1);
      await new Promise((resolve) => setTimeout(resolve, 1));
    }
  }

  async fetch(url: URL, init: RequestInit): Promise<Response> {
    const batchId = (JSON.parse(this.#envelope["descriptor"]!) as { batch_id: string }).batch_id;
    if (url.pathname === "/v1/batches") {
      return answer({ batches: [{ batch_id: batchId, free_slots: 200 }], lease_seconds: this.leaseSeconds });
    }
    if (url.pathname === `/v1/batches/${batchId}`) return answer(this.#signed());
    if (url.pathname.endsWith("/leases")) return answer(this.#lease(JSON.parse(textOf(init)) as { users: string[] }));
    if (url.pathname.endsWith("/declined")) return answer({ reason: "no-users" });
    return this.#upload(init.body as Bytes);
  }

  #signed(): object {
    const members = ["descriptor", "coordinator_signature", "batch_key", "shuffler_signature"];
    return Object.fromEntries(members.map((member) => [member, this.#envelope[member]]));
  }

  #lease({ users }: { users: string[] }): object {
    const leases = users.map((user) => {
      const slot = this.#leases.size;
      const fresh = { user, slot, lease: slot.toString(16).padStart(32, "0"), expires_at: this.#time + this.leaseSeconds };
      const lease = this.#leases.get(user) ?? fresh;
      this.#leases.set(user, lease);
      return lease;
    });
    return { leases, refused: [] };
  }

  #upload(body: Bytes): Promise<Response> {
    const lease = hex(body.slice(0, 16));
    const stored = this.reports.get(lease);
    this.uploads += 1;
    const report = body.slice(16);
    this.reports.set(lease, stored ?? report);
    if (this.lostAnswers > 0) {
      this.lostAnswers -= 1;
      return Promise.reject(new TypeError("the connection was reset"));
    }
    const isSame = stored !== undefined && hex(stored) === hex(report);
    const outcome = stored === undefined ? "accepted" : isSame ? "replayed" : "already-reported";
    return Promise.resolve(answer({ results: [{ lease, outcome }] }));
  }

  /** Opens a user's report; returns the plaintexts of its messages. */
  async opened(user: string): Promise<Bytes[]> {
    const digest = unhex(this.#envelope.digest);
    const { batch, analyzer } = this.#vectors.keys;
    const report = this.reports.get(this.#leases.get(user)!.lease)!;
    const joined = await open(unhex(batch.private), concat(SEALS.report, digest), report);
    const size = Number(this.#envelope["message_bytes"]);
    const messages = Array.from({ length: joined.length / size }, (_, i) => joined.slice(i * size, (i + 1) * size));
    return Promise.all(messages.map((message) => open(unhex(analyzer.private), concat(SEALS.message, digest), message)));
  }
}

function answer(document: object): Response {
  return new Response(JSON.stringify(document), { status: 200 });
}

function textOf(init: RequestInit): string {
  return new TextDecoder().decode(init.body as Bytes);
}
