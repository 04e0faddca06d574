import { describe, expect, it } from "vitest";

import { advance, columnsOf, EMPTY, lanesOf, memoryOf, parseStatus, placed, withPast, type History } from "../src/monitor_data";

const row = (slot: number, id: string, over: object = {}) => ({ slot, id, label: `[${id}]`, phase: "running", tokens: 10, kv_bytes: 100, ...over });
const status = (t: number, slots: object[], over: object = {}, model: object = {}) => ({
  state: "ready",
  t,
  backend: { device: "cpu" },
  loading: [],
  limits: { max_rows: 8 },
  ended: [],
  models: [
    {
      name: "m",
      weights: "bf16",
      weight_bytes: 1000,
      rows: slots.length,
      preparing: 0,
      queue: 0,
      kv_bytes: 50,
      steps: t * 10,
      tokens: t * 20,
      codec: "bf16",
      slots,
      waiting: [],
      ...model,
    },
  ],
  ...over,
});
const fold = (...snapshots: object[]): History => snapshots.reduce<History>((history, raw) => advance(history, parseStatus(raw, 0)!), EMPTY);

describe("rates", () => {
  it("are differences over the time between two snapshots", () => {
    const { samples } = fold(status(1, []), status(3, []));
    expect(samples[1]).toMatchObject({ tokensPerS: 20, forwardsPerS: 10, perForward: 2 });
  });
  it("are unknown for the first snapshot and where tokens are not counted", () => {
    expect(fold(status(1, [])).samples[0]!.tokensPerS).toBeNull();
    expect(fold(status(1, [], {}, { tokens: null }), status(2, [], {}, { tokens: null })).samples[1]).toMatchObject({
      tokensPerS: null,
      forwardsPerS: 10,
      perForward: null,
    });
  });
  it("a row's own speed comes from its own tokens", () => {
    expect(fold(status(1, [row(0, "a", { tokens: 10 })]), status(2, [row(0, "a", { tokens: 24 })])).rates.get("a")).toBe(14);
  });
});

describe("bars", () => {
  it("a row that came and went between two snapshots has its bar, in the first slot that was free", () => {
    const end = (id: string, from: number, to: number) => ({ id, how: "done", label: `[${id}]`, from, to });
    const ended = [end("x", 1.2, 1.3), end("y", 1.25, 1.4), end("z", 1.5, 1.6), { id: "q", how: "stopped", label: "q", from: null, to: 1.5 }];
    const { spans } = fold(status(1, []), status(2, [], { ended }), status(3, [], { ended }));
    expect(spans.map((span) => [span.id, span.slot, span.from, span.to])).toEqual([["x", 0, 1.2, 1.3], ["y", 1, 1.25, 1.4], ["z", 0, 1.5, 1.6]]);
    const past = { schema: "mlxnb.history/1", labels: { x: "[x]" }, moments: [{ t: 1, models: [], ended: [] }, { t: 2, models: [], ended: [["x", "done", 1.2, 1.3], ["old", "done"]] }] };
    expect(withPast(fold(status(3, [])), past).spans).toMatchObject([{ id: "x", label: "[x]", slot: 0, to: 1.3, how: "done" }]);
    const seen = fold(status(1, [row(0, "a")]), status(2, [], { ended: [end("a", 0.9, 1.5)] })).spans;
    expect(seen).toMatchObject([{ id: "a", from: 0.9, to: 1.5, how: "done" }]);
    expect(fold(status(1, []), status(2, [row(0, "b", { from: 1.7 })])).spans).toMatchObject([{ id: "b", from: 1.7, to: null }]);
  });
  it("a row that leaves closes its bar, with how it ended", () => {
    const { spans } = fold(status(1, [row(0, "a"), row(1, "b")]), status(2, [row(0, "b")], { ended: [{ id: "a", how: "stopped" }] }));
    expect(spans.find((span) => span.id === "a")).toMatchObject({ to: 2, how: "stopped" });
  });
  it("the last row moves into the hole: two bars and one move", () => {
    const { spans, moves } = fold(status(1, [row(0, "a"), row(1, "b"), row(2, "c")]), status(2, [row(0, "c"), row(1, "b")]));
    expect(moves).toEqual([{ t: 2, id: "c", label: "[c]", from: 2, to: 0 }]);
    expect(spans.filter((span) => span.id === "c").map((span) => [span.slot, span.how, span.movedIn])).toEqual([
      [2, "moved", false],
      [0, "running", true],
    ]);
  });
  it("lanes have no holes in the running rows and never two bars at once", () => {
    const history = fold(status(1, [row(0, "a"), row(1, "b")]), status(2, [row(0, "b")]), status(3, [row(0, "b"), row(1, "d")]));
    for (const lane of lanesOf(history, 60)) {
      const open = lane.spans.filter((span) => span.to === null);
      expect(open.length).toBeLessThanOrEqual(1);
    }
    expect(lanesOf(history, 60)).toHaveLength(8);
    expect(
      lanesOf(history, 60)
        .map((lane) => Boolean(lane.slotNow))
        .slice(0, 3),
    ).toEqual([true, true, false]);
  });
  it("reading the prompt is the head of a bar and ends when the row runs", () => {
    const { spans } = fold(status(1, [row(0, "a", { phase: "prefill" })]), status(2, [row(0, "a", { phase: "prefill" })]), status(4, [row(0, "a")]));
    expect(spans).toHaveLength(1);
    expect(spans[0]).toMatchObject({ from: 1, promptUntil: 2, to: null });
  });
  it("waiting rows have bars of their own, which end when they start", () => {
    const { waits } = fold(status(1, [], {}, { waiting: [{ id: "q", label: "[4]", why: "memory" }] }), status(2, [row(0, "q")]));
    expect(waits).toEqual([{ id: "q", label: "[4]", from: 1, to: 2 }]);
  });
  it("rows of a second model get lanes after those of the first", () => {
    const two = status(1, [row(0, "a")]);
    two.models.push({ ...two.models[0]!, slots: [row(0, "z")] });
    expect(parseStatus(two, 0)!.slots!.map((slot) => slot.slot)).toEqual([0, 1]);
  });
});

