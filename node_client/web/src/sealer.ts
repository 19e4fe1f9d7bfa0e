import type { Bytes } from "./core/bytes.js";
import { sealReport, type SealTarget } from "./core/report.js";

/** Seals the contents of one report. */
export type Sealer = (target: SealTarget, contents: Bytes) => Promise<Bytes>;

/** A message to the worker. `SealAnswer` is its answer. */
export interface SealOrder {
  readonly id: number;
  readonly target: SealTarget;
  readonly contents: Bytes;
}

export type SealAnswer = { readonly id: number; readonly report: Bytes } | { readonly id: number; readonly fault: string };

/** Seals without a worker: Node.js does the work in its own thread pool. */
export const sealHere: Sealer = (target, contents) => sealReport(target, contents);

/** Returns a sealer that runs in a Web Worker, so that a page stays quick. `url` is the address of `worker.js`. */
export function workerSealer(url: URL = new URL("./worker.js", import.meta.url)): Sealer {
  const worker = new Worker(url, { type: "module" });
  const waiting = new Map<number, { resolve: (report: Bytes) => void; reject: (error: Error) => void }>();
  let count = 0;
  worker.onmessage = ({ data }: MessageEvent<SealAnswer>) => {
    const order = waiting.get(data.id);
    waiting.delete(data.id);
    if ("report" in data) order?.resolve(data.report);
    else order?.reject(new Error(data.fault));
  };
  worker.onerror = () => {
    for (const order of waiting.values()) order.reject(new Error("the worker that seals reports cannot be started"));
    waiting.clear();
  };
  return (target, contents) =>
    new Promise((resolve, reject) => {
      count += 1;
      waiting.set(count, { resolve, reject });
      worker.postMessage({ id: count, target, contents } satisfies SealOrder);
    });
}
