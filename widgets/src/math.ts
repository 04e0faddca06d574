/** Formulas in Markdown: what counts as one, what may still become one while the text grows, and the element that shows it.
 *
 * `$…$`, `\(…\)`, and on a line of their own or inside one `$$…$$` and `\[…\]`, by the rules of mlxnb/sanitize.py: prices, paths
 * and prose between two dollars stay text (tests/math_cases.json has both sides' cases). The chunk that knows TeX is fetched with
 * the first formula; until then, without it, and for TeX that it does not take, the source is shown as it was written.
 */

import type { Env, MarkdownIt, StateBlock } from "markdown-it";

import { chunk } from "./chunks";
import { sanitizeMath } from "./sanitize";

/** Formulas of one text that are drawn; further ones stay as they are written, so that no text holds the page. */
export const MAX_FORMULAS = 500;
const MAX_SOURCE = 4000;
const MAX_LINES = 100;
const KEPT = 1000;

// -- what is a formula ----------------------------------------------------------------------------------------------------

const CLOSED = /\$\$(?:[^$\\]|\\[^])+?\$\$|\\\[[^]+?\\\]|\\\([^]+?\\\)|\$(?=[^\s$])(?:[^$\\\n]|\\.){0,400}?(?<=[^\s\\])\$(?![0-9A-Za-z$])/y;
/** One dollar that nothing has closed yet, with what may become a formula; a digit right after it is a price more often. */
const OPEN_DOLLAR = /^\$(?=[^\s$\d])[^$\n`]{0,200}$/;
const TEXT_COMMAND = /\\(?:text\w*|math(?:rm|it|bf)|operatorname|mbox)\*?\s*\{[^{}]*\}/g;
const PROSE = /(?<![\\A-Za-z])(?:[a-z]{2,}[^A-Za-z\\{}_^=+*/<>|]+[a-z]{3,}|[a-z]{3,}[^A-Za-z\\{}_^=+*/<>|]+[a-z]{2,})|^[\d.,]+\s+[a-z]{2,}/;

/** Two dollars with words between them are money or a sentence. */
function isProse(content: string): boolean {
  return PROSE.test(content.replace(TEXT_COMMAND, ""));
}

const isWord = (character: string | undefined): boolean => character !== undefined && /[A-Za-z0-9$]/.test(character);

export const isDisplay = (source: string): boolean => source.startsWith("$$") || source.startsWith("\\[");

/** The whole formula that begins at `at`, with its delimiters; "" if none does. */
function formulaAt(text: string, at: number, end: number): string {
  CLOSED.lastIndex = at;
  const found = CLOSED.exec(text.slice(0, Math.min(end, at + MAX_SOURCE)))?.[0] ?? "";
  const content = contentOf(found);
  if (found.includes("`") || !content.trim()) return "";
  const single = content.length === found.length - 2;
  return single && (isWord(text[at - 1]) || isProse(content)) ? "" : found;
}

/** What stands between the delimiters. */
function contentOf(source: string): string {
  const length = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2;
  return source.slice(length, -length);
}

/** Whether the end of a growing text may be the beginning of a formula. */
function mayBecome(rest: string, before: string | undefined): boolean {
  if (rest.length > MAX_SOURCE || rest.includes("`")) return false;
  if (isDisplay(rest) || rest.startsWith("\\(")) return true;
  return OPEN_DOLLAR.test(rest) && !isWord(before) && !isProse(rest.slice(1));
}

// -- rules for the parser -------------------------------------------------------------------------------------------------

/** What a parse knows of a growing text: its end, from which a formula may still come. Absent for a whole text. */
export interface Growing extends Env {
  tail?: string | undefined;
}

