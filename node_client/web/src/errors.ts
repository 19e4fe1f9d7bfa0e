import { Refusal } from "./core/problems.js";

/** The shuffler cannot be reached, or has no room now. Nothing was decided: try again later. */
export class Unavailable extends Error {
  override name = "Unavailable";
}

/** The settings or the environment are not usable; the message names the member. */
export class InvalidSettings extends Error {
  override name = "InvalidSettings";
}

/** The reasons why the shuffler takes no person or no report, in words for this person. */
const REASONS: Readonly<Record<string, string>> = {
  late: "the batch is over, or the time for this report is",
  "batch-full": "the batch is full",
  "share-exceeded": "this owner's nodes hold their share of the batch",
  "quota-exceeded": "this node was enrolled for fewer people",
  "user-unavailable": "this person has already taken part",
  "already-reported": "this person has already reported",
  "unknown-lease": "the shuffler does not know this node's place in the batch",
  "wrong-key": "the shuffler could not open the report",
  "reused-key": "the report used a key a second time",
  "outdated-key": "the batch has another key than the report that was kept",
  unauthorized: "the shuffler does not accept this node's token",
};

/** Returns the error for the shuffler's refusal of one person or report. */
export function refusal(slug: string): Refusal {
  return new Refusal(slug, `The shuffler refused: ${REASONS[slug] ?? slug}.`);
}
