import js from "@eslint/js";
import { defineConfig } from "eslint/config";
import tseslint from "typescript-eslint";

// The core computes. Network, storage, clock and randomness are arguments of its functions.
const FORBIDDEN_IN_CORE = [
  "fetch", "indexedDB", "localStorage", "Worker", "window", "document", "navigator", "Date", "process",
  "setTimeout", "setInterval", "performance",
];

export default defineConfig(
  { ignores: ["dist/", "build/", "node_modules/"] },
  js.configs.recommended,
  tseslint.configs.strictTypeChecked,
  {
    languageOptions: { parserOptions: { project: ["./src/core/tsconfig.json", "./tsconfig.json"] } },
    rules: {
      eqeqeq: "error",
      "max-lines": ["error", 400],
      "max-lines-per-function": ["error", 60],
      // Indices and counts stand in template strings all over.
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true, allowBoolean: true }],
    },
  },
  {
    files: ["src/core/**"],
    rules: {
      "no-restricted-globals": ["error", ...FORBIDDEN_IN_CORE],
      "no-restricted-properties": ["error", { object: "Math", property: "random" }],
      "no-restricted-imports": ["error", { patterns: ["node:*", "../*"] }],
    },
  },
  {
    // node:test returns a promise that nobody awaits.
    files: ["test/**"],
    rules: { "@typescript-eslint/no-floating-promises": "off", "@typescript-eslint/no-non-null-assertion": "off", "max-lines-per-function": "off" },
  },
  { files: ["*.mjs", "bench/*.mjs"], extends: [tseslint.configs.disableTypeChecked], languageOptions: { globals: { process: "readonly", console: "readonly", crypto: "readonly", performance: "readonly", URL: "readonly" } } },
);
