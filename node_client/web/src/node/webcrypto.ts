import { webcrypto } from "node:crypto";

// Node.js 18 has the Web Cryptography API, but not as a global. Import this file first.
if (!("crypto" in globalThis)) Object.defineProperty(globalThis, "crypto", { value: webcrypto });
