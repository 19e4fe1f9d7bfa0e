// Numbers, times and names as a reader wants them.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
const TIME = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const PLACES = new Map(); // making a format takes longer than using it a hundred times
export const NONE = "\u2013";

/** Whether there is a value. */
export const isKnown = (value) => value !== null && value !== undefined;

/** A whole number with separators. */
export const count = (value) => (!isKnown(value) ? NONE : WHOLE.format(value));

/** A count with its noun, whose plural may be irregular. */
export const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;

/** A number with `digits` significant digits; infinity comes as the string "Infinity". */
export function number(value, digits = 4) {
  if (!isKnown(value)) return NONE;
  if (!Number.isFinite(Number(value))) return String(value).replace("Infinity", "\u221e");
  const found = Number(value);
  if (found === 0) return "0";
  const exact = Number(found.toPrecision(digits));
  if (Math.abs(found) < 1e-3) return exact.toExponential();
  return Math.abs(found) >= 1e7 ? String(exact) : format(found, digits);
}

/** A number short enough for an axis. */
export const brief = (value) => (Math.abs(value) < 10_000 ? number(value, 3) : SHORT.format(value));

function format(value, digits) {
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  if (!PLACES.has(places)) PLACES.set(places, new Intl.NumberFormat("en-US", { maximumFractionDigits: places }));
  return PLACES.get(places).format(value);
}

/** A value with its radius. */
export const estimate = (value, radius) =>
  !isKnown(value) ? NONE : `${number(value, 3)} \u00b1 ${number(radius, 2)}`;

/** A time given in seconds since 1970, in the reader's zone. */
export function when(value) {
  if (!isKnown(value)) return NONE;
  return TIME.format(value * 1000);
}
