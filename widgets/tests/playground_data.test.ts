import { describe, expect, it } from "vitest";

import { changedNames, chosenSettings, costOf, DEFAULTS, figure, KNOBS, parsePlayground, parseSettings, typed } from "../src/playground_data";

const run = {
  schema: "mlxnb.run/1",
  status: "done",
  text: "x",
  tokens: [],
  usage: { prompt_tokens: 30, completion_tokens: 11 },
  timing: { first_token: 0.5, ended: 2.5 },
};
const record = (over: object = {}) => ({
  schema: "mlxnb.playground/1",
  model: "m",
  mode: "chat",
  prompt: "Why?",
  settings: { temp: 0.5, seed: 3 },
  runs: [run],
  error: null,
  ...over,
});

describe("settings", () => {
  it("come in the order of the engine", () => {
    expect(KNOBS.map((knob) => knob.name)).toEqual(["repetition_penalty", "top_p", "min_p", "top_k", "temp"]);
  });
  it("wrong values fall back or are held in range", () => {
    expect(parseSettings({ temp: "hot", top_p: 7, top_k: -2, max_tokens: 1e9, seed: null })).toEqual({ ...DEFAULTS, top_p: 1, max_tokens: 4096 });
  });
  it.each([
    ["temp", "0,8", 0.8],
    ["temp", "3", 3],
    ["top_p", "3", null],
    ["top_k", "500", 500],
    ["temp", "-1", null],
    ["temp", "", null],
    ["top_k", "40", 40],
    ["seed", "-1", null],
    ["seed", "12", 12],
    ["max_tokens", "0", null],
    ["max_tokens", "1e9", 4096],
    ["top_p", "nan", null],
  ] as const)("%s typed as %j is %j", (name, text, value) => expect(typed(name, text)).toBe(value));
  it("a neutral value is said in a word", () => {
    expect(KNOBS.map((knob) => figure(knob, knob.neutral))).toEqual(["off", "off", "off", "off", "greedy"]);
    expect(figure(KNOBS[4]!, 0.7)).toBe("0.7");
    expect(figure(KNOBS[1]!, 0.95)).toBe("0.95");
  });
});

describe("what changed", () => {
  it("names the prompt and each setting", () => {
    const asked = { prompt: "a", settings: DEFAULTS };
    expect(changedNames(asked, { prompt: "b", settings: { ...DEFAULTS, temp: 1 } })).toEqual(["prompt", "temp"]);
    expect(changedNames(asked, asked)).toEqual([]);
    expect(changedNames(null, asked)).toEqual(["prompt"]);
  });
});

describe("what it costs", () => {
  const last = parsePlayground(record())!.run;
  it("is the last reading of the prompt plus its pace times the most tokens", () => {
    expect(costOf(last, ["temp"], { ...DEFAULTS, max_tokens: 100 })).toMatchObject({
      promptTokens: 30,
      maxTokens: 100,
      seconds: expect.closeTo(20.5),
    });
  });
  it("is unknown before anything ran", () => {
    expect(costOf(null, ["prompt"], DEFAULTS)).toMatchObject({ promptTokens: null, seconds: null });
  });
  it("a new prompt has no known length", () => expect(costOf(last, ["prompt"], DEFAULTS).promptTokens).toBeNull());
  it("says what stays the same, by the engine's rule of seed and position", () => {
    expect(costOf(last, ["temp"], DEFAULTS).reason).toMatch(/Same seed, same noise/);
    expect(costOf(last, ["seed"], DEFAULTS).reason).toMatch(/Another seed/);
    expect(costOf(last, ["seed"], { ...DEFAULTS, temp: 0 }).reason).toMatch(/no effect/);
    expect(costOf(last, ["max_tokens"], DEFAULTS).reason).toMatch(/length/);
  });
});

describe("hostile records", () => {
  it.each([null, [], {}, { schema: "mlxnb.run/1" }].map((raw) => [raw]))("%j is none", (raw) => expect(parsePlayground(raw)).toBeNull());
  it("wrong parts do not throw", () => {
    expect(parsePlayground(record({ settings: [], runs: { length: 9 }, mode: "x", prompt: {}, error: 3, model: null }))).toMatchObject({
      run: null,
      mode: "chat",
      prompt: "",
      model: "",
      error: "",
    });
  });
});

describe("what is sent", () => {
  it("is what a person chose, also where that is taken back before the kernel has said so", () => {
    const inForce = { ...DEFAULTS, top_p: 0.9 };
    expect(chosenSettings(inForce, inForce)).toEqual({});
    expect(chosenSettings({ ...inForce, temp: 1 }, inForce, inForce)).toEqual({ temp: 1 });
    expect(chosenSettings(inForce, inForce, { ...inForce, temp: 1 })).toEqual({ temp: inForce.temp });
  });
});
