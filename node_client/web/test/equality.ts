/**
 * Says what this node makes of descriptors and random bytes, for tests/node_client/web/test_equality.py.
 *
 * Reads a JSON list from its input; writes one text for each row: the contents of a report, or the
 * problem of a descriptor that does not parse.
 */
import { readFileSync } from "node:fs";

import { hex, unhex, utf8 } from "../src/core/bytes.js";
import type { Episode } from "../src/core/counters.js";
import { parseDescriptor } from "../src/core/descriptor.js";
import { Refusal } from "../src/core/problems.js";
import { contents } from "../src/core/report.js";

interface Row {
  readonly descriptor: string;
  readonly episode: Episode | null;
  readonly bytes: string;
}

async function answer({ descriptor, episode, bytes }: Row): Promise<string> {
  const [tape, used] = [unhex(bytes), { bytes: 0 }];
  const random = (size: number) => tape.slice(used.bytes, (used.bytes += size));
  try {
    const made = hex(contents(await parseDescriptor(utf8(descriptor)), episode, random));
    return used.bytes === tape.length ? made : `drew ${used.bytes} of ${tape.length} bytes`;
  } catch (error) {
    return error instanceof Refusal ? error.slug : `a failure: ${String(error)}`;
  }
}

const rows = JSON.parse(readFileSync(0, "utf8")) as Row[];
console.log(JSON.stringify(await Promise.all(rows.map(answer))));
