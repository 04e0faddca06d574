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
  class: /^(language-[\w+#.-]{1,32}|hljs-[\w -]+|mlxnb-(math|formula|plain|caret)( mlxnb-(math-block|formula-wide))?|mlxnb-math-open)$/,
  align: /^(left|right|center)$/,
  rel: /^noopener noreferrer$/,
  target: /^_blank$/,
  dir: /^auto$/,
};

/** Elements of a formula lay characters out and do nothing else; sizes have two digits at most. */
const MATH = new Set(
  "math mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle mpadded mphantom menclose msub msup msubsup munder mover munderover mmultiscripts mprescripts mtable mtr mtd".split(" "),
);
const MATH_ATTRIBUTE = /^((lspace|rspace|width|height|depth|voffset|minsize|maxsize|mathsize|linethickness)=[+-]?\d{0,2}(\.\d+)?[a-z%]{0,2}|(stretchy|fence|separator|symmetric|movablelimits|largeop|accent|accentunder|displaystyle)=(true|false)|display=(block|inline)|form=(prefix|infix|postfix)|mathvariant=[a-z-]+|scriptlevel=[+-]?[0-3]|(row|column)span=\d{1,2}|class=((tml|math)[a-z-]+|upstrike|downstrike|sout)( ((tml|math)[a-z-]+|upstrike|downstrike|sout))*)$/;

/** What is in `root` and should not be; written apart from the lists of sanitize.ts, so that a hole there shows here. */
export function faults(root: ParentNode): string[] {
  const found: string[] = [];
  for (const el of root.querySelectorAll("*")) {
    if (el.namespaceURI === "http://www.w3.org/1998/Math/MathML") {
      if (!MATH.has(el.nodeName)) found.push(`<${el.nodeName}>`);
      for (const { name, value } of el.attributes) if (!MATH_ATTRIBUTE.test(`${name}=${value}`)) found.push(`${el.nodeName} ${name}=${value}`);
      continue;
    }
    if (el.closest("math")) found.push(`<${el.nodeName}> in a formula`);
    if (!TAGS.has(el.nodeName)) found.push(`<${el.nodeName}>`);
    for (const { name, value } of el.attributes) if (!ATTRIBUTES[name]?.test(value)) found.push(`${el.nodeName} ${name}=${value}`);
    if (el.nodeName === "A" && el.getAttribute("rel") !== "noopener noreferrer") found.push("a link that keeps a handle on the page");
  }
  return found;
}
