/** The only HTML sink of the views: hostile markup in, an inert fragment out. Everything else on a page is textContent.
 *
 * The lists are those of mlxnb/sanitize.py, with `span[class=hljs-*]` for the output of the highlighter. Covered: scripts,
 * handlers, anything that fetches, style, ids and `data-*`, SVG, MathML, forms, URL schemes but http, https and mailto.
 * Not covered: where an allowed link leads once clicked.
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

let purifier: ReturnType<typeof DOMPurify> | null = null;

function purify(): ReturnType<typeof DOMPurify> {
  if (purifier) return purifier;
  // An instance of our own: hooks of other users of the library in the same page stay out, and ours stay in.
  purifier = DOMPurify(window);
  purifier.addHook("uponSanitizeAttribute", (node, data) => {
    if (data.attrName === "rel" || data.attrName === "target") {
      data.keepAttr = false; // set by us alone, below
      return;
    }
    const value = safeAttribute(node.nodeName.toLowerCase(), data.attrName, data.attrValue);
    if (value === null) data.keepAttr = false;
    else data.attrValue = value;
  });
  purifier.addHook("afterSanitizeAttributes", (node) => {
    if (node.nodeName.toLowerCase() === "a") secureLink(node);
  });
  return purifier;
}

/** A link opens beside the notebook, tells nobody where it came from and gets no handle on the page. */
export function secureLink(a: Element): void {
  a.setAttribute("rel", "noopener noreferrer");
  a.setAttribute("target", "_blank");
}

/** Markup of any origin as an inert fragment. Nothing raises; nothing is parsed twice. */
export function sanitize(markup: string): DocumentFragment {
  // Null where the markup leaves no body at all.
  return (purify().sanitize(markup, CONFIG) as unknown as DocumentFragment | null) ?? document.createDocumentFragment();
}
