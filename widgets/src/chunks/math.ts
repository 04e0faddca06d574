/** TeX to MathML, fetched with the first formula. Its output is markup like any other: it goes through the sink. */

import temml from "temml/temml.js";

/** `trust: false` refuses links, classes, ids and images; the limits bound size and expansion of macros. */
const OPTIONS = { throwOnError: true, strict: false, trust: false, annotate: false, xml: false, wrap: "none", maxSize: [20, 40], maxExpand: 300 };

interface Node {
  readonly children?: readonly Node[];
  classes?: string[];
  style?: Record<string, string | undefined>;
}

/** The sink lets no style through. What of it carries meaning becomes a class of our own sheet; the rest, colour too, goes. */
function toClasses(node: Node): void {
  const { style = {} } = node;
  const added = ["Top", "Bottom", "Left", "Right"].filter((side) => /solid|dashed/.test(style[`border${side}`] ?? "")).map((side) => `tml-b${side[0]?.toLowerCase()}`);
  if (/solid/.test(style.border ?? "")) added.push("tml-box");
  if (added.length && node.classes) node.classes.push(...added);
  node.children?.forEach(toClasses);
}

/** MathML of a formula without its delimiters; null for TeX that is wrong, unknown or not trusted. */
export function typeset(tex: string, display: boolean): string | null {
  try {
    const tree = temml.__renderToMathMLTree(tex, { ...OPTIONS, displayMode: display });
    toClasses(tree);
    return tree.toMarkup();
  } catch {
    return null;
  }
}