describe("time", () => {
  it("another engine starts the history afresh", () => {
    expect(fold(status(100, [row(0, "a")]), status(1, [])).samples).toHaveLength(1);
    expect(fold(status(5, [], {}, { steps: 100 }), status(6, [], {}, { steps: 1 })).samples).toHaveLength(1);
  });
  it("the same snapshot twice changes nothing", () => {
    const history = fold(status(1, []));
    expect(advance(history, parseStatus(status(1, []), 0)!)).toBe(history);
  });
  it("keeps an hour, not more", () => {
    let history = EMPTY;
    for (let t = 0; t < 4000; t += 4) history = advance(history, parseStatus(status(t, []), 0)!);
    expect(history.samples[0]!.t).toBeGreaterThanOrEqual(history.last!.t - 3600);
  });
  it("a gap closes bars at the last news instead of drawing through what nobody saw", () => {
    const { spans } = fold(status(1, [row(0, "a")]), status(100, [row(0, "b")]));
    expect(spans.find((span) => span.id === "a")!.to).toBe(1);
  });
  it("silence means that nothing happened: the plot lies at zero and the next beat counts as one second", () => {
    const { samples } = fold(status(1, []), status(2, []), status(100, [row(0, "a")], {}, { steps: 25, tokens: 47 }));
    expect(samples.slice(2).map((one) => [one.t, one.rows, one.tokensPerS])).toEqual([
      [3, 0, 0],
      [99, 0, 0],
      [100, 1, 7],
    ]);
  });
  it("knows since when it is idle", () => {
    expect(
      fold(status(1, [row(0, "a")]), status(2, [], {}, { steps: 20 }), status(3, [], {}, { steps: 20 }), status(4, [], {}, { steps: 20 })).idleSince,
    ).toBe(3);
    expect(fold(status(1, [row(0, "a")])).idleSince).toBeNull();
  });
  it("places bars within the window", () => {
    expect(placed(30, null, 100, 60)).toEqual({ left: 0, width: 100 });
    expect(placed(70, 85, 100, 60)).toEqual({ left: 50, width: 25 });
    expect(placed(0, 10, 100, 60)).toEqual({ left: 0, width: 0 });
  });
  it("columns are relative to now", () => {
    expect(columnsOf(fold(status(1, []), status(2, []), status(3, [])), 1.5).t).toEqual([-1, 0]);
  });
});

