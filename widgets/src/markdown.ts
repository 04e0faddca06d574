/** Markdown of a model as elements: created from the fixed list in sanitize.ts, filled by textContent, never by markup.
 *
 * The dialect is that of mlxnb/sanitize.py: CommonMark with tables and strikethrough, raw HTML off, line breaks kept, formulas
 * (math.ts), images as their alternative text. `MarkdownView` draws a growing text: blocks that can no longer change stay as
 * they are, and the rest is patched, so that a selection survives and nothing read moves.
 */

import MarkdownIt, { type Token } from "markdown-it";

import { chunk } from "./chunks";
import { formulas, MAX_FORMULAS, showFormula, type Growing } from "./math";
import { safeAttribute, sanitize, secureLink, TAGS } from "./sanitize";

/** A longer answer is shown as it is: rendering it would hold the page. */
export const MAX_MARKDOWN = 200_000;
const ALLOWED = new Set(TAGS);
const DIRECTED = new Set(["p", "li", "h1", "h2", "h3", "h4", "h5", "h6", "th", "td", "blockquote"]);
/** Blocks at the end of a growing text that more text may still change: `1. a`, blank line, `2` becomes one list with `2.` */
const UNSETTLED = 2;

// -- text that shows what it has ------------------------------------------------------------------------------------------

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udc7f]/g;

