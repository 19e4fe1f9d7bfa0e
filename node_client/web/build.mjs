// Builds dist/ (the package and the demonstration page), or with --tests the tests in build/test/.
import { cp, readdir, rm } from "node:fs/promises";
import { build } from "esbuild";

const common = { bundle: true, format: "esm", target: "es2022", logLevel: "warning", legalComments: "linked" };
const forNode = { ...common, platform: "node", target: "node18" };

async function entries(folder, ending) {
  const names = await readdir(folder).catch(() => []);
  return names.filter((name) => name.endsWith(ending)).map((name) => `${folder}/${name}`);
}

if (process.argv.includes("--tests")) {
  await rm("build/test", { recursive: true, force: true });
  const inject = ["src/node/webcrypto.ts"]; // for Node.js 18
  await build({ ...forNode, inject, entryPoints: await entries("test", ".test.ts"), outdir: "build/test", sourcemap: "inline" });
} else {
  await build({ ...common, entryPoints: ["src/index.ts", "src/worker.ts"], outdir: "dist" });
  await build({ ...forNode, entryPoints: { node: "src/node/index.ts" }, outdir: "dist" });
  // The page is a folder of files for any web server; its owner adds settings.json.
  const page = { main: "demo/main.ts", worker: "src/worker.ts" };
  await build({ ...common, entryPoints: page, outdir: "dist/demo", minify: true });
  for (const file of ["index.html", "style.css"]) await cp(`demo/${file}`, `dist/demo/${file}`);
  const start = { js: "#!/usr/bin/env node" };
  await build({ ...forNode, entryPoints: { cli: "src/node/cli.ts" }, outdir: "dist", banner: start });
}