describe("memory", () => {
  const parts = (over: object) => memoryOf(parseStatus(status(1, [], over), 0)!)!;
  it("adds up to the limit", () => {
    const { parts: all } = parts({ memory: { active_bytes: 1500, cache_bytes: 10, limit_bytes: 4000 } });
    expect(all.map((part) => [part.kind, part.bytes])).toEqual([
      ["weights", 1000],
      ["kv", 50],
      ["work", 450],
      ["free", 2500],
    ]);
  });
  it("without figures of the allocator it shows what is known and no free part", () => {
    expect(parts({}).parts.map((part) => part.kind)).toEqual(["weights", "kv"]);
    expect(parts({}).limit).toBeNull();
  });
});

describe("hostile snapshots", () => {
  it.each([null, 3, [], {}, { state: 4 }].map((raw) => [raw]))("%j is none", (raw) => expect(parseStatus(raw, 0)).toBeNull());
  it("wrong types anywhere give a picture with less in it", () => {
    const odd = {
      state: "ready",
      t: "x",
      models: [null, { slots: [null, 3, { slot: -1, id: "a" }, { slot: 1e9, id: "b" }, { slot: 0 }], waiting: {}, rows: "8", steps: -5 }],
      limits: [],
      ended: {},
      memory: "x",
      loading: [1],
    };
    const history = advance(EMPTY, parseStatus(odd, 12)!);
    expect(history.last).toMatchObject({ t: 12, rows: 0, steps: 0, slots: [], waiting: [], memory: null });
    expect(lanesOf(history, 60)).toHaveLength(1);
  });
  it("an engine that does not tell its rows has no lanes", () => {
    expect(parseStatus(status(1, [], {}, { slots: undefined }), 0)!.slots).toBeNull();
  });
});

describe("the past that the kernel kept", () => {
  const model = (slots: unknown[], over: object = {}) => ({ rows: slots.length, queue: 0, steps: 10, tokens: 20, slots, waiting: [], ...over });
  const past = {
    schema: "mlxnb.history/1",
    labels: { a: "[1] chat", b: "[2] sky", w: "[3] wait" },
    moments: [
      { t: 10, models: [model([[0, "a", 1]], { steps: 100, tokens: 100 })], ended: [] },
      { t: 11, models: [model([[0, "a", 0], [1, "b", 1]], { steps: 110, tokens: 120, waiting: ["w"] })], ended: [] },
      { t: 12, models: [model([[0, "b", 0]], { steps: 120, tokens: 150 })], ended: [["a", "stopped"]] },
    ],
  };
  const now = (t: number) => fold(status(t, [row(0, "b")], {}, { steps: 130, tokens: 190 }));

  it("is drawn before what the view saw itself", () => {
    const history = withPast(now(13), past);
    expect(history.last?.t).toBe(13);
    expect(history.last?.models).toEqual(["m"]); // what is now is the status itself
    expect(history.samples.map((one) => [one.t, one.tokensPerS])).toEqual([[10, null], [11, 20], [12, 30], [13, 40]]);
    expect(history.spans.map((span) => [span.id, span.label, span.slot, span.how, span.from, span.to])).toEqual([
      ["a", "[1] chat", 0, "stopped", 10, 12],
      ["b", "[2] sky", 1, "moved", 10, 12],
      ["b", "[2] sky", 0, "running", 12, null],
    ]);
    expect(history.waits).toMatchObject([{ id: "w", label: "[3] wait", from: 11, to: 12 }]);
  });
  it("adds nothing twice: moments that the view has seen are left out", () => {
    expect(withPast(now(11.5), past).samples.map((one) => one.t)).toEqual([10, 11, 11.5]);
    expect(withPast(now(10), past).samples.map((one) => one.t)).toEqual([10]);
  });
  it("is all there is before the first status", () => {
    expect(withPast(EMPTY, past).last?.t).toBe(12);
  });
  it.each([null, 7, [], {}, { schema: "mlxnb.history/1" }, { schema: "mlxnb.history/1", labels: 3, moments: [null, 7, {}, { t: "x" }, { t: 5, models: [null, { slots: [null, 7, [1], ["x", {}, 2]] }], ended: [null, [3]] }] }])(
    "may be %j",
    (raw) => expect(() => withPast(now(13), raw)).not.toThrow(),
  );
});
