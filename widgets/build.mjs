/** Builds the loader, the bundle and the on-demand chunks into mlxnb_widgets/static, and fails if one is over its budget.
 *
 * Each output stands alone, so that it can be imported from any URL, a Blob's included. `--dev`: no minification;
 * `--gallery`: the page of samples too; `--analyse`: what takes the room.
 */

import { createHash } from "node:crypto";
import { mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

import { build } from "esbuild";

import { SLIM } from "./slim.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "mlxnb_widgets", "static");
const dev = process.argv.includes("--dev");
const { version } = JSON.parse(await readFile(join(here, "package.json"), "utf8"));

/** Bytes: raw, and gzipped where that is what counts. */
const BUDGET = { "loader.js": [5_000], "bundle.js": [260_000, 95_000], "highlight.js": [140_000], "chart.js": [80_000], "diff.js": [40_000], "math.js": [185_000], "instruments.js": [80_000], "trees.js": [60_000] };

const common = {
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: !dev,
  legalComments: "none",
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  loader: { ".css": "text" },
  write: false,
  logLevel: "warning",
  absWorkingDir: here,
  alias: SLIM,
};

/** Names of what the bundle shares with the chunks of views, read where they are declared. */
const core = await readFile(join(here, "src", "core.ts"), "utf8");
const SHARED = new Set([...core.matchAll(/^import \* as \w+ from "([^"]+)"/gm)].map((match) => match[1]));

/** In those chunks an import of a shared module reads the object that core.ts left on the page. */
const fromCore = {
  name: "from-core",
  setup(b) {
    const nameOf = (path) => (path.startsWith(".") ? `./${path.split("/").at(-1)}` : path);
    b.onResolve({ filter: /./ }, ({ path, importer }) => {
      const own = importer.startsWith(join(here, "src"));
      return own && SHARED.has(nameOf(path)) ? { path: nameOf(path), namespace: "core" } : undefined;
    });
    b.onLoad({ filter: /./, namespace: "core" }, ({ path }) => {
      const slot = JSON.stringify(`mlxnb.core.${version}`);
      return { contents: `module.exports = globalThis[Symbol.for(${slot})][${JSON.stringify(path)}]`, loader: "js" };
    });
  },
};

/** The style sheet goes through the minifier too. */
const smallCss = {
  name: "small-css",
  setup(b) {
    b.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const done = await build({ entryPoints: [path], minify: !dev, bundle: true, external: ["data:*"], write: false, target: "es2022", logLevel: "warning" });
      return { contents: done.outputFiles[0].text, loader: "text" };
    });
  },
};

async function one(entry, name, define = {}, plugins = []) {
  const options = { ...common, entryPoints: [entry], define: { __VERSION__: JSON.stringify(version), ...define } };
  const done = await build({ ...options, plugins: [smallCss, ...plugins], metafile: true });
  return { name, text: done.outputFiles[0].text, inputs: done.metafile.outputs };
}

const bundle = await one("src/bundle.tsx", "bundle.js");
const hash = createHash("sha256").update(bundle.text).digest("hex").slice(0, 16);
const files = [
  await one("src/loader.ts", "loader.js", { __BUNDLE__: JSON.stringify(hash) }),
  bundle,
  await one("src/chunks/highlight.ts", "highlight.js"),
  await one("src/chunks/chart.ts", "chart.js"),
  await one("src/chunks/diff.ts", "diff.js"),
  await one("src/chunks/math.ts", "math.js"),
  await one("src/chunks/instruments.ts", "instruments.js", {}, [fromCore]),
  await one("src/chunks/trees.ts", "trees.js", {}, [fromCore]),
];

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
let over = false;
for (const { name, text } of files) {
  await writeFile(join(out, name), text);
  const raw = Buffer.byteLength(text);
  const packed = gzipSync(text, { level: 9 }).length;
  const [most, mostPacked = Infinity] = BUDGET[name];
  const bad = !dev && (raw > most || packed > mostPacked);
  over ||= bad;
  const budget = `${(most / 1000).toFixed(0)} kB${mostPacked < Infinity ? ` / ${(mostPacked / 1000).toFixed(0)} kB gz` : ""}`;
  console.log(`${name.padEnd(14)} ${(raw / 1000).toFixed(1).padStart(7)} kB ${(packed / 1000).toFixed(1).padStart(7)} kB gz   budget ${budget}${bad ? "   OVER" : ""}`);
}
await writeFile(join(out, "assets.json"), `${JSON.stringify({ version, bundle: hash, files: files.map((f) => f.name) })}\n`);
if (process.argv.includes("--gallery")) {
  const page = await one("gallery/gallery.ts", "gallery.js");
  await mkdir(join(here, "gallery", "dist"), { recursive: true });
  await writeFile(join(here, "gallery", "dist", "gallery.js"), page.text);
}
if (process.argv.includes("--analyse")) {
  for (const { inputs } of [bundle]) {
    const parts = Object.values(inputs)[0].inputs;
    const sorted = Object.entries(parts).sort((a, b) => b[1].bytesInOutput - a[1].bytesInOutput);
    for (const [path, { bytesInOutput }] of sorted.slice(0, 24)) console.log(`  ${String(bytesInOutput).padStart(7)} ${path}`);
  }
}
if (over) {
  console.error("An output is over its budget.");
  process.exit(1);
}
