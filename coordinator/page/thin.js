// Selects the points of long series to draw. No network and no DOM here.

const LIMIT = 1000;

/** Returns the indices, in order, of at most `LIMIT` points of `lines` and `dots`, lists of equal
 * length with nulls for missing values. Keeps the first and the last point, the smallest and
 * largest value of every line in every stretch, and all dots if they are not too many. */
export function thinned(lines, dots = []) {
  const { length } = lines[0] ?? dots[0];
  if (length <= LIMIT) return Array.from({ length }, (_, i) => i);
  const spots = new Set(dots.flatMap(known));
  if (2 * spots.size > LIMIT) return thinned([...lines, ...dots]);
  const room = LIMIT - 2 - spots.size;
  for (let stretches = Math.floor(room / 2); ; stretches = Math.floor(0.8 * stretches)) {
    const kept = new Set([0, length - 1, ...spots]);
    for (const line of lines) addExtremes(kept, line, stretches);
    if (kept.size <= LIMIT) return [...kept].sort((a, b) => a - b); // true by room / (2 lines)
  }
}

const known = (line) => line.flatMap((value, i) => (isKnown(value) ? [i] : []));
const isKnown = (value) => value !== null && value !== undefined;

function addExtremes(kept, line, stretches) {
  const size = line.length / stretches;
  for (let part = 0; part < stretches; part += 1) {
    let low = -1;
    let high = -1;
    for (let i = Math.floor(part * size); i < Math.floor((part + 1) * size); i += 1) {
      if (!isKnown(line[i])) continue;
      if (low < 0 || line[i] < line[low]) low = i;
      if (high < 0 || line[i] > line[high]) high = i;
    }
    if (low >= 0) kept.add(low).add(high);
  }
}
