/** The API for programs in Node.js, beside the public API. */
import "./webcrypto.js";

export { opaqueId } from "../core/crypto.js";
export { fileDiary } from "./diary.js";
