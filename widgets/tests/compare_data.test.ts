import { diffWordsWithSpace } from "diff";
import { describe, expect, it } from "vitest";

import { alike, isRewritten, leavesAt, letterOf, likeness, meanP, onlyChanges, parseGroup, piecesOf, smoothed, summaryOf, votesOf, type Group } from "../src/compare_data";
import { columnsOf, sorted, tableText, type Mark } from "../src/compare_rows";

const run = (over: object = {}) => ({
  schema: "mlxnb.run/1",
  id: "r",
  status: "done",
  model: "m",
  labels: {},
  text: "",
  tokens: [],
  usage: {},
  seed: { value: 7, explicit: true },
  finish_reason: "stop",
  stop: null,
  error: null,
  timing: { ended: 1 },
  phases: [],
  request: {},
  prompt: { messages: null, text: "x", prefill: "" },
  ...over,
});
const group = (...runs: object[]): Group => {
  const parsed = parseGroup({ schema: "mlxnb.group/1", runs });
  if ("message" in parsed) throw new Error(parsed.message);
  return parsed;
};
const token = (id: number, logprob?: number) => ({
  id,
  text: String(id),
  origin: "sampled",
  t: 0,
  ...(logprob === undefined ? {} : { logprob, rank: 0, top: [] }),
});

describe("names of answers", () => {
  it("letters go on after Z as in a spreadsheet", () => {
    expect([0, 25, 26, 51, 52, 255].map(letterOf)).toEqual(["A", "Z", "AA", "AZ", "BA", "IV"]);
  });
  it("shows only the labels that differ", () => {
    const { answers, names } = group(run({ labels: { temp: 0, top_p: 0.9 } }), run({ labels: { temp: 0.7, top_p: 0.9 } }));
    expect(names).toEqual(["temp"]);
    expect(answers.map((answer) => answer.label)).toEqual(["temp 0", "temp 0.7"]);
  });
  it("falls back to a short seed, then to a number", () => {
    expect(group(run()).answers[0]!.label).toBe("seed 7");
    expect(group(run({ seed: { value: 12345678901234567, explicit: false } })).answers[0]!.label).toBe("answer 1");
  });
});

describe("hostile groups", () => {
  it.each(
    [null, 1, "x", [], {}, { schema: "mlxnb.group/2", runs: [] }, { schema: "mlxnb.group/1" }, { schema: "mlxnb.group/1", runs: "x" }].map((raw) => [
      raw,
    ]),
  )("gives a sentence for %j", (raw) => {
    expect(parseGroup(raw)).toHaveProperty("message");
  });
  it("members of any type do not throw", () => {
    const { answers } = group(null as never, 3 as never, [] as never, { labels: [1], tokens: "x", usage: 3, timing: null, text: {} });
    expect(answers).toHaveLength(4);
    expect(() => tableText({ answers, names: [], note: null }, new Map())).not.toThrow();
  });
  it("says when answers are left out", () => {
    expect(group(...Array.from({ length: 600 }, () => run())).note).toMatch(/512 of 600/);
  });
});

describe("equal answers", () => {
  it("ignores letter case, space and a final stop, and keeps order of frequency", () => {
    const votes = votesOf(group(run({ text: "Oslo" }), run({ text: "Paris." }), run({ text: " paris" }), run({ text: "PARIS\n" })).answers);
    expect(votes.map((vote) => vote.members)).toEqual([[1, 2, 3], [0]]);
  });
  it("gives stopped, failed, running and empty answers no vote", () => {
    const { answers } = group(...["stopped", "failed", "running"].map((status) => run({ status, text: "Paris" })), run({ text: "  " }));
    expect(votesOf(answers)).toEqual([]);
  });
  it("keeps apart what differs in a digit or in an inner stop", () => {
    expect(alike("3.14")).not.toBe(alike("314"));
    expect(alike("42")).not.toBe(alike("43"));
  });
  it("a prefill is part of the answer", () => {
    const votes = votesOf(group(run({ text: "b", prompt: { messages: null, text: "", prefill: "a" } }), run({ text: "ab" })).answers);
    expect(votes).toHaveLength(1);
  });
});

