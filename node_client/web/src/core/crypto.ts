/**
 * Hashes, signatures, seals and masks (docs/protocol.md, section 3).
 *
 * WebCrypto does the work: Ed25519, X25519, HKDF, AES. `@hpke/core` adds RFC 9180 on top of it. All
 * browsers since 2025 and Node.js since 18 have both curves, so no curve is written in JavaScript
 * here: such code would be ten times slower, and hard to keep from leaking secrets by its timing.
 */
import { Aes128Gcm, CipherSuite, DhkemX25519HkdfSha256, HkdfSha256 } from "@hpke/core";

import { bigEndian, type Bytes, concat, hex, label, sameBytes, unhex, utf8 } from "./bytes.js";

const LABELS = {
  descriptor: label("riffle v1 descriptor"),
  deposit: label("riffle v1 deposit"),
  countersign: label("riffle v1 countersign"),
  keyId: label("riffle v1 key id"),
  batchId: label("riffle v1 batch id"),
  mask: label("riffle v1 mask"),
  user: label("riffle v1 user"),
};

/** HPKE info of a message (the inner seal) and of a report (the outer seal), before the digest. */
export const SEALS = { message: label("riffle v1 message"), report: label("riffle v1 report") };

/** Bytes that a seal adds to its plaintext. */
export const SEAL_BYTES = 48;
export const KEY_BYTES = 32;

const X25519 = { name: "X25519" };
const SUITE = new CipherSuite({
  kem: new DhkemX25519HkdfSha256(),
  kdf: new HkdfSha256(),
  aead: new Aes128Gcm(),
});

/** Returns the SHA-256 of joined parts. */
export async function sha256(...parts: readonly Uint8Array[]): Promise<Bytes> {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", concat(...parts)));
}

async function shortHash(...parts: readonly Uint8Array[]): Promise<string> {
  return hex((await sha256(...parts)).subarray(0, 16));
}

/** Returns the digest of a descriptor's bytes (section 3.3). */
export function digestOf(descriptor: Bytes): Promise<Bytes> {
  return sha256(LABELS.descriptor, descriptor);
}

/** Returns the id of a public key. */
export function keyId(publicKey: Bytes): Promise<string> {
  return shortHash(LABELS.keyId, publicKey);
}

/** Returns the batch id that follows from a run and the number of a deployment. */
export function batchId(runId: string, deployment: number): Promise<string> {
  return shortHash(LABELS.batchId, unhex(runId), bigEndian(deployment, 8));
}

/** Returns the user id that hides an owner's own id under the owner's key (section 14). */
export async function opaqueId(key: Bytes, name: string): Promise<string> {
  const hmac = await crypto.subtle.importKey("raw", key, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const tag = await crypto.subtle.sign("HMAC", hmac, concat(LABELS.user, utf8(name)));
  return hex(new Uint8Array(tag, 0, 16));
}

/** Returns whether the coordinator signed a descriptor's bytes. */
export function isDeposited(key: string, signature: string, descriptor: Bytes): Promise<boolean> {
  return verifies(key, signature, concat(LABELS.deposit, descriptor));
}

/** Returns whether the shuffler signed a descriptor's digest together with the batch key. */
export function isCountersigned(key: string, signature: string, digest: Bytes, batchKey: Bytes): Promise<boolean> {
  return verifies(key, signature, concat(LABELS.countersign, digest, batchKey));
}

async function verifies(key: string, signature: string, message: Bytes): Promise<boolean> {
  const publicKey = await crypto.subtle.importKey("raw", unhex(key), "Ed25519", false, ["verify"]).catch(() => null);
  return publicKey !== null && crypto.subtle.verify("Ed25519", publicKey, unhex(signature), message);
}

/** Makes key pairs for single use. Only tests pass another source than `freshKeys`. */
export type KeySource = () => Promise<CryptoKeyPair>;

/** Returns a fresh X25519 key pair from the system's cryptographic random generator. */
export const freshKeys: KeySource = async () => (await crypto.subtle.generateKey(X25519, true, ["deriveBits"])) as CryptoKeyPair;

/** Returns whether X25519 with this public key gives zeros for every private key (section 3.5). */
export async function isLowOrder(publicKey: Bytes): Promise<boolean> {
  const { privateKey } = await freshKeys();
  const point = await importPublic(publicKey);
  const secret = await agree(privateKey, point).catch(() => new Uint8Array(KEY_BYTES));
  return sameBytes(secret, new Uint8Array(KEY_BYTES));
}

function importPublic(key: Bytes): Promise<CryptoKey> {
  return crypto.subtle.importKey("raw", key, X25519, true, []);
}

async function agree(privateKey: CryptoKey, publicKey: CryptoKey): Promise<Bytes> {
  const bits = await crypto.subtle.deriveBits({ ...X25519, public: publicKey }, privateKey, 8 * KEY_BYTES);
  return new Uint8Array(bits);
}

/**
 * Returns a function that seals plaintexts to a public key: enc ‖ ciphertext ‖ tag (section 3.4).
 *
 * `info` is the seal's label and the batch's digest. Every seal has a key pair of its own.
 */
export async function sealer(publicKey: Bytes, info: Bytes, keys: KeySource): Promise<(plaintext: Bytes) => Promise<Bytes>> {
  const recipientPublicKey = await importPublic(publicKey);
  return async (plaintext) => {
    const { enc, ct } = await SUITE.seal({ recipientPublicKey, info, ekm: await keys() }, plaintext);
    return concat(new Uint8Array(enc), new Uint8Array(ct));
  };
}

/** Opens a seal; throws if it does not open. Only tests open seals: a node never does. */
export async function open(privateKey: Bytes, info: Bytes, sealed: Bytes): Promise<Bytes> {
  const recipientKey = await SUITE.kem.deserializePrivateKey(privateKey);
  const enc = sealed.slice(0, KEY_BYTES);
  return new Uint8Array(await SUITE.open({ recipientKey, enc, info }, sealed.slice(KEY_BYTES)));
}

/** Returns the public key E of `pair`, and the mask of `size` bytes for a report of `sums` (section 8.3). */
export async function maskOf(pair: CryptoKeyPair, analyzerKey: Bytes, digest: Bytes, size: number): Promise<[Bytes, Bytes]> {
  const { privateKey, publicKey } = pair;
  const own = new Uint8Array(await crypto.subtle.exportKey("raw", publicKey));
  const secret = await agree(privateKey, await importPublic(analyzerKey));
  return [own, await maskFrom(secret, own, digest, size)];
}

/** Returns the mask that follows from a shared secret and the public key E, which is `own`. */
export async function maskFrom(secret: Bytes, own: Bytes, digest: Bytes, size: number): Promise<Bytes> {
  const material = await crypto.subtle.importKey("raw", secret, "HKDF", false, ["deriveKey"]);
  const info = concat(LABELS.mask, digest, own);
  const hkdf = { name: "HKDF", hash: "SHA-256", salt: new Uint8Array(), info };
  const key = await crypto.subtle.deriveKey(hkdf, material, { name: "AES-CTR", length: 128 }, false, ["encrypt"]);
  const counter = { name: "AES-CTR", counter: new Uint8Array(16), length: 128 };
  return new Uint8Array(await crypto.subtle.encrypt(counter, key, new Uint8Array(size)));
}
