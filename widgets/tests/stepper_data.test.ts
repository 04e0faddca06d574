import { describe, expect, it } from "vitest";

import { atWork, cellOf, fate, isOn, parseStepper, probabilityAt, restAt, scoreAt, STAGES, toggled, type Stepper } from "../src/stepper_data";
import { drawAxis, drawOf } from "../src/stepper_draw";

/** A vocabulary of six, worked out by hand from logits, as the engine does it: top-p .9, min-p .2, T .5. */
function sample(over: object = {}, stepOver: object = {}) {
  const logits = [3, 2, 1.5, 0.5, 0, -2];
  const lse = Math.log(logits.reduce((sum, x) => sum + Math.exp(x), 0));
  const logprobs = logits.map((x) => x - lse);
  const p = logprobs.map(Math.exp);
  const dropped = [null, null, null, "min_p", "top_p", "top_p"];
  const kept = [0, 1, 2];
  const z = kept.reduce((sum, i) => sum + Math.exp(logprobs[i]! / 0.5), 0);
  const sum = (...ids: number[]) => ids.reduce((total, i) => total + p[i]!, 0);
  return {
    schema: "mlxnb.stepper/1",
    status: "ready",
    model: "m",
    error: null,
    finish_reason: null,
    settings: { temp: 0.5, top_p: 0.9, min_p: 0.2 },
    past: [
      { id: 9, text: "The", how: "prompt" },
      { id: 8, text: " sea", how: "hand", probability: 0.1, rank: 4, dropped_by: "min_p" },
    ],
    step: {
      position: 1,
      vocab: 6,
      logsumexp: lse,
      chosen: 1,
      coin: null,
      seconds: 0.07,
      stages: [
        { name: "temperature", rule: "0.5", left: 3, mass: 1 },
        { name: "model", rule: "", left: 6, mass: 1 },
        { name: "penalties", rule: "", left: 6, mass: 1 },
        { name: "top_p", rule: "0.9", left: 4, mass: sum(0, 1, 2, 3) },
        { name: "min_p", rule: "0.2", left: 3, mass: sum(0, 1, 2) },
      ],
      candidates: logits.map((logit, id) => ({
        id,
        text: `t${id}`,
        logit,
        penalised: logit,
        logprob: logprobs[id],
        kept: dropped[id] === null,
        dropped_by: dropped[id],
        probability_after: dropped[id] === null ? Math.exp(logprobs[id]! / 0.5) / z : 0,
        noise: dropped[id] === null ? [0.1, 2.5, -0.4][id] : null,
        seen: 0,
      })),
      ...stepOver,
    },
    ...over,
  };
}
const parsed = (raw: unknown): Stepper => {
  const stepper = parseStepper(raw);
  if (!stepper?.step) throw new Error("no step");
  return stepper;
};

describe("the order of the engine", () => {
  it("is kept even if a record lists its stages otherwise", () => {
    expect(parsed(sample()).step!.stages.map((stage) => stage.name)).toEqual(["model", "penalties", "top_p", "min_p", "temperature"]);
    expect(STAGES.indexOf("temperature")).toBe(STAGES.length - 1);
  });
  it("each column is a distribution: what is listed and the rest make one", () => {
    const { step } = parsed(sample());
    step!.stages.forEach((stage, index) => {
      const listed = step!.candidates
        .filter((candidate) => fate(candidate, stage.name) === "in")
        .map((candidate) => probabilityAt(step!, candidate, stage)!);
      expect(listed.reduce((sum, value) => sum + value, 0)).toBeCloseTo(1, 9);
      expect(restAt(step!, index)).toEqual({ count: 0, mass: expect.closeTo(0, 9) });
    });
  });
  it("a token dropped by min-p passes top-p, falls at min-p with the figure it came with, and is gone after", () => {
    const { step } = parsed(sample());
    const third = step!.candidates.find((candidate) => candidate.id === 3)!;
    const states = step!.stages.map((_, index) => cellOf(step!, third, index));
    expect(states.map((cell) => cell.state)).toEqual(["in", "in", "in", "out", "gone"]);
    expect(states[3]!.value).toBe(states[2]!.value);
  });
  it("scores go from logits to log probabilities to log probabilities over T", () => {
    const { step } = parsed(sample());
    const best = step!.candidates[0]!;
    const scores = step!.stages.map((stage) => scoreAt(best, stage, 0.5));
    expect(scores.slice(0, 2)).toEqual([3, 3]);
    expect(scores[4]).toBeCloseTo(scores[2]! * 2);
  });
});

