import { readFileSync } from "node:fs";
import { mkdir, open, readFile, rename, unlink, writeFile } from "node:fs/promises";
import { join } from "node:path";

import type { Diary, Participation } from "../diary.js";
import { InvalidSettings, Unavailable } from "../errors.js";

/**
 * Opens the diary of a program: a file of JSON lines in `folder`, each synchronised to the disk before it counts.
 * Only one process at a time may use a diary; a second process gets Unavailable.
 */
export async function fileDiary(folder: string): Promise<Diary> {
  await mkdir(folder, { recursive: true, mode: 0o700 });
  const lock = join(folder, "diary.lock");
  await takeLock(lock);
  const path = join(folder, "diary.jsonl");
  const entries = readLines(await readFile(path, "utf8").catch(ifMissing), path);
  await rewrite(path, entries); // Leaves out replaced lines, and a line that a crash cut short.
  const file = await open(path, "a", 0o600);
  return {
    entries: () => Promise.resolve([...entries.values()]),
    put: async (added) => {
      await file.appendFile(added.map((entry) => `${JSON.stringify(entry)}\n`).join(""));
      await file.datasync();
      for (const entry of added) entries.set(entry.user, entry);
    },
    close: async () => {
      await file.close();
      await unlink(lock);
    },
  };
}

function readLines(text: string, path: string): Map<string, Participation> {
  const entries = new Map<string, Participation>();
  const lines = text.split("\n");
  lines.pop(); // A whole line ends with a line feed.
  for (const [i, line] of lines.entries()) {
    try {
      const entry = JSON.parse(line) as Participation;
      entries.set(entry.user, entry);
    } catch {
      throw new InvalidSettings(`${path}: line ${i + 1} is damaged; restore the file, or people may be asked twice`);
    }
  }
  return entries;
}

async function rewrite(path: string, entries: ReadonlyMap<string, Participation>): Promise<void> {
  const aside = await open(`${path}.new`, "w", 0o600);
  await aside.writeFile([...entries.values()].map((entry) => `${JSON.stringify(entry)}\n`).join(""));
  await aside.sync();
  await aside.close();
  await rename(`${path}.new`, path);
}

async function takeLock(lock: string): Promise<void> {
  for (let tries = 0; tries < 2; tries += 1) {
    try {
      await writeFile(lock, String(process.pid), { flag: "wx" });
      return;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
      if (isAlive(Number(readFileSync(lock, "utf8")))) break;
      await unlink(lock); // Its process ended without removing the lock.
    }
  }
  throw new Unavailable(`${lock}: another process uses this folder`);
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return pid > 0 && pid !== process.pid;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "EPERM";
  }
}

function ifMissing(error: NodeJS.ErrnoException): string {
  if (error.code === "ENOENT") return "";
  throw error;
}
