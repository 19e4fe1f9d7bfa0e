import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

import * as api from "../src/index.js";

test("the README documents the public API, and nothing else", async () => {
  const readme = await readFile("README.md", "utf8");
  const documented = [...readme.matchAll(/^\| `(\w+)/gm)].map(([, name]) => name);
  assert.deepEqual(documented.sort(), [...Object.keys(api), "fileDiary", "opaqueId"].sort());
});
