/** The tokens as elements: appended, never rebuilt, so that the ten-thousandth costs as much as the first.
 *
 * Owner: one element, whose children are all made here. One stretch per few lines (laid out alone, skipped out of sight),
 * in it one run per origin, in it one span per token. One token is in the tab order; arrow keys move along.
 */

import { labelText, pieces, stretchEnds, type Scale } from "./layout";
import { probabilityOf } from "./layout";
import type { TokenData } from "./parse";
import { PROVENANCE } from "./parts";

const STRONG = /\p{L}/u;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const HOVER_MS = 200;
const LEAVE_MS = 160;

export interface LaneEvents {
  open(index: number, anchor: HTMLElement): void;
  close(): void;
  /** Click, tap on an open token, or Enter. */
  choose(index: number): void;
  /** Tab or arrow into the open popover; false if there is nothing to go to. */
  enter(): boolean;
}

export class TokenLane {
  private readonly spans: HTMLElement[] = [];
  private tokens: readonly TokenData[] = [];
  private scale: Scale | null = null;
  private stretch: HTMLElement | null = null;
  private stretchLength = 0;
  private run: HTMLElement | null = null;
  private fresh: HTMLElement[] = [];
  private roving = 0;
  private shown = -1;
  /** Whether the last line with letters runs from right to left, and whether this line has none yet. */
  private leftward = false;
  private blank = true;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly el: HTMLElement,
    private readonly events: LaneEvents,
  ) {
    el.addEventListener("pointerover", this.onOver);
    el.addEventListener("pointerout", this.onOut);
    el.addEventListener("click", this.onClick);
    el.addEventListener("keydown", this.onKey);
    el.addEventListener("focusin", this.onFocus);
    el.addEventListener("copy", this.onCopy);
  }

  /** Show `tokens`: those not shown yet are appended. Another array than before, or a shorter one, starts anew. */
  update(tokens: readonly TokenData[], scale: Scale | null, growing: boolean): void {
    if (tokens.length < this.spans.length || (this.tokens !== tokens && this.tokens.length > 0)) this.clear();
    this.tokens = tokens;
    const repaint = scale !== this.scale;
    this.scale = scale;
    if (repaint) this.spans.forEach((span, index) => this.paint(span, index));
    for (const span of this.fresh) span.classList.remove("mlxnb-new");
    this.fresh = [];
    const first = this.spans.length;
    for (let index = first; index < tokens.length; index++) {
      const span = this.append(index);
      if (growing && first > 0) {
        span.classList.add("mlxnb-new");
        this.fresh.push(span);
      }
    }
    if (first === 0 && this.spans[0]) this.spans[0].tabIndex = 0;
  }

  /** The popover of token `index` is open; -1: none is. */
  expanded(index: number, popover: string): void {
    const before = this.spans[this.shown];
    before?.removeAttribute("aria-expanded");
    before?.removeAttribute("aria-controls");
    this.shown = index;
    const now = this.spans[index];
    now?.setAttribute("aria-expanded", "true");
    now?.setAttribute("aria-controls", popover);
  }

  focus(index: number): void {
    const span = this.spans[index];
    if (!span) return;
    const before = this.spans[this.roving];
    if (before && before !== span) {
      before.tabIndex = -1;
      before.removeAttribute("role");
      before.removeAttribute("aria-label");
    }
    this.roving = index;
    span.tabIndex = 0;
    span.setAttribute("role", "button");
    span.setAttribute("aria-label", this.spoken(index));
    span.focus({ preventScroll: false });
  }

  dispose(): void {
    clearTimeout(this.timer);
    this.clear();
  }

  /** The pointer is over the popover: it stays. */
  hold(): void {
    clearTimeout(this.timer);
  }

  release(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.events.close(), LEAVE_MS);
  }

  private clear(): void {
    this.el.replaceChildren();
    this.spans.length = 0;
    this.fresh = [];
    this.stretch = this.run = null;
    this.stretchLength = this.roving = 0;
    this.shown = -1;
    this.leftward = false;
    this.blank = true;
    this.tokens = [];
  }

  private append(index: number): HTMLElement {
    const token = this.tokens[index] as TokenData;
    const last = this.tokens[index - 1];
    const ends = last !== undefined && this.stretch !== null && stretchEnds(this.stretchLength, last, token);
    // The break after a line end is made when the next token comes: a block needs none at its end, and an empty line is no text.
    if (last?.text.endsWith("\n") && !ends) this.spans[index - 1]?.append("\n");
    if (!this.stretch || ends) {
      this.stretch = document.createElement("div");
      this.stretch.className = "mlxnb-stretch";
      this.el.append(this.stretch);
      this.stretchLength = 0;
      this.run = null;
    }
    const heads = last?.origin !== token.origin || last.byHand !== token.byHand;
    if (!this.run || heads) {
      this.run = document.createElement("span");
      this.run.className = `mlxnb-run mlxnb-o-${token.origin}${token.byHand ? " mlxnb-by-hand" : ""}`;
      if (heads) {
        const glyph = document.createElement("i");
        glyph.className = "mlxnb-g";
        glyph.setAttribute("aria-hidden", "true");
        this.run.append(glyph);
      }
      this.stretch.append(this.run);
    }
    const span = document.createElement("span");
    span.className = "mlxnb-tok";
    span.tabIndex = -1;
    span.dataset.i = String(index);
    const parts = pieces(token.text);
    for (const [at, piece] of parts.entries()) {
      if (!piece.sign) {
        this.turn(piece.text);
        if (piece.text !== "\n" || at < parts.length - 1) span.append(piece.text);
        continue;
      }
      const sign = document.createElement("span");
      // An empty line has no direction of its own: it stays on the side of the one above.
      sign.className = this.blank && this.leftward ? "mlxnb-nl mlxnb-leftward" : "mlxnb-nl";
      sign.textContent = piece.text;
      span.append(sign);
    }
    this.paint(span, index);
    this.run.append(span);
    this.spans.push(span);
    this.stretchLength++;
    return span;
  }

  private turn(text: string): void {
    const letter = this.blank ? STRONG.exec(text)?.[0] : undefined;
    if (letter) {
      this.leftward = RIGHT_TO_LEFT.test(letter);
      this.blank = false;
    }
    if (text.endsWith("\n")) this.blank = true;
  }

  private paint(span: HTMLElement, index: number): void {
    const step = this.scale?.step(this.tokens, index) ?? 0;
    const wanted = step > 0 ? `mlxnb-tok mlxnb-m${step}` : "mlxnb-tok";
    if (span.className !== wanted) span.className = wanted;
  }

  /** What a screen reader says: text, origin, probability, place. */
  private spoken(index: number): string {
    const token = this.tokens[index];
    if (!token) return "";
    const p = probabilityOf(token);
    const parts = [labelText(token.text), PROVENANCE[token.origin].name];
    if (token.byHand) parts.push("chosen by hand");
    if (p !== null) parts.push(`probability ${p.toFixed(2)}`);
    if (token.rank !== null) parts.push(`rank ${token.rank + 1}`);
    return `${parts.join(", ")}, ${index + 1} of ${this.tokens.length}`;
  }

  private indexOf(target: EventTarget | null): number {
    const span = target instanceof Element ? target.closest<HTMLElement>(".mlxnb-tok") : null;
    return span && this.el.contains(span) ? Number(span.dataset.i) : -1;
  }

  private open(index: number): void {
    clearTimeout(this.timer);
    const span = this.spans[index];
    if (span && index !== this.shown) this.events.open(index, span);
  }

  private readonly onOver = (event: PointerEvent) => {
    const index = this.indexOf(event.target);
    if (index < 0 || event.pointerType === "touch") return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(index), HOVER_MS);
  };

  private readonly onOut = (event: PointerEvent) => {
    if (event.pointerType === "touch" || this.indexOf(event.relatedTarget) >= 0) return;
    if (this.shown >= 0) this.release();
    else clearTimeout(this.timer);
  };

  private readonly onClick = (event: MouseEvent) => {
    const index = this.indexOf(event.target);
    if (index < 0 || !(getSelection()?.isCollapsed ?? true)) return;
    const wasOpen = index === this.shown;
    this.focus(index);
    // The first press on a token only opens it, so that nobody starts the engine before reading what a press does.
    if (wasOpen) this.events.choose(index);
    else this.open(index);
  };

  private readonly onFocus = (event: FocusEvent) => {
    const index = this.indexOf(event.target);
    if (index < 0) return;
    if (index !== this.roving || !this.spans[index]?.hasAttribute("aria-label")) this.focus(index);
    this.open(index);
  };

  private readonly onKey = (event: KeyboardEvent) => {
    const index = this.indexOf(event.target);
    if (index < 0) return;
    const next = this.target(event.key, index);
    if (next !== null) this.focus(next);
    else if (event.key === "Enter" || event.key === " ") this.events.choose(index);
    else if (event.key === "Escape" && this.shown >= 0) this.events.close();
    else if (!(event.key === "Tab" && !event.shiftKey && this.shown >= 0 && this.events.enter())) return;
    // The notebook has its own meaning for these keys.
    event.preventDefault();
    event.stopPropagation();
  };

  private target(key: string, index: number): number | null {
    const end = this.spans.length - 1;
    const back = this.runsLeft(index) ? 1 : -1;
    switch (key) {
      case "ArrowLeft":
        return Math.min(end, Math.max(0, index + back));
      case "ArrowRight":
        return Math.min(end, Math.max(0, index - back));
      case "Home":
        return 0;
      case "End":
        return end;
      case "ArrowUp":
      case "ArrowDown":
        return this.onOtherLine(index, key === "ArrowDown" ? 1 : -1);
      default:
        return null;
    }
  }

  /** Whether text runs from right to left here: the token after this one stands to its left on the same line. */
  private runsLeft(index: number): boolean {
    const [a, b] = index + 1 < this.spans.length ? [index, index + 1] : [index - 1, index];
    const [first, second] = [this.spans[a]?.getBoundingClientRect(), this.spans[b]?.getBoundingClientRect()];
    return Boolean(first && second && Math.abs(first.top - second.top) < 8 && second.left < first.left);
  }

  /** The token above or below: the nearest one in x on the next line that differs in y. */
  private onOtherLine(index: number, step: number): number {
    const here = this.spans[index]?.getBoundingClientRect();
    if (!here) return index;
    let line: number | null = null;
    let best = index;
    let distance = Infinity;
    for (let i = index + step; i >= 0 && i < this.spans.length; i += step) {
      const rect = (this.spans[i] as HTMLElement).getBoundingClientRect();
      if (Math.abs(rect.top - here.top) < 8) continue;
      line ??= rect.top;
      if (Math.abs(rect.top - line) >= 8) break;
      const away = Math.abs(rect.left - here.left);
      if (away < distance) [best, distance] = [i, away];
    }
    return best;
  }

  /** A copied stretch of tokens is exactly their text, without signs and the breaks of our own layout. */
  private readonly onCopy = (event: ClipboardEvent) => {
    const selection = getSelection();
    const range = selection && selection.rangeCount > 0 ? selection.getRangeAt(0) : null;
    if (!range || !event.clipboardData) return;
    const chosen = this.spans.flatMap((span, index) => (range.intersectsNode(span) ? [index] : []));
    if (chosen.length < 2) return;
    event.clipboardData.setData("text/plain", chosen.map((index) => this.tokens[index]?.text ?? "").join(""));
    event.preventDefault();
  };
}
