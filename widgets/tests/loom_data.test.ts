import { describe, expect, it } from "vitest";

import * as samples from "../gallery/samples_trees";
import { costOf, cuts, drawn, leastCertain, nodesOf, parseLoom, pathText, pathTo, segmentsBelow, wanted, ways, weave, type Node, type Segment, type Shown } from "../src/loom_data";
import { neighbours, shortened } from "../src/loom_tree";
import type { TokenData } from "../src/parse";
import { record } from "./records";

type Row = { words: string; kind?: string; given?: number; finish?: string | null; status?: string; top?: Record<number, string[]> };
const idOf = (word: string): number => [...word].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)!) % 1_000_003, 1);

/** "a|b" is two tokens. top: position -> alternatives, likeliest first. */
function loomOf(rows: Row[], over: object = {}) {
  const runs = rows.map(({ words, finish = "stop", status, top = {} }, index) =>
    record({
      id: `r.${index}`,
      status: status ?? "done",
      finish_reason: status === "running" ? null : finish,
      text: words.replaceAll("|", ""),
      tokens: (words ? words.split("|") : []).map((text, at) => ({
        id: idOf(text),
        text,
        origin: "sampled",
        t: at,
        ...(top[at] ? { logprob: Math.log(0.5), rank: 0, top: top[at].map((other, rank) => ({ id: idOf(other), text: other, logprob: Math.log(0.5 / 2 ** rank) })) } : {}),
      })),
    }),
  );
  const marks = { kept: [], pruned: [], opened: [], growing: 0, temp: 1 };
  return parseLoom({ schema: "mlxnb.loom/1", model: "m", runs, rows: rows.map(({ kind = "sample", given = 0 }) => ({ kind, given })), ...marks, ...over })!;
}
const treeOf = (rows: Row[], over: object = {}) => {
  const tree = weave(loomOf(rows, over));
  return { tree, top: segmentsBelow(tree.root) };
};
const shape = (segments: readonly Segment[]): unknown[] =>
  segments.map(({ text, first, kids, mark }) => [text, first.samples, ...(first.rows ? [`+${first.rows}`] : []), ...(mark ? [mark] : []), ...(kids.length ? [shape(kids)] : [])]);