/** The same text with control characters made visible, as mlxnb/sanitize.py does it. */
export function visibleText(text: string): string {
  return text.replace(/\r\n?/g, "\n").replace(UNSEEN, (seen) => {
    const code = seen.codePointAt(0) ?? 0;
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
    return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

// -- the parser -----------------------------------------------------------------------------------------------------------

const md = new MarkdownIt("commonmark", { html: false, breaks: true }).enable(["table", "strikethrough"]).use(formulas);

/** markdown-it drops what is nested deeper than its limit. No text of a model may vanish, so just before that it becomes plain. */
const DEEP = 90;
md.set({ maxNesting: DEEP + 10 });
md.block.ruler.before("table", "deep", (state, startLine, endLine, silent) => {
  if (state.level < DEEP) return false;
  if (!silent) state.push("deep", "", 0).content = state.getLines(startLine, endLine, 0, false);
  state.line = endLine;
  return true;
});

/** An empty block is its mark as text: "42." alone is an answer and no list, "#" no heading. A list counts as empty as a whole. */
md.core.ruler.after("block", "empty", (state) => {
  const found: Token[] = [];
  const { tokens } = state;
  for (let i = 0; i < tokens.length; i++) {
    const [length, text] = emptyAt(tokens, i);
    const first = tokens[i] as Token;
    if (!length) {
      found.push(first);
      continue;
    }
    const make = (type: string, tag: string, nesting: Token["nesting"]) =>
      Object.assign(new state.Token(type, tag, nesting), { block: true, map: first.map, level: first.level + (nesting === 0 ? 1 : 0) });
    found.push(make("paragraph_open", "p", 1), Object.assign(make("inline", "", 0), { content: text, children: [] }), make("paragraph_close", "p", -1));
    i += length - 1;
  }
  state.tokens = found;
});

/** How many tokens the empty block that begins here has, 0 if there is none, and the marks it was written with. */
function emptyAt(tokens: readonly Token[], start: number): [number, string] {
  const type = (at: number) => tokens[at]?.type;
  const first = tokens[start] as Token;
  if (first.type === "blockquote_open" && type(start + 1) === "blockquote_close") return [2, ">"];
  if (first.type === "heading_open" && /^#/.test(first.markup) && !tokens[start + 1]?.content) return [3, first.markup];
  if (first.type !== "ordered_list_open" && first.type !== "bullet_list_open") return [0, ""];
  const marks: string[] = [];
  let at = start + 1;
  for (; type(at) === "list_item_open" && type(at + 1) === "list_item_close"; at += 2) marks.push(`${tokens[at]!.info}${tokens[at]!.markup}`);
  return type(at) === first.type.replace("open", "close") ? [at + 1 - start, marks.join("\n")] : [0, ""];
}

// -- tokens to elements ---------------------------------------------------------------------------------------------------

function element(tag: string): HTMLElement {
  const el = document.createElement(ALLOWED.has(tag) ? tag : "span");
  if (DIRECTED.has(tag)) el.dir = "auto";
  return el;
}

function setSafe(el: Element, name: string, value: string): boolean {
  const kept = safeAttribute(el.nodeName.toLowerCase(), name, value);
  if (kept !== null) el.setAttribute(name, kept);
  return kept !== null;
}

function altText(tokens: readonly Token[] | null): string {
  return (tokens ?? []).map((token) => (token.type === "image" ? altText(token.children) : token.type.endsWith("break") ? " " : token.content)).join("");
}

function openTag(token: Token): HTMLElement {
  const el = element(token.tag);
  for (const [name, value] of token.attrs ?? []) {
    const style = name === "style" && /^text-align:(left|right|center)$/.exec(String(value));
    if (style) setSafe(el, "align", style[1] ?? "");
    else setSafe(el, name, String(value));
  }
  if (token.tag === "a") {
    if (!el.hasAttribute("href")) return document.createElement("span");
    secureLink(el);
  }
  return el;
}

/** How many more formulas of the text at hand are drawn. */
let formulasLeft = MAX_FORMULAS;

function leaf(token: Token, closed: boolean): Node {
  switch (token.type) {
    case "code_inline": {
      const code = element("code");
      code.textContent = token.content;
      return code;
    }
    case "softbreak":
    case "hardbreak":
      return element("br");
    case "hr":
      return element("hr");
    case "image": {
      const span = element("span");
      span.textContent = altText(token.children) || "image";
      return span;
    }
    case "math":
    case "math_block": {
      const el = element(token.block ? "p" : "span");
      if (formulasLeft-- > 0) showFormula(el, token.content);
      else el.textContent = token.content;
      return el;
    }
    case "math_block_open": {
      const p = element("p");
      p.className = "mlxnb-math-open";
      p.appendChild(element("span")).textContent = token.content;
      return p;
    }
    case "fence":
    case "code_block":
      return codeBlock(token.content, token.type === "fence" ? (token.info.trim().split(/\s+/)[0] ?? "") : "", closed);
    default:
      return document.createTextNode(token.content);
  }
}

function fill(parent: Node, tokens: readonly Token[], closed: boolean): void {
  const stack: Node[] = [parent];
  for (const token of tokens) {
    const top = stack[stack.length - 1] as Node;
    if (token.type === "inline") fill(top, token.children ?? [], closed);
    else if (token.nesting === 1) {
      // A tight list hides its paragraphs: their text goes right into the item.
      const el = token.hidden ? top : openTag(token);
      if (!token.hidden) top.appendChild(el);
      stack.push(el);
    } else if (token.nesting === -1) stack.pop();
    else top.appendChild(leaf(token, closed));
  }
}

// -- code -----------------------------------------------------------------------------------------------------------------

type Highlighter = (code: string, language: string) => string | null;
let highlighter: Highlighter | null = null;

/** Colours come when the chunk has come; until then, and without it, code is plain. */
function codeBlock(content: string, language: string, closed: boolean): HTMLElement {
  const pre = element("pre");
  const code = element("code");
  code.textContent = content.replace(/\n$/, "");
  pre.appendChild(code);
  if (!language || !setSafe(code, "class", `language-${language}`) || !closed) return pre;
  const colour = (highlight: Highlighter) => {
    const markup = highlight(code.textContent ?? "", language.toLowerCase());
    if (markup !== null) code.replaceChildren(sanitize(markup));
  };
  if (highlighter) colour(highlighter);
  else
    chunk("highlight").then(
      (loaded) => {
        highlighter = loaded.highlight;
        colour(highlighter);
      },
      () => undefined,
    );
  return pre;
}

// -- a whole text, and a growing one --------------------------------------------------------------------------------------

interface Block {
  readonly tokens: Token[];
  readonly start: number;
}

/** Top-level blocks, each with the line it starts on. */
function blocks(tokens: readonly Token[]): Block[] {
  const found: Block[] = [];
  let depth = 0;
  let current: Token[] = [];
  for (const token of tokens) {
    current.push(token);
    depth += token.nesting;
    if (depth === 0) {
      found.push({ tokens: current, start: current[0]?.map?.[0] ?? 0 });
      current = [];
    }
  }
  return found;
}

function plain(text: string): DocumentFragment {
  const fragment = document.createDocumentFragment();
  const p = element("p");
  p.className = "mlxnb-plain";
  p.textContent = text;
  fragment.appendChild(p);
  return fragment;
}

/** A whole Markdown text as elements. Any string is fine; nothing raises. */
export function renderMarkdown(text: string): DocumentFragment {
  const seen = visibleText(text);
  if (seen.length > MAX_MARKDOWN) return plain(seen);
  try {
    const fragment = document.createDocumentFragment();
    formulasLeft = MAX_FORMULAS;
    fill(fragment, md.parse(seen, {}), true);
    return fragment;
  } catch {
    return plain(seen);
  }
}

function lineOffset(text: string, line: number): number {
  let at = 0;
  for (let i = 0; i < line; i++) at = text.indexOf("\n", at) + 1;
  return at;
}

function fenceIsClosed(source: string): boolean {
  const open = /^ {0,3}(`{3,}|~{3,})/.exec(source)?.[1];
  if (!open) return true;
  const last = source.trimEnd().split("\n");
  const mark = open[0] === "`" ? "`" : "~";
  return last.length > 1 && new RegExp(`^ {0,3}${mark}{${open.length},}[ \\t]*$`).test(last.at(-1) ?? "");
}

/** Draws a text that grows. Owner: one element, whose children are all made here. */
export class MarkdownView {
  private text = "";
  private settledChars = 0;
  private settledNodes = 0;
  private env: Growing = {};

  constructor(private readonly el: HTMLElement) {}

  /** Draw `text`. growing: more may come, so the last blocks are provisional and a caret stands at the end. */
  update(text: string, growing: boolean): void {
    const seen = visibleText(text);
    if (!growing || seen.length > MAX_MARKDOWN || !seen.startsWith(this.text.slice(0, this.settledChars))) this.reset();
    this.text = seen;
    if (!growing) {
      patch(this.el, 0, renderMarkdown(text));
      return;
    }
    if (seen.length > MAX_MARKDOWN) patch(this.el, 0, plain(seen));
    else this.grow(seen);
  }

  private reset(): void {
    this.settledChars = 0;
    this.settledNodes = 0;
    this.env = {};
  }

  private grow(seen: string): void {
    const tail = seen.slice(this.settledChars);
    let all: Block[];
    // After a blank line no formula goes on.
    this.env.tail = /\n[ \t]*\n[ \t]*$/.test(tail) ? undefined : tail.trimEnd();
    formulasLeft = MAX_FORMULAS;
    try {
      all = blocks(md.parse(tail, this.env));
    } catch {
      patch(this.el, 0, plain(seen));
      this.reset();
      return;
    }
    const settled = Math.max(0, all.length - UNSETTLED);
    const fragment = document.createDocumentFragment();
    let kept = 0;
    all.forEach((block, index) => {
      const next = all[index + 1];
      const source = tail.slice(lineOffset(tail, block.start), next ? lineOffset(tail, next.start) : undefined);
      fill(fragment, block.tokens, next !== undefined || fenceIsClosed(source));
      if (index === settled - 1) kept = fragment.childNodes.length;
    });
    addCaret(fragment);
    patch(this.el, this.settledNodes, fragment);
    const first = all[settled];
    if (settled > 0 && first) {
      this.settledChars += lineOffset(tail, first.start);
      this.settledNodes += kept;
    }
  }
}

function addCaret(fragment: DocumentFragment): void {
  const caret = document.createElement("span");
  caret.className = "mlxnb-caret";
  let at: Node = fragment;
  for (;;) {
    const last: Element | null = (at as ParentNode).lastElementChild;
    if (!last || !/^(P|UL|OL|LI|BLOCKQUOTE|PRE|CODE|H[1-6]|TABLE|TBODY|THEAD|TR|TD|TH)$/.test(last.nodeName)) break;
    if (last.nodeName === "CODE" && at.nodeName !== "PRE") break;
    at = last;
  }
  at.appendChild(caret);
}

// -- patching -------------------------------------------------------------------------------------------------------------

function sameAttributes(a: Element, b: Element): boolean {
  return a.attributes.length === b.attributes.length && [...a.attributes].every((attr) => b.getAttribute(attr.name) === attr.value);
}

/** Make the children of `parent` from the one at `from` on equal to those of `fresh`, touching only what differs. */
export function patch(parent: Node, from: number, fresh: Node): void {
  let old: ChildNode | null = parent.childNodes[from] ?? null;
  let next = fresh.firstChild;
  while (next) {
    const node: ChildNode = next;
    next = node.nextSibling;
    if (!old) {
      parent.appendChild(node);
      continue;
    }
    const after: ChildNode | null = old.nextSibling;
    if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
      const [was, is] = [old as Text, node as Text];
      if (is.data.startsWith(was.data)) {
        if (is.data.length > was.data.length) was.appendData(is.data.slice(was.data.length));
      } else was.data = is.data;
    } else if (!old.isEqualNode(node)) {
      if (old instanceof Element && node instanceof Element && old.nodeName === node.nodeName && sameAttributes(old, node)) patch(old, 0, node);
      else parent.replaceChild(node, old);
    }
    old = after;
  }
  while (old) {
    const after: ChildNode | null = old.nextSibling;
    old.remove();
    old = after;
  }
}
