/** Convolutions, with a bound on the error of each element. */

const DIRECT = 128;
const UNIT_ROUNDOFF = 2 ** -53;

/**
 * Returns the convolution of two arrays, and a number that no element's error exceeds.
 *
 * Uses Fourier transforms, unless an array is short or all errors together could exceed `allowed`.
 */
export function convolve(a: Float64Array, b: Float64Array, allowed: number): { product: Float64Array; error: number } {
  const length = a.length + b.length - 1;
  const size = 2 ** Math.ceil(Math.log2(length));
  const error = 16 * UNIT_ROUNDOFF * Math.log2(size) * (squares(a) + squares(b));
  if (Math.min(a.length, b.length) <= DIRECT || error * length > allowed) return { product: direct(a, b), error: 0 };
  const [re, im] = [new Float64Array(size), new Float64Array(size)];
  re.set(a);
  im.set(b);
  transform(re, im);
  const [productRe, productIm] = productOf(re, im);
  transform(productIm, productRe); // with real and imaginary parts exchanged, this is the inverse transform
  return { product: productRe.subarray(0, length).map((value) => value / size), error };
}

function direct(a: Float64Array, b: Float64Array): Float64Array {
  const product = new Float64Array(a.length + b.length - 1);
  for (let k = 0; k < product.length; k++) {
    let sum = 0;
    const last = Math.min(k, a.length - 1);
    for (let i = Math.max(0, k - b.length + 1); i <= last; i++) sum += a[i] * b[k - i];
    product[k] = sum;
  }
  return product;
}

function squares(values: Float64Array): number {
  return values.reduce((sum, value) => sum + value * value, 0);
}

/** Returns the product A B of the transforms of real a and b from Z = A + iB: (Z[k]² - conj(Z[-k])²) / 4i. */
function productOf(re: Float64Array, im: Float64Array): [Float64Array, Float64Array] {
  const [productRe, productIm] = [new Float64Array(re.length), new Float64Array(re.length)];
  for (let k = 0; k < re.length; k++) {
    const l = (re.length - k) % re.length;
    productRe[k] = (re[k] * im[k] + re[l] * im[l]) / 2;
    productIm[k] = (re[l] ** 2 - im[l] ** 2 - re[k] ** 2 + im[k] ** 2) / 4;
  }
  return [productRe, productIm];
}

/** The discrete Fourier transform in place; the length is a power of two (Cooley and Tukey, 1965). */
function transform(re: Float64Array, im: Float64Array): void {
  const n = re.length;
  reverseBits(re, im);
  const cos = Float64Array.from({ length: n / 2 }, (_, k) => Math.cos((2 * Math.PI * k) / n));
  const sin = Float64Array.from({ length: n / 2 }, (_, k) => Math.sin((2 * Math.PI * k) / n));
  for (let half = 1; half < n; half *= 2) {
    for (let start = 0; start < n; start += 2 * half) {
      for (let i = start, turn = 0; i < start + half; i++, turn += n / (2 * half)) {
        const j = i + half;
        const x = re[j] * cos[turn] + im[j] * sin[turn];
        const y = im[j] * cos[turn] - re[j] * sin[turn];
        re[j] = re[i] - x;
        im[j] = im[i] - y;
        re[i] += x;
        im[i] += y;
      }
    }
  }
}

function reverseBits(re: Float64Array, im: Float64Array): void {
  const n = re.length;
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; (j & bit) !== 0; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [re[i], re[j]] = [re[j], re[i]];
      [im[i], im[j]] = [im[j], im[i]];
    }
  }
}