describe("the merge", () => {
  it("has what is shared once, in pieces between the branches, with counts", () => {
    const { top, tree } = treeOf([{ words: "a|b|c" }, { words: "a|b|d" }, { words: "a|x" }, { words: "a|b|c" }]);
    expect(shape(top)).toEqual([["a", 4, [["b", 3, [["c", 2], ["d", 1]]], ["x", 1]]]]);
    expect([tree.size, tree.samples, tree.sampled, ways(top)]).toEqual([5, 4, 11, 3]);
  });
  it("an answer that is the beginning of another ends within it", () => {
    const { top } = treeOf([{ words: "a|b" }, { words: "a|b|c" }]);
    expect(shape(top)).toEqual([["ab", 2, [["c", 1]]]]);
    expect([top[0]!.last.ends, ways(top)]).toEqual([1, 2]);
  });
  it("a continuation counts from where it was given, a probe's own draw not at all", () => {
    const { top } = treeOf([{ words: "a|b", finish: "length" }, { words: "a|b|c", kind: "more", given: 2 }, { words: "a|q", kind: "probe", given: 1, top: { 1: ["b", "z"] } }]);
    expect(shape(top)).toEqual([["ab", 1, [["c", 0, "+1"]]]]);
    expect(top[0]!.first.next.map(({ text }) => text)).toEqual(["b", "z"]);
    expect(top[0]!.last).toMatchObject({ cut: 1, ends: 0 });
  });
  it("what was opened stands there without a count, also below a place that no sample took", () => {
    const place = { run: 0, at: 1, token: null };
    const { top } = treeOf([{ words: "a|b", top: { 1: ["b", "x", "y"] } }, { words: "a|x|q", kind: "probe", given: 2, top: { 2: ["u", "v"] } }], {
      opened: [
        { ...place, ids: [idOf("b"), idOf("x")] },
        { run: 1, at: 2, token: null, ids: [idOf("u"), idOf("v")] },
      ],
    });
    expect(shape(top)).toEqual([["a", 1, [["b", 1], ["x", 0, [["u", 0], ["v", 0]]]]]]);
    const ghost = top[0]!.kids[1]!.kids[0]!.last;
    expect([ghost.place, ghost.p]).toEqual([{ run: 1, at: 2, token: idOf("u") }, 0.5]);
  });
  it("marks find their place whichever run they name it by, and cut the piece there", () => {
    const { top } = treeOf([{ words: "a|b|c" }, { words: "a|b|c" }], { kept: [{ run: 1, at: 2, token: null }] });
    expect(shape(top)).toEqual([["ab", 2, "kept", [["c", 2]]]]);
    const pruned = treeOf([{ words: "a|b|c" }, { words: "a|b|c" }, { words: "a|d|e" }], { pruned: [{ run: 0, at: 2, token: null }] }).top;
    expect(pruned[0]!.kids.map(({ mark, kids }) => [mark, kids.map(({ gone }) => gone)])).toEqual([["pruned", [true]], [null, []]]);
  });
  it("keys stay the same while the tree grows", () => {
    const short = treeOf([{ words: "a|b", status: "running" }]).top[0]!;
    const { top } = treeOf([{ words: "a|b|c", status: "running" }, { words: "a|b|d" }]);
    expect(top[0]!.key).toBe(short.key);
    expect(pathText(pathTo(top, top[0]!.kids[1]!.key))).toMatch(/^ab[cd]$/);
    const keys: string[] = [];
    const walk = (node: Node) => (keys.push(node.key), node.kids.forEach(walk));
    walk(treeOf(Array.from({ length: 500 }, (_, i) => ({ words: `a|${i}|${i * 7}|x` }))).tree.root);
    expect(new Set(keys).size).toBe(keys.length);
    expect(keys.length).toBe(2 + 3 * 500);
  });
  it("an answer that was saved without its tokens is one piece of text, equal ones once", () => {
    const loom = parseLoom({ ...samples.loomPoor });
    expect(segmentsBelow(weave(loom!).root).map(({ text, first }) => [text.slice(0, 9), first.samples])[0]).toEqual([" found th", 3]);
  });
  it("a character that several tokens make up belongs to the last of them", () => {
    const token = (text: string) => ({ text }) as TokenData;
    expect(cuts(["x", "\ufffd", "\ufffd", "\ufffd", "y"].map(token), "x海y")).toEqual([1, 1, 1, 2, 3]);
    expect(cuts([" a", " b"].map(token), "a b")).toEqual([1, 3]);
    expect(cuts(["a", " END"].map(token), "a")).toEqual([1, 1]);
  });
  it("tells the least certain token of a path", () => {
    const { top } = treeOf([{ words: "a|b", top: { 0: ["a", "q"] } }, { words: "q|c" }]);
    const nodes = nodesOf(pathTo(top, top.find(({ text }) => text === "qc")!.key));
    expect(leastCertain(nodes)).toMatchObject({ text: "q", p: 0.25 });
  });
});

