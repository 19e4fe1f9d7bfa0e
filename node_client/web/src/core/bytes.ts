/** Bytes and their notations (docs/protocol.md, section 1). */

/** Bytes that own their buffer, as WebCrypto wants them. */
export type Bytes = Uint8Array<ArrayBuffer>;

/** A source of uniformly random bytes. Draws that protect people use `crypto.getRandomValues`. */
export type RandomBytes = (size: number) => Bytes;

/** Returns lower-case hexadecimal digits, two for each byte. */
export function hex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the bytes of lower-case hexadecimal digits; throws RangeError for any other text. */
export function unhex(text: string): Bytes {
  if (!/^([0-9a-f]{2})*$/.test(text)) throw new RangeError("this is not lower-case hexadecimal");
  return Uint8Array.from({ length: text.length / 2 }, (_, i) => parseInt(text.slice(2 * i, 2 * i + 2), 16));
}

/** Joins byte strings: a ‖ b. */
export function concat(...parts: readonly Uint8Array[]): Bytes {
  return join(parts);
}

/** Joins a list of byte strings. A call cannot have as many arguments as a report has messages. */
export function join(parts: readonly Uint8Array[]): Bytes {
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

/** Returns the UTF-8 encoding of a text. */
export function utf8(text: string): Bytes {
  return new TextEncoder().encode(text);
}

/** Returns a label: its ASCII text and one zero byte (section 3.2). */
export function label(text: string): Bytes {
  return utf8(`${text}\0`);
}

/** Returns BE(x, width): x as a big-endian integer. x is at most 2^53 - 1. */
export function bigEndian(x: number, width: number): Bytes {
  return littleEndian(x, width).reverse();
}

/** Returns LE(x, width): x as a little-endian integer. x is at most 2^53 - 1. */
export function littleEndian(x: number, width: number): Bytes {
  return Uint8Array.from({ length: width }, (_, i) => Math.floor(x / 256 ** i) % 256);
}

/** Returns random unsigned 32-bit integers, read from random bytes in little-endian order. */
export function randomWords(count: number, random: RandomBytes): Uint32Array {
  const view = new DataView(random(4 * count).buffer);
  return Uint32Array.from({ length: count }, (_, i) => view.getUint32(4 * i, true));
}

/** Returns whether two byte strings are equal. The time that it takes depends on them, so compare no secrets. */
export function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.length === b.length && a.every((byte, i) => byte === b[i]);
}
