import { describe, expect, it } from "vitest";

import { readNumbers, unpackRecord, unpackTokens } from "../src/unpack";
import fixture from "./packed.json";

type Loose = Record<string, any>;

describe("packed token tables", () => {
  it("come back as the kernel reads them", () => {
    const record = unpackRecord(fixture.record) as Loose;
    expect(record.tokens).toEqual(fixture.tokens);
    expect(record.text).toBe(fixture.text);
  });

  it("are read in every run of a group", () => {
    const group = unpackRecord({ schema: "mlxnb.group/1", runs: [fixture.record, null, 3] }) as Loose;
    expect(group.runs[0].tokens).toHaveLength(fixture.tokens.length);
    expect(group.runs.slice(1)).toEqual([null, 3]);
  });

  it("leave plain records as they are", () => {
    for (const value of [null, 3, "x", [], {}, { tokens: [] }, { tokens: null }]) expect(unpackRecord(value)).toEqual(value);
  });

  it("read numbers of several digits, and nothing else", () => {
    expect(readNumbers("!")).toEqual([0]);
    expect(() => readNumbers("~")).toThrow();
    expect(() => readNumbers('"')).toThrow();
    expect(() => readNumbers("~".repeat(50) + "!")).toThrow();
  });

  it("become a note where they are damaged, never an error", () => {
    const good = fixture.record.tokens as Loose;
    for (const name of Object.keys(good)) {
      if (name === "count") continue;
      for (const damage of [null, 7, "~", [], {}, [["sampled", 1e12]], { unit: 1, steps: "~" }]) {
        const record = unpackRecord({ ...fixture.record, tokens: { ...good, [name]: damage } }) as Loose;
        if (record.tokens !== null) expect(Array.isArray(record.tokens)).toBe(true);
        else expect(record.tokens_note).toMatch(/cannot be read/);
      }
    }
    expect(() => unpackTokens({ ...good, origin: [["sampled", 1e12]] })).toThrow();
  });
});
