import { describe, expect, it } from "vitest";

import { MAX_RUNS, MAX_TOKENS, parseRecord, type Parsed, type RunData } from "../src/parse";
import { record, token } from "./records";

const runOf = (value: unknown): RunData => {
  const parsed = parseRecord(value);
  if (parsed.kind !== "run") throw new Error(JSON.stringify(parsed));
  return parsed.run;
};

/** Any value that JSON can carry, and a few it cannot. */
const ODD: readonly unknown[] = [
  null, undefined, true, 0, -1, 1e308, Number.NaN, "", "x", "nan", "\ud800", [], [[]], {}, { length: 1e9 }, { toString: 1 }, JSON.parse('{"__proto__": {"polluted": 1}, "constructor": 3}'),
  Array.from({ length: 300 }, (_, i) => i), { a: { b: { c: [] } } }, () => 1, Symbol("s"), 10n,
];

describe("a record", () => {
  it("of this version becomes a run", () => {
    const run = runOf(record({ text: "ab", tokens: [token("a"), token("b", { origin: "forced", logprob: -0.5, rank: 0, top: [{ id: 1, text: "c", logprob: -1, masked: "no" }] })], status: "done" }));
    expect(run.answer).toBe("ab");
    expect(run.live).toBe(false);
    expect(run.tokens[1]).toMatchObject({ origin: "forced", logprob: -0.5, top: [{ text: "c", masked: "no" }] });
    expect(run.tokens[0]).toMatchObject({ logprob: null, rank: null, top: [] });
    expect(run.seed).toBe("7");
  });

  it("of another version, or of none, becomes a notice in words", () => {
    const messages = [{ schema: "mlxnb.run/2" }, { schema: "mlxnb.new/1" }, { schema: 3 }, {}, null, 5, "x", [], { schema: "mlxnb.group/1" }].map((value) => {
      const parsed = parseRecord(value);
      expect(parsed.kind, JSON.stringify(value)).toBe("notice");
      return (parsed as Extract<Parsed, { kind: "notice" }>).message;
    });
    expect(messages[0]).toContain("another version of mlxnb (mlxnb.run/2)");
    for (const message of messages) expect(message).toMatch(/^This output .*\.$/);
  });

  it("with any field of any type never throws and gives values of the right type", () => {
    for (const name of Object.keys(record())) {
      if (name === "schema") continue;
      for (const odd of ODD) {
        const run = runOf(record({ [name]: odd }));
        expect(typeof run.answer).toBe("string");
        expect(Array.isArray(run.tokens) && Array.isArray(run.phases) && Array.isArray(run.messages)).toBe(true);
        expect(run.usage.promptTokens === null || Number.isSafeInteger(run.usage.promptTokens)).toBe(true);
      }
    }
    expect(({} as { polluted?: unknown }).polluted).toBeUndefined();
  });

  it("with any field inside of any type never throws", () => {
    for (const odd of ODD) {
      const t = { id: odd, text: odd, origin: odd, t: odd, logprob: odd, rank: odd, top: odd, by_hand: odd };
      const inner = record({
        tokens: [t, odd, { ...t, top: [odd, { id: odd, text: odd, logprob: odd, masked: odd }] }], phases: [odd, { kind: odd, t: odd, until: odd, done: odd, total: odd }],
        usage: { prompt_tokens: odd, prompt_tokens_details: odd, execution: { steps: odd, declined: odd, codec: odd } }, error: { kind: odd, message: odd, hint: odd },
        timing: { started: odd, first_token: odd, ended: odd }, prompt: { messages: [odd, { role: odd, content: odd }], text: odd, prefill: odd }, seed: { value: odd }, labels: { a: odd }, request: { max_tokens: odd },
      });
      const run = runOf(inner);
      expect(run.tokens).toHaveLength(3);
      for (const one of run.tokens) expect(typeof one.text === "string" && (one.t === null || Number.isFinite(one.t))).toBe(true);
      expect(parseRecord({ schema: "mlxnb.group/1", runs: [odd, inner] })).toMatchObject({ kind: "group" });
    }
  });

  it("that is huge is cut and says so", () => {
    const tokens = Array.from({ length: MAX_TOKENS + 5 }, () => token("x"));
    const run = runOf(record({ tokens, text: "y".repeat(3_000_000), labels: Object.fromEntries(tokens.slice(0, 100).map((_, i) => [`k${i}`, i])) }));
    expect(run.tokens).toHaveLength(MAX_TOKENS);
    expect(run.tokensNote).toContain("20,000");
    expect(run.text.length).toBeLessThan(2_100_000);
    expect(run.labels).toHaveLength(32);
    const group = parseRecord({ schema: "mlxnb.group/1", runs: Array.from({ length: MAX_RUNS + 1 }, () => record()) });
    expect(group).toMatchObject({ kind: "group", note: `Only the first ${MAX_RUNS} of 513 runs are shown.` });
  });

  it("without its tokens says so, and damaged packed ones do too", () => {
    expect(runOf(record({ tokens: null, tokens_note: "Dropped: larger than 64 kB." })).tokensNote).toBe("Dropped: larger than 64 kB.");
    expect(runOf(record({ tokens: null })).tokensNote).toBe("This output was saved without its tokens.");
    for (const table of [{}, { form: 1 }, { form: 2, ids: "!" }, { form: 1, ids: "~~~~", lengths: "!", texts: "", index: "", t: { unit: 1, steps: "" }, origin: [] }, { form: 1, ids: "", lengths: "", texts: "", index: "", t: { unit: 1, steps: "" }, origin: [["sampled", 1e9]] }]) {
      expect(runOf(record({ tokens: table })).tokensNote).toBe("The tokens of this output cannot be read.");
    }
  });

  it("that grows is read again only where it is new", () => {
    const tokens = [token("a")];
    const first = runOf(record({ tokens }));
    const known = first.tokens[0];
    tokens.push(token("b"));
    const second = runOf(record({ tokens }));
    expect(second.tokens).toBe(first.tokens);
    expect(second.tokens[0]).toBe(known);
    expect(second.tokens).toHaveLength(2);
  });

  it("takes log probabilities that JSON has no number for", () => {
    const [a, b, c] = runOf(record({ tokens: [token("a", { logprob: "-inf" }), token("b", { logprob: "nan" }), token("c", { logprob: 3 })] })).tokens;
    expect([a?.logprob, b?.logprob, c?.logprob]).toEqual([-Infinity, null, 0]);
  });
});
