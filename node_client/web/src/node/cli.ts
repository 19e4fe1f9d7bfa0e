import "./webcrypto.js";

import { readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";

import { unhex } from "../core/bytes.js";
import { Refusal } from "../core/problems.js";
import { opaqueId } from "../core/crypto.js";
import { TabularEnvironment } from "../environment.js";
import { InvalidSettings, Unavailable } from "../errors.js";
import { sealHere } from "../sealer.js";
import { serve } from "../serve.js";
import { readSettings } from "../settings.js";
import { fileDiary } from "./diary.js";

const USAGE = `usage: riffle-node --settings FILE [--state FOLDER]

Serves batches with the people and the environment that FILE names, until SIGTERM or SIGINT.
FILE has the members of "Trying a node" in docs/protocol.md. The default FILE is that of the
environment variable RIFFLE_CONFORMANCE. FOLDER keeps the list of people who were asked; the
default is the folder "riffle-node" beside FILE. For a private certificate authority, set
NODE_EXTRA_CA_CERTS to its PEM file.`;

interface Files {
  readonly users_file: string;
  readonly users_key_file?: string;
  readonly environment_parameters: { readonly path: string };
}

async function readJson(path: string): Promise<unknown> {
  try {
    return JSON.parse(await readFile(path, "utf8"));
  } catch (error) {
    throw new InvalidSettings(`${path}: ${error instanceof Error ? error.message : "unreadable"}`);
  }
}

/** Returns the ids of the people of all listed nodes, hidden under the owner's key if there is one. */
async function readUsers(files: Files): Promise<string[]> {
  const users = Object.values((await readJson(files.users_file)) as Record<string, string[]>).flat();
  if (files.users_key_file === undefined) return users;
  const key = unhex((await readFile(files.users_key_file, "utf8")).trim());
  return Promise.all(users.map((user) => opaqueId(key, user)));
}

async function main(): Promise<void> {
  const options = { settings: { type: "string" }, state: { type: "string" }, help: { type: "boolean" } } as const;
  const { values } = parseArgs({ options });
  const file = values.settings ?? process.env["RIFFLE_CONFORMANCE"];
  if (values.help || file === undefined) {
    console.log(USAGE);
    return;
  }
  const document = await readJson(file);
  const settings = readSettings(document);
  const files = document as Files;
  if (typeof files.users_file !== "string") throw new InvalidSettings("users_file is missing: give a file of users");
  if (typeof files.environment_parameters.path !== "string") throw new InvalidSettings("environment_parameters.path is missing");
  const tables = (await readJson(files.environment_parameters.path)) as ConstructorParameters<typeof TabularEnvironment>[0];
  const stop = new AbortController();
  for (const name of ["SIGTERM", "SIGINT"] as const) {
    process.once(name, () => {
      stop.abort();
    });
  }
  const diary = await fileDiary(values.state ?? join(dirname(file), "riffle-node"));
  const tell = (event: object): void => {
    console.error(JSON.stringify({ time: new Date().toISOString(), ...event }));
  };
  try {
    const users = await readUsers(files);
    await serve(new TabularEnvironment(tables), users, { settings, diary, seal: sealHere, tell }, stop.signal);
  } finally {
    await diary.close();
  }
}

main().catch((error: unknown) => {
  const expected = error instanceof InvalidSettings || error instanceof Unavailable || error instanceof Refusal;
  const detail = error instanceof Error ? error.message : "unknown";
  console.error(expected ? `riffle-node: ${detail}` : `riffle-node: unexpected error (${error instanceof Error ? error.name : ""}): ${detail}`);
  process.exitCode = expected ? 3 : 1;
});
