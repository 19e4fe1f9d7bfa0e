import type { Bytes } from "./core/bytes.js";

const MOST_AT_ONCE = 65_536; // of crypto.getRandomValues

/** Returns `size` bytes of the system's cryptographic random generator. */
export function systemRandom(size: number): Bytes {
  const bytes = new Uint8Array(size);
  for (let start = 0; start < size; start += MOST_AT_ONCE) {
    crypto.getRandomValues(bytes.subarray(start, start + MOST_AT_ONCE));
  }
  return bytes;
}

/** Returns a number in [0, 1) with 53 random bits. */
export function uniform(random: (size: number) => Bytes): number {
  const words = new DataView(random(8).buffer);
  return (words.getUint32(0) * 2 ** 21 + (words.getUint32(4) >>> 11)) / 2 ** 53;
}

/** Returns a new person's id, 32 hexadecimal digits: for apps that have no ids of their own. */
export function newUser(): string {
  return Array.from(systemRandom(16), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