describe("what a record leaves out", () => {
  it("the sum of all scores follows from untouched scores, and is not made up for touched ones", () => {
    const of = (touch: number) => {
      const raw = sample({}, { logsumexp: null });
      const candidates = raw.step.candidates.map((one, i) => ({ ...one, penalised: i === 1 ? one.logit! - touch : one.penalised }));
      return parsed({ ...raw, step: { ...raw.step, candidates } }).step!.logsumexp;
    };
    expect(of(0)).toBeCloseTo(parsed(sample()).step!.logsumexp!);
    expect(of(0.5)).toBeNull();
  });
  it("idle rules take no column, and greedy has none but the penalties", () => {
    const { step } = parsed(sample());
    const names = (settings: object) => atWork(step!, settings as never).stages.map((stage) => stage.name);
    expect(names({ temp: 0.5, top_p: 0.9, min_p: 0 })).toEqual(["model", "top_p", "temperature"]);
    expect(names({ temp: 0, top_p: 0.9, repetition_penalty: 1.1 })).toEqual(["model", "penalties"]);
  });
  it("a share that is not known is no figure", () => {
    const raw = sample();
    const stages = raw.step.stages.map((stage) => (stage.name === "top_p" ? { ...stage, mass: null, left: null } : stage));
    const { step } = parsed({ ...raw, step: { ...raw.step, stages } });
    expect(cellOf(step!, step!.candidates[0]!, 2).value).toBeNull();
    expect(restAt(step!, 2)).toEqual({ count: null, mass: null });
  });
});

describe("the draw", () => {
  it("the largest sum of score and noise is first, and dropped tokens take no part", () => {
    const draws = drawOf(parsed(sample()).step!, 0.5);
    expect(draws.map((draw) => draw.candidate.id)).toEqual([1, 0, 2]);
    expect(draws[0]!.sum).toBeCloseTo(draws[0]!.score + 2.5);
  });
  it("greedy draws nothing", () => {
    expect(drawOf(parsed(sample()).step!, 0)).toEqual([]);
  });
  it("one axis holds every score and sum", () => {
    const draws = drawOf(parsed(sample()).step!, 0.5);
    const at = drawAxis(draws);
    for (const draw of draws) for (const value of [draw.score, draw.sum]) expect(at(value)).toBeGreaterThanOrEqual(0);
    expect(at(draws[0]!.sum)).toBeCloseTo(1);
    expect(Number.isFinite(drawAxis(draws.slice(0, 1).map((draw) => ({ ...draw, sum: draw.score })))(draws[0]!.score))).toBe(true);
  });
});

describe("hostile records", () => {
  it.each([null, [], "x", {}, { schema: "mlxnb.stepper/2" }].map((raw) => [raw]))("%j is none of ours", (raw) =>
    expect(parseStepper(raw)).toBeNull(),
  );
  it("drops what has no id or no finite log probability, twins and unknown stages", () => {
    const bad = [{ id: 1, logprob: "-inf" }, { id: "x", logprob: -1 }, null, 7, { id: 5, logprob: -1 }, { id: 5, logprob: -2 }];
    const { step } = parsed(sample({}, { candidates: bad, stages: [{ name: "__proto__" }, 3, { name: "model", left: "many", mass: -1 }] }));
    expect(step!.candidates.map((candidate) => candidate.id)).toEqual([5]);
    expect(step!.stages).toEqual([{ name: "model", rule: "", left: null, mass: null }]);
  });
  it("a step without candidates is no step", () => {
    expect(parseStepper(sample({}, { candidates: [] }))!.step).toBeNull();
    expect(parseStepper(sample({ step: "x", past: "x", settings: 3, status: "?" }))).toMatchObject({ step: null, past: [], status: "waiting" });
  });
  it("holds huge records to a size", () => {
    const many = Array.from({ length: 50_000 }, (_, id) => ({ id, text: "x".repeat(9000), logprob: -id }));
    const stepper = parsed(sample({ past: many }, { candidates: many }));
    expect([stepper.past.length, stepper.step!.candidates.length]).toEqual([8192, 256]);
    expect(stepper.step!.candidates[0]!.text.length).toBeLessThanOrEqual(401);
  });
});

describe("switches", () => {
  it("know the neutral values of the engine", () => {
    const off = { repetition_penalty: 1, presence_penalty: 0, top_p: 1, min_p: 0, top_k: 0, temp: 0, xtc_probability: 0 };
    expect(STAGES.filter((stage) => isOn(off, stage))).toEqual(["model"]);
    expect(STAGES.filter((stage) => isOn({}, stage))).toEqual(["model"]);
  });
  it("turn a stage off and on again with the value it had", () => {
    expect(toggled({ top_p: 0.8 }, "top_p", {})).toEqual({ top_p: 1 });
    expect(toggled({ top_p: 1 }, "top_p", { top_p: 0.8 })).toEqual({ top_p: 0.8 });
    expect(toggled({ top_p: 1 }, "top_p", {})).toEqual({ top_p: 0.95 });
    expect(toggled({}, "model", {})).toEqual({});
  });
});
