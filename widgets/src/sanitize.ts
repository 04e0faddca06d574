/** The only sink of markup of the views: hostile markup in, an inert fragment out. Everything else on a page is textContent.
 *
 * `sanitize` takes HTML. Its lists are those of mlxnb/sanitize.py, with `span[class=hljs-*]` for the output of the highlighter.
 * Covered: scripts, handlers, anything that fetches, style, ids and `data-*`, SVG, MathML, forms, URL schemes but http, https and
 * mailto. Not covered: where an allowed link leads once clicked. `sanitizeMath` takes a formula that was typeset: MathML that only
 * lays characters out, within bounds, and no HTML at all.
 */

import DOMPurify, { type Config } from "dompurify";

export const TAGS: readonly string[] = [
  ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote"],
  ...["ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "span"],
];

const LANGUAGE = /^language-[A-Za-z0-9_+#.-]{1,32}$/;
const HIGHLIGHT = /^hljs-[a-z_-]{1,32}_?( [a-z_-]{1,32}_?)*$/;
const START = /^\d{1,9}$/;

/** The address if a link may lead there; null otherwise. Relative and protocol-relative ones are refused. */
export function safeUrl(value: string): string | null {
  // URL parsers drop tab and newline anywhere and control characters at the ends, so those are what is looked at.
  const seen = value.replace(/[\u0000-\u0020\u007f-\u009f\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff]+/g, "");
  return /^(?:https?:\/\/[^/]|mailto:.)/i.test(seen) ? value.trim() : null;
}

/** The value an attribute may have; null if it may not be there. The same rule for markup and for elements we create. */
export function safeAttribute(tag: string, name: string, value: string): string | null {
  if (tag === "a" && name === "href") return safeUrl(value);
  if (tag === "a" && name === "title") return value.slice(0, 500);
  if (tag === "ol" && name === "start") return START.test(value) ? value : null;
  if (tag === "code" && name === "class") return LANGUAGE.test(value) ? value : null;
  if (tag === "span" && name === "class") return HIGHLIGHT.test(value) ? value : null;
  if ((tag === "th" || tag === "td") && name === "align") return /^(left|right|center)$/.test(value) ? value : null;
  return null;
}

// -- formulas -------------------------------------------------------------------------------------------------------------

/** Presentation alone. Left out on purpose: maction, annotation, semantics, mglyph, and all that links, loads or embeds. */
export const MATH_TAGS: readonly string[] = [
  ...["math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "mpadded", "mphantom", "menclose"],
  ...["msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "mtable", "mtr", "mtd"],
];
/** Looks that our style sheet gives a formula; any other class goes. */
const MATH_CLASS = /^tml-(?:left|right|jot|small|prime|(?:sml|med|lrg)-pad|overline|underline|cancel|xcancel|box|b[tblr])$|^(?:upstrike|downstrike|sout)$|^math(?:cal|scr)$/;
const FLAG = /^(?:true|false)$/;
/** Up to two digits before the point: a length of a formula cannot reach over the page around it. */
const LENGTH = /^[+-]?\d{0,2}(?:\.\d{1,6})?(?:em|ex|pt|px|mu|%)?$/;
const MATH_ATTRIBUTES: Readonly<Record<string, RegExp>> = {
  display: /^(?:block|inline)$/,
  mathvariant: /^[a-z-]{1,24}$/,
  form: /^(?:prefix|infix|postfix)$/,
  scriptlevel: /^[+-]?[0-3]$/,
  rowspan: /^\d{1,2}$/,
  columnspan: /^\d{1,2}$/,
  ...Object.fromEntries(["stretchy", "fence", "separator", "symmetric", "movablelimits", "largeop", "accent", "accentunder", "displaystyle"].map((name) => [name, FLAG])),
  ...Object.fromEntries(["lspace", "rspace", "width", "height", "depth", "voffset", "minsize", "maxsize", "mathsize", "linethickness"].map((name) => [name, LENGTH])),
};

/** The same for an attribute of a formula's element. */
export function safeMathAttribute(name: string, value: string): string | null {
  if (name === "class") return value.split(/\s+/).filter((one) => MATH_CLASS.test(one)).join(" ") || null;
  return Object.hasOwn(MATH_ATTRIBUTES, name) && MATH_ATTRIBUTES[name]!.test(value) ? value : null;
}

// -- the sink -------------------------------------------------------------------------------------------------------------

const CONFIG = {
  ALLOWED_TAGS: [...TAGS],
  ALLOWED_ATTR: ["href", "title", "start", "class", "align", "rel", "target"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOW_UNKNOWN_PROTOCOLS: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["start", "align", "class", "title"],
  FORBID_CONTENTS: ["script", "style", "template", "noscript", "iframe", "noembed", "noframes", "object", "textarea", "title", "xmp"],
  KEEP_CONTENT: true,
  RETURN_DOM_FRAGMENT: true,
} satisfies Config;

const MATH_CONFIG = {
  ...CONFIG,
  ALLOWED_TAGS: [...MATH_TAGS],
  ALLOWED_ATTR: ["class", ...Object.keys(MATH_ATTRIBUTES)],
  ADD_URI_SAFE_ATTR: ["class", ...Object.keys(MATH_ATTRIBUTES)],
  FORBID_CONTENTS: [...CONFIG.FORBID_CONTENTS, "annotation", "annotation-xml", "svg"],
} satisfies Config;

type Purifier = ReturnType<typeof DOMPurify>;

/** An instance of our own: hooks of other users of the library in the same page stay out, and ours stay in. */
function purifierWith(safe: (tag: string, name: string, value: string) => string | null): Purifier {
  const made = DOMPurify(window);
  made.addHook("uponSanitizeAttribute", (node, data) => {
    // rel and target are set by us alone, below.
    const value = data.attrName === "rel" || data.attrName === "target" ? null : safe(node.nodeName.toLowerCase(), data.attrName, data.attrValue);
    if (value === null) data.keepAttr = false;
    else data.attrValue = value;
  });
  made.addHook("afterSanitizeAttributes", (node) => {
    if (node.nodeName.toLowerCase() === "a") secureLink(node);
  });
  return made;
}

let forHtml: Purifier | null = null;
let forMath: Purifier | null = null;

/** A link opens beside the notebook, tells nobody where it came from and gets no handle on the page. */
export function secureLink(a: Element): void {
  a.setAttribute("rel", "noopener noreferrer");
  a.setAttribute("target", "_blank");
}

/** Markup of any origin as an inert fragment. Nothing raises; nothing is parsed twice. */
export function sanitize(markup: string): DocumentFragment {
  forHtml ??= purifierWith(safeAttribute);
  return clean(forHtml, markup, CONFIG);
}

/** The same for what a typesetter made of a formula. */
export function sanitizeMath(markup: string): DocumentFragment {
  forMath ??= purifierWith((_, name, value) => safeMathAttribute(name, value));
  return clean(forMath, markup, MATH_CONFIG);
}

function clean(purifier: Purifier, markup: string, config: Config): DocumentFragment {
  // Null where the markup leaves no body at all.
  return (purifier.sanitize(markup, config) as unknown as DocumentFragment | null) ?? document.createDocumentFragment();
}
