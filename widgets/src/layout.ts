/** What the token lane shows, as pure functions: metrics, the six steps of the ramp, marks for white space, where stretches end. */

import type { TokenData } from "./parse";
import { visibleText } from "./markdown";

export type Metric = "probability" | "rank" | "entropy" | "latency";

export const METRIC_NAMES: Readonly<Record<Metric, string>> = { probability: "Probability", rank: "Rank", entropy: "Entropy", latency: "Latency" };

/** exp of a log probability, never above one; null if it was not captured. */
export function probabilityOf(token: TokenData): number | null {
  return token.logprob === null ? null : Math.exp(Math.min(0, token.logprob));
}

/** Bits over the captured alternatives, with all the rest as one outcome: a lower bound. Null without alternatives. */
export function entropyOf(token: TokenData): number | null {
  let mass = 0;
  let bits = 0;
  let counted = 0;
  const add = (p: number) => {
    if (p > 0) bits -= p * Math.log2(p);
    mass += p;
    counted++;
  };
  for (const other of token.top) if (other.logprob !== null) add(Math.exp(Math.min(0, other.logprob)));
  if (counted === 0) return null;
  const chosen = probabilityOf(token);
  if (chosen !== null && !token.top.some((other) => other.id === token.id)) add(chosen);
  const rest = 1 - mass;
  if (rest > 1e-9) bits -= rest * Math.log2(rest);
  return Math.max(0, bits);
}

/** Seconds since the token before; null for the first, whose time is the TTFT, and where times are unknown. */
export function latencyOf(tokens: readonly TokenData[], index: number): number | null {
  const [before, now] = [tokens[index - 1]?.t, tokens[index]?.t];
  return before == null || now == null || now < before ? null : now - before;
}

export interface Scale {
  readonly metric: Metric;
  readonly ramp: "unsure" | "slow";
  /** What stands before the labels. */
  readonly unit: string;
  readonly labels: readonly string[];
  /** 0 (no colour) to 6. */
  step(tokens: readonly TokenData[], index: number): number;
}

const P = [0.995, 0.95, 0.8, 0.6, 0.4, 0.2];
const RANK = [0, 1, 2, 4, 9, 19];
const BITS = [0.25, 0.5, 1, 2, 3, 4];

function above(value: number | null, bounds: readonly number[]): number {
  if (value === null) return 0;
  let step = 0;
  while (step < bounds.length && value >= (bounds[step] as number)) step++;
  return step;
}

/** 1, 2 or 5 times a power of ten, the least that is not below x. */
function niceAbove(x: number): number {
  const ten = 10 ** Math.floor(Math.log10(x));
  return ten * ([1, 2, 5].find((m) => m * ten >= x * 0.999) ?? 10);
}

/** Milliseconds at which colour begins: above what half of the tokens took, so that what is coloured was slow for this run. */
export function latencyUnit(tokens: readonly TokenData[]): number {
  const times: number[] = [];
  for (let i = 1; i < Math.min(tokens.length, 400); i++) {
    const seconds = latencyOf(tokens, i);
    if (seconds !== null && seconds > 0) times.push(seconds * 1000);
  }
  const median = times.sort((a, b) => a - b)[times.length >> 1];
  return median ? Math.min(10_000, Math.max(0.1, niceAbove(median * 1.1))) : 1;
}

export function scaleFor(metric: Metric, tokens: readonly TokenData[]): Scale {
  const noun = { metric, ramp: "unsure" } as const;
  if (metric === "probability") {
    return {
      ...noun,
      unit: "p ≥",
      labels: ["1", ".95", ".8", ".6", ".4", ".2", "0"],
      step: (all, i) => {
        const p = all[i] && probabilityOf(all[i]);
        return p == null ? 0 : P.filter((bound) => p < bound).length;
      },
    };
  }
  if (metric === "rank") {
    return {
      ...noun,
      unit: "rank",
      labels: ["1", "2", "3", "≤5", "≤10", "≤20", ">20"],
      step: (all, i) => RANK.filter((bound) => (all[i]?.rank ?? 0) > bound).length,
    };
  }
  if (metric === "entropy") {
    return { ...noun, unit: "bits ≥", labels: ["0", ".25", ".5", "1", "2", "3", "4"], step: (all, i) => above(all[i] ? entropyOf(all[i]) : null, BITS) };
  }
  const unit = latencyUnit(tokens);
  const bounds = [1, 2, 4, 8, 16, 32].map((m) => m * unit);
  return {
    metric,
    ramp: "slow",
    unit: "ms ≥",
    labels: ["0", ...bounds.map((b) => String(Number(b.toPrecision(3))))],
    step: (all, i) => {
      const seconds = latencyOf(all, i);
      return above(seconds === null ? null : seconds * 1000, bounds);
    },
  };
}

export interface Captured {
  readonly metrics: readonly Metric[];
  /** Why some are not there; null if all are. */
  readonly reason: string | null;
}

/** Metrics this run captured. The first tokens tell: a run captures for all of its tokens or for none. */
export function captured(tokens: readonly TokenData[]): Captured {
  const head = tokens.slice(0, 64);
  const metrics: Metric[] = [];
  if (head.some((token) => token.logprob !== null)) metrics.push("probability");
  if (head.some((token) => token.rank !== null)) metrics.push("rank");
  if (head.some((token) => token.top.length > 1)) metrics.push("entropy");
  if (head.some((token) => token.t !== null)) metrics.push("latency");
  if (!metrics.includes("probability")) return { metrics, reason: "no probabilities: run with --logprobs 5" };
  return { metrics, reason: metrics.includes("entropy") ? null : "no entropy: run with --logprobs 5" };
}

export interface Piece {
  readonly text: string;
  /** A sign for white space, not text of the model. */
  readonly sign: boolean;
}

const SIGNS: Readonly<Record<string, string>> = { " ": "\u2423", "\t": "\u21e5", "\n": "\u21b5" };

/** A token's text with signs for white space that would not be seen: all of a blank token, line ends and tabs of any. */
export function pieces(raw: string): readonly Piece[] {
  if (raw === "") return [{ text: "\u2205", sign: true }];
  const text = visibleText(raw);
  const blank = text.trim() === "";
  const out: Piece[] = [];
  for (const part of text.match(/[ ]+|\t|\n|[^ \t\n]+/g) ?? [text]) {
    const sign = SIGNS[part[0] ?? ""];
    if (sign && (blank || part[0] !== " ")) {
      out.push({ text: sign.repeat(part.length), sign: true });
      if (part[0] !== " ") out.push({ text: part, sign: false });
      else out.push({ text: "\u200b", sign: false });
    } else out.push({ text: part, sign: false });
  }
  return out;
}

/** The same in one line, for a label: no real line break or tab. */
export function labelText(raw: string): string {
  return visibleText(raw).replace(/[ \t\n]/g, (blank) => (raw.trim() === "" || blank !== " " ? (SIGNS[blank] ?? blank) : blank)) || "\u2205";
}

const FULL = 48;
const OVERFULL = 400;

/** Whether a new stretch begins with token `next`: after a line end once there is enough, else at a word when there is too much. */
export function stretchEnds(length: number, last: TokenData, next: TokenData): boolean {
  if (length >= FULL && last.text.endsWith("\n")) return true;
  return length >= OVERFULL && (/^\s/.test(next.text) || length >= OVERFULL * 2);
}
