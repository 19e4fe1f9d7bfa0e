// Time to seal a report, beside Python's in the same run: `node bench/seal.mjs [PYTHON]`.
// Prints ratios only: seconds say more about the machine than about the code. The processor's time counts, because
// WebCrypto works in several threads and other programs may run. Its unit is a millisecond a report.
import { spawnSync } from "node:child_process";
import { mkdir } from "node:fs/promises";
import { build } from "esbuild";

const MESSAGES = 200;
const ROUNDS = 20;
const PYTHON = `
import json, sys, time
import numpy as np
from riffle.common.protocol.hpke import KeyPair, seal, seal_indices
L, rounds = map(int, sys.argv[1:])
analyzer, batch = KeyPair.generate().public, KeyPair.generate().public
for phase in ("warm-up", "measured"):
    start = time.process_time()
    for _ in range(rounds):
        seal(batch, bytes(50), seal_indices(analyzer, bytes(50), np.arange(L), 2))
print(json.dumps(1e3 * (time.process_time() - start) / rounds))
`;

await mkdir("build", { recursive: true });
await build({ entryPoints: ["src/core/report.ts"], bundle: true, format: "esm", platform: "node", outfile: "build/report.mjs" });
const { sealReport } = await import(new URL("../build/report.mjs", import.meta.url).href);

async function publicKey() {
  const { publicKey } = await crypto.subtle.generateKey("X25519", true, ["deriveBits"]);
  return new Uint8Array(await crypto.subtle.exportKey("raw", publicKey));
}

async function ownTime() {
  const target = { analyzerKey: await publicKey(), batchKey: await publicKey(), digest: new Uint8Array(32), messages: MESSAGES, wordBytes: 0 };
  let start;
  for (let i = -ROUNDS; i < ROUNDS; i++) {
    if (i === 0) start = process.cpuUsage();
    await sealReport(target, new Uint8Array(2 * MESSAGES));
  }
  const { user, system } = process.cpuUsage(start);
  return (user + system) / 1000 / ROUNDS;
}

function pythonTime(python) {
  const child = spawnSync(python, ["-P", "-c", PYTHON, `${MESSAGES}`, `${ROUNDS}`], { encoding: "utf-8" });
  if (child.status !== 0) throw new Error(`${python} cannot import riffle: ${child.stderr}`);
  return JSON.parse(child.stdout);
}

const [own, python] = [await ownTime(), pythonTime(process.argv[2] ?? "python3")];
console.log(`Sealing a report of ${MESSAGES} messages takes ${(own / python).toFixed(1)} times the processor time that it takes in Python.`);