describe("differences", () => {
  const diff = diffWordsWithSpace;
  it("joins back to both texts", () => {
    const [one, two] = ["Ice floats because it is light.", "Ice floats since it is so light."];
    const pieces = piecesOf(diff, one, two)!;
    const join = (...kinds: string[]) =>
      pieces
        .filter((piece) => kinds.includes(piece.kind))
        .map((piece) => piece.text)
        .join("");
    expect([join("same", "del"), join("same", "add")]).toEqual([one, two]);
  });
  it("words changed in a row read as one stretch, and still join back to both texts", () => {
    const [one, two] = ["the water around it. When it", "the water it pushes aside. When it"];
    const pieces = piecesOf(diff, one, two)!;
    const join = (...kinds: string[]) =>
      pieces
        .filter((piece) => kinds.includes(piece.kind))
        .map((piece) => piece.text)
        .join("");
    expect([join("same", "del"), join("same", "add")]).toEqual([one, two]);
    expect(
      smoothed([
        { kind: "del", text: "a" },
        { kind: "add", text: "x" },
        { kind: "same", text: " " },
        { kind: "del", text: "b" },
        { kind: "add", text: "y" },
        { kind: "same", text: " end" },
      ]),
    ).toEqual([
      { kind: "del", text: "a b" },
      { kind: "add", text: "x y" },
      { kind: "same", text: " end" },
    ]);
  });
  it("one short word between two changes goes with them, a longer one stands", () => {
    const kinds = (word: string) =>
      smoothed([
        { kind: "del", text: "aa" },
        { kind: "add", text: "xx" },
        { kind: "same", text: ` ${word} ` },
        { kind: "add", text: "yy" },
      ]).map((piece) => piece.kind);
    expect(kinds("it")).toEqual(["del", "add"]);
    expect(kinds("water")).toEqual(["del", "add", "same", "add"]);
  });
  it("likeness is 1 for equal texts, 0 for foreign ones, and never above 1", () => {
    expect(likeness(piecesOf(diff, "a b c", "a b c")!)).toBe(1);
    expect(likeness(piecesOf(diff, "a b c", "x y z")!)).toBe(0);
    expect(likeness(piecesOf(diff, "a", "a b c d")!)).toBeCloseTo(0.25);
    expect(isRewritten(piecesOf(diff, "a b c", "x y z")!)).toBe(true);
  });
  it("declines texts that would hold the page", () => {
    expect(
      piecesOf(
        () => {
          throw new Error("must not be called");
        },
        "a".repeat(30_000),
        "b".repeat(30_000),
      ),
    ).toBeNull();
    expect(piecesOf(() => undefined, "a", "b")).toBeNull();
  });
  it("cuts long equal stretches to their edges", () => {
    const cut = onlyChanges([
      { kind: "same", text: "a b c d e f g h i j k l " },
      { kind: "add", text: "X" },
      { kind: "same", text: " m n" },
    ]);
    expect(cut.map((piece) => piece.text)).toEqual(["… j k l ", "X", " m n"]);
  });
  it("leavesAt counts from 1 and is null for a mere longer answer", () => {
    const { answers } = group(
      run({ tokens: [1, 2, 3].map((id) => token(id)) }),
      run({ tokens: [1, 9].map((id) => token(id)) }),
      run({ tokens: [1, 2].map((id) => token(id)) }),
    );
    expect([leavesAt(answers[0]!, answers[1]!), leavesAt(answers[0]!, answers[2]!)]).toEqual([2, null]);
  });
});

describe("figures", () => {
  it("mean p is the geometric mean of what was captured and follows a growing run", () => {
    const tokens = [token(1, Math.log(0.5)), token(2, Math.log(0.125))];
    const record = { schema: "mlxnb.group/1", runs: [run({ tokens })] };
    const read = () => meanP((parseGroup(record) as Group).answers[0]!.run)!;
    expect(read()).toBeCloseTo(0.25);
    tokens.push(token(3, Math.log(1)));
    expect(read()).toBeCloseTo(0.0625 ** (1 / 3));
    expect(meanP(group(run({ tokens: [token(1)] })).answers[0]!.run)).toBeNull();
  });
  it("sums up states", () => {
    const { answers } = group(...["waiting", "loading", "prefill", "running", "done", "stopped", "failed"].map((status) => run({ status })));
    expect(summaryOf(answers)).toMatchObject({ total: 7, ended: 3, running: 2, waiting: 2, stopped: 1, failed: 1 });
  });
  it("sorts numbers before words, keeps ties in order, and turns round", () => {
    const set = group(run({ labels: { k: "word" } }), run({ labels: { k: 10 } }), run({ labels: { k: 9 } }), run({ labels: { k: 10 } }));
    const order = (down: boolean) => sorted(set.answers, "label:k", down, new Map(), new Map()).map((answer) => answer.index);
    expect(order(false)).toEqual([2, 1, 3, 0]);
    expect(order(true)).toEqual([0, 1, 3, 2]);
  });
  it("has a column of probabilities only where they were captured", () => {
    const names = (set: Group) => columnsOf(set, "A").map((column) => column.name);
    expect(names(group(run(), run()))).not.toContain("p");
    expect(names(group(run({ tokens: [token(1, -1)] }), run()))).toContain("p");
  });
});

describe("copy as a table", () => {
  const lines = (set: Group, marks = new Map<number, Mark>()) => tableText(set, marks).split("\n");
  it("quotes what has tabs, quotes or line breaks", () => {
    expect(tableText(group(run({ text: 'a\t"b"\nc' })), new Map())).toContain('"a\t""b""\nc"');
  });
  it.each(["=cmd()", "+1+1", "@x", "-a"])("disarms the formula %s", (text) => {
    expect(lines(group(run({ text })))[1]!.split("\t")[1]).toBe(`'${text}`);
  });
  it("leaves a negative number alone", () => {
    expect(lines(group(run({ text: "-4" })))[1]!.split("\t")[1]).toBe("-4");
  });
  it("carries the votes", () => {
    const [, one, two] = lines(
      group(run(), run()),
      new Map([
        [0, 1],
        [1, -1],
      ]),
    );
    expect([one!.endsWith("\tgood"), two!.endsWith("\tbad")]).toEqual([true, true]);
  });
});
