import { describe, expect, it } from "vitest";

import * as samples from "../gallery/samples_trees";
import { blockWidth, lanesOf, parseCache, sharing, stateAt, statesOf, tokensOf, type Edge } from "../src/cache_data";

const edges = parseCache(samples.cacheTree)!.edges;
const edge = (over: Partial<Edge>): Edge => ({ id: "x", parent: null, root: 0, at: 0, blocks: 1, tail: 0, bytes: 100, states: [["r", 1]], users: [], userCount: 0, shares: 1, head: "", ...over });

describe("lanes", () => {
  it("hang below what they depart from, with the way up", () => {
    expect(lanesOf(edges).map(({ edge: one, up, first }) => [one.id, up, first])).toEqual([
      ["a", null, false],
      ["b", 1, false],
      ["c", 1, false],
      ["d", 2, false],
      ["e", 4, false],
      ["f", 1, false],
      ["g", null, true],
      ["h", 1, false],
    ]);
  });
  it("a chain of ten thousand branches is no recursion", () => {
    const deep = Array.from({ length: 10_000 }, (_, i) => edge({ id: `${i}`, parent: i ? i - 1 : null, at: i }));
    expect(lanesOf(deep)).toHaveLength(10_000);
  });
  it("an edge that names a later one, or itself, as its parent hangs at the root", () => {
    const found = parseCache({ ...samples.cacheTree, edges: [{ id: "a", parent: 0 }, { id: "b", parent: 7 }, { id: "c", parent: 0, blocks: 2 }, null] })!.edges;
    expect(found.map(({ parent }) => parent)).toEqual([null, null, 0, null]);
  });
});

it("states cover exactly the blocks there are", () => {
  expect(statesOf("r12s3", 15)).toEqual([["r", 12], ["s", 3]]);
  expect(statesOf("r12s3", 20)).toEqual([["r", 12], ["s", 3], ["r", 5]]);
  expect(statesOf("l99999999", 4)).toEqual([["l", 4]]);
  expect(statesOf("<b>", 2)).toEqual([["r", 2]]);
  const one = edge({ blocks: 5, states: [["m", 2], ["r", 3]] });
  expect([0, 1, 2, 4].map((block) => stateAt(one, block)).join("")).toBe("mmrr");
});

it("blocks are as wide as the longest way leaves room for", () => {
  expect(blockWidth(edges, 430)).toBeCloseTo(13);
  expect(blockWidth([edge({ at: 900, blocks: 100 })], 500)).toBeCloseTo(0.5);
});

it("tells the tokens of a block, and of the part-filled one at the end", () => {
  const one = edge({ at: 20, blocks: 2, tail: 37 });
  expect([tokensOf(one, 0), tokensOf(one, 2)]).toEqual([[1280, 1343], [1408, 1444]]);
});

it("says what sharing saves, and nothing where nothing is shared", () => {
  expect(sharing([edge({ bytes: 100, shares: 3 }), edge({ bytes: 100 })])).toEqual({ factor: 2, saved: 200 });
  expect(sharing([edge({})])).toBeNull();
  expect(sharing([])).toBeNull();
});

it("any record is a map or none, never a throw", () => {
  for (const raw of [null, 7, [], {}, { schema: "mlxnb.cache/2" }]) expect(parseCache(raw)).toBeNull();
  const odd = parseCache({ schema: "mlxnb.cache/1", state: 7, ram: [], edges: "x", users: [3], gone: [[]], disk: 4, counts: null });
  expect(odd).toMatchObject({ state: "not started", edges: [], disk: null, ram: { used: 0 } });
});
