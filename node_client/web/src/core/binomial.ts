/** Probabilities of the binomial law, to 14 digits or so, also far from its mean. */

/** Returns Pr[Binomial(N, p) = k] (Loader, "Fast and accurate computation of binomial probabilities", 2000). */
export function pmf(N: number, p: number, k: number): number {
  if (k < 0 || k > N) return 0;
  if (k === 0) return Math.exp(N * Math.log1p(-p));
  if (k === N) return Math.exp(N * Math.log(p));
  const corrections = stirlingError(N) - stirlingError(k) - stirlingError(N - k);
  const exponent = corrections - deviance(k, N * p) - deviance(N - k, N * (1 - p));
  return Math.exp(exponent) * Math.sqrt(N / (2 * Math.PI * k * (N - k)));
}

/** Returns Pr[Binomial(N, p) > m], as a sum from m + 1 on. */
export function tail(N: number, p: number, m: number): number {
  const deviation = Math.sqrt(N * p * (1 - p));
  let k = Math.max(m + 1, Math.floor(N * p - 40 * deviation - 40), 0);
  if (k === 0) return 1;
  let sum = 0;
  for (let mass = pmf(N, p, k); k <= N && (k <= N * p || mass > sum * 1e-17); k++) {
    sum += mass;
    mass *= ((N - k) / (k + 1)) * (p / (1 - p));
  }
  return Math.min(1, sum);
}

/** Returns log n! minus Stirling's formula (Loader's delta). */
function stirlingError(n: number): number {
  if (n >= 16) {
    const q = n * n;
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / (1188 * q)) / q) / q) / q) / n;
  }
  let factorial = 1;
  for (let i = 2; i <= n; i++) factorial *= i;
  return Math.log(factorial) - 0.5 * Math.log(2 * Math.PI * n) - n * Math.log(n) + n;
}

/** Returns x log(x / mean) + mean - x (Loader's D0), without cancellation near the mean. */
function deviance(x: number, mean: number): number {
  if (Math.abs(x - mean) >= 0.1 * (x + mean)) return x * Math.log(x / mean) + mean - x;
  const v = (x - mean) / (x + mean);
  let [sum, power, last] = [(x - mean) * v, 2 * x * v, NaN];
  for (let j = 1; sum !== last; j++) {
    power *= v * v;
    [last, sum] = [sum, sum + power / (2 * j + 1)];
  }
  return sum;
}
