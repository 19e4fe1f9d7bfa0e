import { readFile } from "node:fs/promises";
import { test } from "node:test";

import { vectorTests } from "./vectors.js";

for (const [name, run] of vectorTests((file) => readFile(`../../docs/vectors/${file}`, "utf-8"))) test(name, run);
