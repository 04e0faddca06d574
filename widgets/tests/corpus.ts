/// <reference types="node" />
/** The injection corpus of tests/xss_payloads.py, read from there: there is one corpus, and Python owns it. */

import { execFileSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const tests = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "tests");
const program = "import json, sys; sys.path.insert(0, sys.argv[1]); from xss_payloads import PAYLOADS; print(json.dumps(PAYLOADS))";

/** (kind, text) of every payload. JSON keeps lone surrogates. */
export const PAYLOADS = JSON.parse(
  execFileSync(process.env.PYTHON || "python3", ["-c", program, tests], { encoding: "utf8", maxBuffer: 1 << 24 }),
) as readonly (readonly [string, string])[];

const TAGS = new Set(
  "p br hr h1 h2 h3 h4 h5 h6 strong em s code pre blockquote ul ol li table thead tbody tr th td a span".split(" ").map((tag) => tag.toUpperCase()),
);
const ATTRIBUTES: Readonly<Record<string, RegExp>> = {
  href: /^(https?:\/\/|mailto:)/i,
  title: /^/,
  start: /^\d{1,9}$/,
  class: /^(language-[\w+#.-]{1,32}|hljs-[\w -]+|mlxnb-(math|plain|caret))$/,
  align: /^(left|right|center)$/,
  rel: /^noopener noreferrer$/,
  target: /^_blank$/,
  dir: /^auto$/,
};

/** What is in `root` and should not be; written apart from the lists of sanitize.ts, so that a hole there shows here. */
export function faults(root: ParentNode): string[] {
  const found: string[] = [];
  for (const el of root.querySelectorAll("*")) {
    if (!TAGS.has(el.nodeName)) found.push(`<${el.nodeName}>`);
    for (const { name, value } of el.attributes) if (!ATTRIBUTES[name]?.test(value)) found.push(`${el.nodeName} ${name}=${value}`);
    if (el.nodeName === "A" && el.getAttribute("rel") !== "noopener noreferrer") found.push("a link that keeps a handle on the page");
  }
  return found;
}
