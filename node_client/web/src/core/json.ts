/**
 * Strict JSON (RFC 8259), and readers that check documents (docs/protocol.md, section 4.2).
 *
 * `JSON.parse` cannot serve: it takes the last of two members with one name, and does not tell `8`
 * from `8.0`.
 */

/** A text or a document that is not of the expected form. */
export class FormError extends Error {
  override readonly name = "FormError";
}

/** A number that was written with a fraction or an exponent. */
export class Real {
  constructor(readonly value: number) {}
}

/** A parsed value. Integers that a double may not hold exactly are bigints; objects are maps. */
export type Json = null | boolean | string | number | bigint | Real | Json[] | Map<string, Json>;

const NUMBER = /(-?(?:0|[1-9][0-9]*))(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const WORDS: readonly [string, Json][] = [["true", true], ["false", false], ["null", null]];
const LONGEST_INTEGER = 1000;
const DEEPEST = 64;

/** Parses a JSON text; throws FormError if it is none, or if an object has a member twice. */
export function parseJson(text: string): Json {
  return new Parser(text).document();
}

class Parser {
  private at = 0;

  constructor(private readonly text: string) {}

  document(): Json {
    const value = this.value(0);
    if (this.peek() !== "") this.fail();
    return value;
  }

  private fail(): never {
    throw new FormError(`no JSON at character ${this.at}`);
  }

  /** Skips blanks; returns the next character, or "" at the end. */
  private peek(): string {
    while (" \t\n\r".includes(this.text.charAt(this.at)) && this.at < this.text.length) this.at++;
    return this.text.charAt(this.at);
  }

  private takes(character: string): boolean {
    if (this.peek() !== character) return false;
    this.at++;
    return true;
  }

  private value(depth: number): Json {
    if (depth > DEEPEST) this.fail();
    if (this.takes("{")) return this.members(depth + 1);
    if (this.takes("[")) return this.items(depth + 1);
    if (this.peek() === '"') return this.string();
    for (const [word, value] of WORDS) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return value;
      }
    }
    return this.number();
  }

  private members(depth: number): Json {
    const members = new Map<string, Json>();
    if (this.takes("}")) return members;
    do {
      if (this.peek() !== '"') this.fail();
      const name = this.string();
      if (members.has(name)) throw new FormError("an object has a member twice");
      if (!this.takes(":")) this.fail();
      members.set(name, this.value(depth));
    } while (this.takes(","));
    if (!this.takes("}")) this.fail();
    return members;
  }

  private items(depth: number): Json {
    const items: Json[] = [];
    if (this.takes("]")) return items;
    do items.push(this.value(depth));
    while (this.takes(","));
    if (!this.takes("]")) this.fail();
    return items;
  }

  private string(): string {
    const start = this.at++;
    for (let code = 0; code !== 34; ) {
      code = this.text.charCodeAt(this.at);
      if (!(code >= 32)) this.fail(); // a control character, or the end (NaN)
      this.at += code === 92 ? 2 : 1;
    }
    try {
      const value = JSON.parse(this.text.slice(start, this.at)) as string;
      if (!/\p{Cs}/u.test(value)) return value; // half of a surrogate pair is refused: UTF-8 cannot encode it
    } catch {
      // an escape that JSON does not know
    }
    return this.fail();
  }

  private number(): Json {
    NUMBER.lastIndex = this.at;
    const [all, integer] = NUMBER.exec(this.text) ?? this.fail();
    this.at += all.length;
    const value = Number(all);
    if (all !== integer || all.length > LONGEST_INTEGER) return new Real(value);
    return Number.isSafeInteger(value) ? value : BigInt(integer);
  }
}

/** Checks one value of a document; undefined is a missing member. Throws FormError. */
export type Reader<T> = (value: Json | undefined) => T;

function check(holds: boolean, expected: string): asserts holds {
  if (!holds) throw new FormError(`expected ${expected}`);
}

/** Reads an integer from low to high. */
export function integer(low: number, high = Number.MAX_SAFE_INTEGER): Reader<number> {
  return (value) => {
    check(typeof value === "number" && value >= low && value <= high, `an integer from ${low} to ${high}`);
    return value;
  };
}

/** Reads a non-negative integer of any size. */
export function natural(value: Json | undefined): bigint {
  check((typeof value === "number" || typeof value === "bigint") && value >= 0, "an integer from 0");
  return BigInt(value);
}

/** Reads a finite number. */
export function real(value: Json | undefined): number {
  const read = value instanceof Real ? value.value : typeof value === "bigint" ? Number(value) : value;
  check(typeof read === "number" && Number.isFinite(read), "a finite number");
  return read;
}

/** Reads a string that matches a pattern. */
export function text(pattern: RegExp): Reader<string> {
  return (value) => {
    check(typeof value === "string" && pattern.test(value), `a text like ${pattern.source}`);
    return value;
  };
}

/** Reads one of several strings. */
export function choice<T extends string>(...choices: readonly T[]): Reader<T> {
  return (value) => {
    check((choices as readonly unknown[]).includes(value), `one of ${choices.join(", ")}`);
    return value as T;
  };
}

/** Reads true or false. */
export function boolean(value: Json | undefined): boolean {
  check(typeof value === "boolean", "true or false");
  return value;
}

/** Reads a list. */
export function list<T>(item: Reader<T>, least = 0, most = Infinity): Reader<T[]> {
  return (value) => {
    check(Array.isArray(value) && value.length >= least && value.length <= most, "a list of a permitted length");
    return value.map(item);
  };
}

/** Reads null, or what `reader` reads. */
export function nullable<T>(reader: Reader<T>): Reader<T | null> {
  return (value) => (value === null ? null : reader(value));
}

/** Reads a member that may be missing. */
export function optional<T>(reader: Reader<T>, byDefault: T): Reader<T> {
  return (value) => (value === undefined ? byDefault : reader(value));
}

/** Reads an object that has no other members than these. */
export function record<T extends object>(members: { [K in keyof T]: Reader<T[K]> }): Reader<T> {
  const readers = Object.entries<Reader<unknown>>(members);
  return (value) => {
    check(value instanceof Map, "an object");
    for (const name of value.keys()) check(Object.hasOwn(members, name), "no other member");
    const read = readers.map(([name, reader]): [string, unknown] => {
      try {
        return [name, reader(value.get(name))];
      } catch (error) {
        throw error instanceof FormError ? new FormError(`${name}: ${error.message}`) : error;
      }
    });
    return Object.fromEntries(read) as T;
  };
}
