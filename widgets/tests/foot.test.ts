import { expect, it } from "vitest";

import { promptParts } from "../src/foot";
import { parseRecord, type RunData } from "../src/parse";
import { record } from "./records";

function runOf(prompt: number | null, cached?: number, ssd?: number): RunData {
  const details = cached === undefined ? {} : { prompt_tokens_details: { cached_tokens: cached, ...(ssd === undefined ? {} : { ssd_tokens: ssd }) } };
  const parsed = parseRecord(record({ usage: { ...(prompt === null ? {} : { prompt_tokens: prompt }), ...details } }));
  if (parsed.kind !== "run") throw new Error(parsed.kind);
  return parsed.run;
}
const said = (...runs: RunData[]) => promptParts(runs).map(({ label, count, note }) => [label, count, note].filter((part) => part !== undefined).join(" "));

it("says what of a prompt was cached, came from the SSD, and was computed", () => {
  expect(said(runOf(400))).toEqual(["cached 0", "prefilled 400"]);
  expect(said(runOf(400, 384))).toEqual(["cached 384", "prefilled 16"]);
  expect(said(runOf(400, 384, 64))).toEqual(["cached 384 (64 from the SSD)", "prefilled 16"]);
  expect(said(runOf(400, 384, 384))).toEqual(["cached 384 from the SSD", "prefilled 16"]);
});

it("adds up over several prompts, and no damaged count makes more of it than there is", () => {
  expect(said(runOf(400, 384, 64), runOf(100, 0), runOf(null))).toEqual(["cached 384 (64 from the SSD)", "prefilled 116"]);
  expect(said(runOf(10, 999, 5000))).toEqual(["cached 10 from the SSD", "prefilled 0"]);
  expect(said(runOf(null))).toEqual([]);
});