/** `math` and `math_block` tokens hold a formula's source, `math_open` and `math_block_open` what may become one. */
export function formulas(md: MarkdownIt): void {
  md.inline.ruler.before("escape", "math", (state, silent) => {
    const first = state.src[state.pos];
    if (first !== "$" && first !== "\\") return false;
    const tail = (state.env as Growing).tail;
    const found = formulaAt(state.src, state.pos, state.posMax);
    const rest = state.src.slice(state.pos, state.posMax);
    const atEnd = tail !== undefined && tail.endsWith(rest);
    // A dollar at the very end may be followed by a digit, and then it closes nothing.
    const closes = found !== "" && !(atEnd && found === rest && contentOf(found).length === found.length - 2);
    const opens = !closes && atEnd && (found !== "" || mayBecome(rest, state.src[state.pos - 1]));
    if (!closes && !opens) return false;
    if (!silent) state.push(closes ? "math" : "math_open", "", 0).content = closes ? found : rest;
    state.pos += closes ? found.length : rest.length;
    return true;
  });
  const alt = ["paragraph", "reference", "blockquote", "list"];
  md.block.ruler.before("fence", "math_block", blockRule, { alt });
}

function blockRule(state: StateBlock, startLine: number, endLine: number, silent: boolean): boolean {
  const lineOf = (line: number) => state.src.slice((state.bMarks[line] ?? 0) + (state.tShift[line] ?? 0), state.eMarks[line]).trimEnd();
  const first = lineOf(startLine);
  if (!isDisplay(first) || (state.sCount[startLine] ?? 0) - state.blkIndent >= 4) return false;
  const close = first.startsWith("$$") ? "$$" : "\\]";
  for (let line = startLine; line < Math.min(endLine, startLine + MAX_LINES); line++) {
    const text = lineOf(line);
    if (text === "" || text.includes("`") || (state.sCount[line] ?? 0) < state.blkIndent) return false;
    const at = text.indexOf(close, line === startLine ? 2 : 0);
    if (at >= 0) {
      const source = [...Array.from({ length: line - startLine }, (_, i) => lineOf(startLine + i)), text].join("\n");
      if (at !== text.length - 2 || source.length > MAX_SOURCE || !contentOf(source).trim()) return false;
      if (!silent) push("math_block", source, line + 1);
      return true;
    }
  }
  const tail = (state.env as Growing).tail;
  const rest = state.src.slice((state.bMarks[startLine] ?? 0) + (state.tShift[startLine] ?? 0));
  if (tail === undefined || rest.length > MAX_SOURCE || !tail.endsWith(rest.trimEnd())) return false;
  if (!silent) push("math_block_open", rest.trimEnd(), endLine);
  return true;

  function push(type: string, source: string, next: number): void {
    const token = state.push(type, "", 0);
    token.content = source;
    token.map = [startLine, next];
    token.block = true;
    state.line = next;
  }
}

// -- elements -------------------------------------------------------------------------------------------------------------

type Typesetter = (tex: string, display: boolean) => string | null;
let typesetter: Typesetter | null = null;
/** Drawn formulas by source; null for TeX that cannot be drawn. The oldest go first. */
const drawn = new Map<string, DocumentFragment | null>();

/** The formula in this element, which holds its source until it can be drawn. */
export function showFormula(el: HTMLElement, source: string): void {
  const display = isDisplay(source);
  el.className = display ? "mlxnb-math mlxnb-math-block" : "mlxnb-math";
  el.textContent = source;
  if (typesetter) draw(el, source, display);
  else
    chunk("math").then(
      (loaded) => {
        typesetter = loaded.typeset;
        if (el.textContent === source) draw(el, source, display);
      },
      () => undefined,
    );
}

function draw(el: HTMLElement, source: string, display: boolean): void {
  const formula = fragmentOf(source, display);
  if (!formula) return;
  el.replaceChildren(formula.cloneNode(true));
  // A long one that stands in a line gets a scroll bar of its own rather than being cut off.
  const wide = !display && (el.textContent?.length ?? 0) > 60;
  el.className = `mlxnb-formula${display ? " mlxnb-math-block" : ""}${wide ? " mlxnb-formula-wide" : ""}`;
}

function fragmentOf(source: string, display: boolean): DocumentFragment | null {
  const known = drawn.get(source);
  if (known !== undefined) return known;
  const markup = typesetter?.(contentOf(source), display) ?? null;
  const fragment = markup === null ? null : sanitizeMath(markup);
  const made = fragment?.querySelector("math") ? fragment : null;
  if (drawn.size >= KEPT) drawn.delete(drawn.keys().next().value as string);
  drawn.set(source, made);
  return made;
}