describe("what is drawn", () => {
  const many = treeOf(Array.from({ length: 40 }, (_, i) => ({ words: `a|w${i}|x${i}` }))).top;
  it("folds what is too much, and says how many rows that are", () => {
    const { top } = drawn(many, "all", new Set());
    expect([top[0]!.kids.length, top[0]!.folded, top[0]!.foldedRows]).toEqual([6, 34, 34]);
    expect(drawn(many, "all", new Set([many[0]!.key])).top[0]!.kids.length).toBe(40);
  });
  it("stays within its bounds, the nearest to the prompt first", () => {
    const deep = treeOf(Array.from({ length: 256 }, (_, i) => ({ words: [...i.toString(2).padStart(8, "0")].map((bit, at) => `${at}${bit}`).join("|") }))).top;
    const count = (list: readonly Shown[]): number => list.reduce((sum, one) => sum + 1 + count(one.kids), 0);
    expect(count(drawn(deep, "all", new Set(), 60).top)).toBeLessThanOrEqual(60);
  });
  it("kept and ended paths can be told from the others", () => {
    const { top } = treeOf([{ words: "a|b", finish: "length" }, { words: "a|c" }], { kept: [{ run: 0, at: 2, token: null }] });
    const kids = top[0]!.kids;
    const told = (show: "kept" | "ends") => kids.filter((one) => wanted(one, show)).map(({ text }) => text);
    expect([told("kept"), told("ends")]).toEqual([["b"], ["c"]]);
    expect(drawn(top, "kept", new Set()).top[0]!.kids.map(({ segment }) => segment.text)).toEqual(["b"]);
  });
  it("the arrows lead to what is beside", () => {
    const { top } = treeOf([{ words: "a|b" }, { words: "a|c" }, { words: "q|r" }]);
    const list = drawn(top, "all", new Set()).top;
    const [a, q] = [top[0]!, top[1]!];
    expect(neighbours(list, a.key)).toEqual({ parent: undefined, kid: a.kids[0]!.key, above: undefined, below: q.key });
    expect(neighbours(list, a.kids[1]!.key)).toMatchObject({ parent: a.key, above: a.kids[0]!.key });
    expect(neighbours(list, "nowhere")).toEqual({});
  });
  it("a long piece keeps its beginning and its end", () => {
    expect(shortened(`${"word ".repeat(60)}the end`)).toMatch(/^word .* … .*the end$/);
    expect(shortened(" one\n\ntwo ")).toBe("one ↵ two");
    expect(shortened("x".repeat(400)).length).toBeLessThan(130);
  });
});

it("an expansion says what it costs", () => {
  expect(costOf(4, 4, 2, true)).toEqual({ places: 20, rows: 4 });
  expect(costOf(3, 3, 1, true)).toEqual({ places: 3, rows: 0 });
  expect(costOf(8, 8, 4, true).places).toBe(4680);
});

it("any record is a tree or none, never a throw", () => {
  for (const raw of [null, 7, [], {}, { schema: "mlxnb.loom/1" }, { schema: "mlxnb.loom/1", runs: [null] }, { schema: "mlxnb.loom/1", runs: "x", rows: 3 }]) expect(parseLoom(raw)).toBeNull();
  const odd = { ...samples.loomLive, rows: [{ kind: 7 }, null], kept: [{ run: 99, at: 3 }, "x", { run: 0, at: -1 }], opened: [{ run: 0, at: 99, ids: "x" }, { run: 0, at: 1, token: 3, ids: [1] }], pruned: 4 };
  expect(segmentsBelow(weave(parseLoom(odd)!).root).length).toBeGreaterThan(0);
});

it("the time of a merge grows with the number of tokens, not with its square", () => {
  const loomWith = (rows: number) => loomOf(Array.from({ length: rows }, (_, i) => ({ words: Array.from({ length: 400 }, (__, at) => `w${at < 20 ? at : at * 61 + i}`).join("|") })));
  const cpuMs = (loom: ReturnType<typeof loomWith>) =>
    Math.min(
      ...[1, 2, 3, 4].map(() => {
        const began = process.cpuUsage();
        segmentsBelow(weave(loom).root);
        return process.cpuUsage(began).user / 1000;
      }),
    );
  const [few, many] = [loomWith(8), loomWith(64)];
  const [one, eight] = [cpuMs(few), cpuMs(many)];
  expect(eight / one, `${one} ms for 8 rows, ${eight} ms for 64`).toBeLessThan(32);
});
