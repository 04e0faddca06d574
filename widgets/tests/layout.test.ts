import { describe, expect, it } from "vitest";

import { captured, entropyOf, labelText, latencyUnit, pieces, scaleFor, stretchEnds } from "../src/layout";
import { parseToken, type TokenData } from "../src/parse";
import { token } from "./records";

const t = (over: object = {}): TokenData => parseToken(token("x", over));
const p = (...probabilities: number[]) => probabilities.map((q) => t({ logprob: Math.log(q), rank: 0 }));
const steps = (metric: Parameters<typeof scaleFor>[0], tokens: readonly TokenData[]) => tokens.map((_, i) => scaleFor(metric, tokens).step(tokens, i));

describe("the ramp", () => {
  it("of probability gives a certain token no colour and an unlikely one the last", () => {
    expect(steps("probability", p(1, 0.996, 0.97, 0.9, 0.7, 0.5, 0.3, 0.1))).toEqual([0, 0, 1, 2, 3, 4, 5, 6]);
  });

  it("of rank begins with the second", () => {
    expect(steps("rank", [0, 1, 2, 3, 4, 5, 9, 10, 19, 20, 900].map((rank) => t({ rank })))).toEqual([0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6]);
  });

  it("of a metric that was not captured is no colour", () => {
    for (const metric of ["probability", "rank", "entropy", "latency"] as const) expect(steps(metric, [parseToken({}), parseToken({})])).toEqual([0, 0]);
  });

  it("of latency fits the run: half of its tokens stay plain, at any speed", () => {
    for (const speed of [0.002, 0.07, 3]) {
      let at = 0;
      const tokens = Array.from({ length: 41 }, (_, i) => t({ t: (at += speed * (i % 10 === 9 ? 20 : 1)) }));
      const found = steps("latency", tokens);
      expect(found.filter((step) => step === 0).length).toBeGreaterThan(20);
      expect(Math.max(...found)).toBeGreaterThanOrEqual(4);
      expect(scaleFor("latency", tokens).labels).toHaveLength(7);
    }
  });

  it("of latency is sane without times, and with times that run backwards", () => {
    expect(latencyUnit([])).toBe(1);
    expect(latencyUnit([t({ t: 5 }), t({ t: 1 }), t({ t: null })])).toBe(1);
    expect(steps("latency", [t({ t: 5 }), t({ t: 1 })])).toEqual([0, 0]);
  });
});

describe("entropy", () => {
  const top = (...q: number[]) => t({ logprob: Math.log(q[0] ?? 1), top: q.map((one, id) => ({ id, text: "a", logprob: Math.log(one) })), id: 0 });
  it("is that of the captured tokens with the rest as one more", () => {
    expect(entropyOf(top(0.5, 0.5))).toBeCloseTo(1, 6);
    expect(entropyOf(top(0.5, 0.25))).toBeCloseTo(1.5, 6);
    expect(entropyOf(top(1))).toBeCloseTo(0, 6);
    expect(entropyOf(t({ logprob: -1 }))).toBeNull();
  });
});

describe("what was captured", () => {
  it("decides which metrics there are, with one reason for what is missing", () => {
    expect(captured([t()])).toEqual({ metrics: ["latency"], reason: "no probabilities: run with --logprobs 5" });
    expect(captured([t({ logprob: -1, rank: 0 })])).toEqual({ metrics: ["probability", "rank", "latency"], reason: "no entropy: run with --logprobs 5" });
    expect(captured([t({ logprob: -1, rank: 0, top: [{ id: 1, text: "a", logprob: -1 }, { id: 2, text: "b", logprob: -2 }] })]).reason).toBeNull();
  });
});

describe("signs for white space", () => {
  const signs = (text: string) => pieces(text).filter((piece) => piece.sign).map((piece) => piece.text).join("");
  it("stand in tokens that would not be seen, and nowhere else", () => {
    expect([" ", "  ", "\n", "\t", " \n", "\n\n", "", " a b", "a\n", "\ta"].map(signs)).toEqual(["␣", "␣␣", "↵", "⇥", "␣↵", "↵↵", "∅", "", "↵", "⇥"]);
  });
  it("keep the text of the token beside them", () => {
    for (const text of ["\n", " a\n\tb", "a  b\n\n"]) expect(pieces(text).filter((piece) => !piece.sign).map((piece) => piece.text).join("").replaceAll("\u200b", "")).toBe(text);
  });
  it("leave a label in one line", () => {
    expect([" ", "a\nb", " the", "\t", "", "a\x1b["].map(labelText)).toEqual(["␣", "a↵b", " the", "⇥", "∅", "a␛["]);
  });
});

describe("a stretch of tokens", () => {
  it("ends at a line end once it has enough, and at a word when it has too much", () => {
    const [line, word, part] = [parseToken(token("x\n")), parseToken(token(" y")), parseToken(token("y"))];
    expect(stretchEnds(10, line, word)).toBe(false);
    expect(stretchEnds(60, line, word)).toBe(true);
    expect(stretchEnds(60, part, word)).toBe(false);
    expect(stretchEnds(500, part, word)).toBe(true);
    expect(stretchEnds(500, part, part)).toBe(false);
    expect(stretchEnds(900, part, part)).toBe(true);
  });
});
