import { hex, type Bytes } from "./core/bytes.js";
import type { AcceptedBatch } from "./core/checks.js";
import { Refusal } from "./core/problems.js";
import { frame, sealTarget } from "./core/report.js";
import type { UploadResult } from "./core/wire.js";
import type { Batches } from "./batches.js";
import { sameDigest, type ShufflerClient } from "./http.js";
import type { Sealer } from "./sealer.js";

/** A report that is not yet sealed. */
export interface Draft {
  readonly lease: string;
  readonly contents: Bytes;
}

/** The parts that deliver reports: the client of the shuffler, the batches with their keys, and the sealer. */
export interface Way {
  readonly client: ShufflerClient;
  readonly batches: Batches;
  readonly seal: Sealer;
}

/**
 * Seals and uploads reports of one batch; returns their outcomes, in order. `keep` stores the sealed reports before
 * they leave. If the batch has a new key, seals the same contents to it: the shuffler has not read the first upload.
 */
export async function deliver(
  way: Way,
  batch: AcceptedBatch,
  drafts: readonly Draft[],
  keep: (sealed: readonly Bytes[], batchKey: string) => Promise<void> = () => Promise.resolve(),
): Promise<readonly UploadResult[]> {
  try {
    return await sealAndUpload(way, batch, drafts, keep);
  } catch (error) {
    if (!(error instanceof Refusal) || error.slug !== "outdated-key") throw error;
    const renewed = await way.batches.check(batch.descriptor.batch_id);
    if (!sameDigest(batch, renewed)) throw error;
    return sealAndUpload(way, renewed, drafts, keep);
  }
}

async function sealAndUpload(
  way: Way,
  batch: AcceptedBatch,
  drafts: readonly Draft[],
  keep: (sealed: readonly Bytes[], batchKey: string) => Promise<void>,
): Promise<readonly UploadResult[]> {
  const target = sealTarget(batch);
  const sealed: Bytes[] = [];
  for (const draft of drafts) sealed.push(await way.seal(target, draft.contents));
  await keep(sealed, hex(batch.batchKey));
  return upload(way, batch, drafts, sealed);
}

/** Uploads sealed reports, and repeats this until the shuffler has decided on each report. */
export function upload(
  way: Way,
  batch: AcceptedBatch,
  drafts: readonly { readonly lease: string }[],
  sealed: readonly Bytes[],
): Promise<readonly UploadResult[]> {
  const leases = drafts.map((draft) => draft.lease);
  const frames = leases.map((lease, i) => frame(lease, sealed[i] ?? new Uint8Array()));
  return way.client.upload(batch, leases, frames);
}

/** Returns whether an outcome means that the report is stored. */
export function isStored(outcome: string): boolean {
  return outcome === "accepted" || outcome === "replayed";
}
