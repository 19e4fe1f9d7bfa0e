/** Problems: why a batch or a request is refused (docs/problems.md). */

/** The HTTP status of every problem. */
export const PROBLEMS: ReadonlyMap<string, number> = new Map([
  ["already-reported", 409],
  ["bad-signature", 403],
  ["batch-full", 409],
  ["batch-not-ready", 409],
  ["batch-too-small", 422],
  ["budget-exceeded", 409],
  ["descriptor-conflict", 409],
  ["epoch-refused", 403],
  ["forbidden", 403],
  ["head-too-large", 431],
  ["internal", 500],
  ["invalid-spec", 422],
  ["late", 410],
  ["malformed", 400],
  ["method-not-allowed", 405],
  ["not-found", 404],
  ["outdated-key", 409],
  ["quota-exceeded", 403],
  ["reused-key", 409],
  ["share-exceeded", 409],
  ["test-entry-refused", 403],
  ["too-large", 413],
  ["too-many-requests", 429],
  ["too-slow", 408],
  ["trust-refused", 403],
  ["unauthorized", 401],
  ["unavailable", 503],
  ["unknown-batch", 404],
  ["unknown-deployment", 404],
  ["unknown-lease", 404],
  ["unknown-run", 404],
  ["user-unavailable", 409],
  ["weak-guarantee", 422],
  ["wrong-key", 422],
  ["wrong-recipient", 422],
  ["wrong-size", 422],
  ["wrong-state", 409],
]);

/** A batch or a request is refused. The message is for people; `slug` is the problem. */
export class Refusal extends Error {
  override readonly name = "Refusal";

  /** `check` is the number of the check in section 11 of docs/protocol.md, or 0. */
  constructor(
    readonly slug: string,
    message: string,
    readonly check = 0,
  ) {
    super(message);
  }
}
