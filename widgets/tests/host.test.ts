import { effect } from "@preact/signals";
import { afterEach, describe, expect, it, vi } from "vitest";

import { applyDelta, liveHost, savedHost } from "../src/host";
import type { DeltaItem } from "../src/protocol";
import { FakeModel, record, soon, token } from "./records";

const item = (over: object = {}): DeltaItem => ({ key: "k", run: 0, at: 0, tokens: [token("a")], text_at: 0, text: "a", ...over }) as DeltaItem;
const textOf = (value: unknown) => (value as { text: string }).text;
const tokensOf = (value: unknown) => (value as { tokens: { text: string }[] }).tokens.map((one) => one.text);

afterEach(() => vi.useRealTimers());

describe("a delta", () => {
  it("appends its tokens, its text and the fields that changed", () => {
    const applied = applyDelta(record({ text: "x", tokens: [token("x")] }), item({ at: 1, text_at: 1, status: { status: "done", finish_reason: "stop" } }));
    expect(applied).toMatchObject({ ok: true, record: { text: "xa", status: "done", finish_reason: "stop" } });
    expect(applied.ok && tokensOf(applied.record)).toEqual(["x", "a"]);
  });

  it("grows the token array in place and makes everything else new", () => {
    const before = record({ tokens: [token("x")], text: "x" });
    const applied = applyDelta(before, item({ at: 1, text_at: 1 }));
    if (!applied.ok) throw new Error(applied.reason);
    expect(applied.record).not.toBe(before);
    expect((applied.record as typeof before).tokens).toBe(before.tokens);
    expect(before.text).toBe("x");
  });

  it("that overlaps adds only what is new, in tokens and in text alike", () => {
    const applied = applyDelta(record({ tokens: [token("a"), token("b")], text: "ab" }), item({ at: 0, tokens: [token("a"), token("b"), token("c")], text_at: 0, text: "abc" }));
    expect(applied.ok && [textOf(applied.record), tokensOf(applied.record)]).toEqual(["abc", ["a", "b", "c"]]);
    const again = applyDelta(applied.ok && applied.record, item({ at: 0, tokens: [token("a")], text_at: 0, text: "a" }));
    expect(again.ok && [textOf(again.record), tokensOf(again.record)]).toEqual(["abc", ["a", "b", "c"]]);
  });

  it("that comes too early, or lacks a place, is a gap and changes nothing", () => {
    const before = record({ tokens: [token("x")], text: "x" });
    const bad = [{ at: 2, text_at: 1 }, { at: 1, text_at: 2 }, { at: -1, text_at: 1 }, { at: "1", text_at: 1 }, { at: 1, text_at: undefined }, { at: Number.NaN, text_at: 1 }];
    for (const over of bad) expect(applyDelta(before, item(over)), JSON.stringify(over)).toEqual({ ok: false, reason: "gap" });
    expect([before.text, before.tokens.length]).toEqual(["x", 1]);
  });

  it("counts text in the units of a string here, so that emoji shift nothing", () => {
    const applied = applyDelta(record({ text: "👩🏽‍🔬", tokens: [token("👩🏽‍🔬")] }), item({ at: 1, text_at: "👩🏽‍🔬".length, text: "!" }));
    expect(applied.ok && textOf(applied.record)).toBe("👩🏽‍🔬!");
  });

  it("goes to its run of a group and leaves the others as they are", () => {
    const group = { schema: "mlxnb.group/1", runs: [record({ id: "r0" }), record({ id: "r1" })] };
    const applied = applyDelta(group, item({ run: 1 }));
    if (!applied.ok) throw new Error(applied.reason);
    const { runs } = applied.record as typeof group;
    expect(runs[0]).toBe(group.runs[0]);
    expect(textOf(runs[1])).toBe("a");
    expect(applyDelta(group, item({ run: 5 }))).toEqual({ ok: false, reason: "unknown run" });
    for (const odd of [null, 3, [], "x"]) expect(applyDelta(odd, item())).toMatchObject({ ok: false });
  });
});

function live(over: object = {}) {
  const session = new FakeModel();
  const model = new FakeModel({ key: "k", kind: "run", record: record(), state: "live", ...over });
  const host = liveHost(model.any, session.any);
  const delta = (...items: DeltaItem[]) => session.emit("msg:custom", { type: "delta", seq: 1, items }, []);
  return { session, model, host, delta };
}

describe("the live host", () => {
  it("takes the deltas of its own key, one change for a message", () => {
    const { host, delta } = live();
    let changes = -1;
    effect(() => {
      void host.record.value;
      changes++;
    });
    delta(item(), item({ key: "other", text: "no" }), item({ at: 1, text_at: 1, text: "b", tokens: [token("b")] }));
    expect(textOf(host.record.value)).toBe("ab");
    expect(changes).toBe(1);
  });

  it("never changes the model's own trait", () => {
    const { host, model, delta } = live();
    delta(item());
    expect(model.get("record")).toEqual(record());
    expect(tokensOf(host.record.value)).toEqual(["a"]);
  });

  it("acknowledges each message once, with the time of a frame, for all its views together", async () => {
    const { session, model, delta } = live();
    liveHost(new FakeModel({ ...model.traits, key: "other" }).any, session.any);
    delta(item());
    await soon(80);
    const acks = session.sent.filter((message) => message.type === "ack");
    expect(acks).toEqual([{ type: "ack", seq: 1, frame_ms: expect.any(Number) }]);
  });

  it("acknowledges by the page's own way to the kernel where there is one, which is open during a cell", async () => {
    const slot = Symbol.for("mlxnb.control");
    const page = globalThis as { [key: symbol]: unknown };
    const took: unknown[] = [];
    page[slot] = (...words: unknown[]) => took.push(words) > 0;
    try {
      const { session, delta } = live();
      Object.assign(session, { model_id: "session-id" });
      delta(item());
      await soon(80);
      expect(took).toEqual([["session-id", { method: "custom", content: { type: "ack", seq: 1, frame_ms: expect.any(Number) } }]]);
      expect(session.sent).toEqual([]);
    } finally {
      delete page[slot];
    }
  });

  it("does not acknowledge a message that asks for none", async () => {
    const { session, host } = live();
    session.emit("msg:custom", { type: "delta", seq: 7, items: [item()], ack: false }, []);
    await soon(80);
    expect(textOf(host.record.value)).toBe("a");
    expect(session.sent).toEqual([]);
  });

  it("repairs a gap by the snapshot, asked for once", async () => {
    const { session, host, delta } = live();
    session.answerWith(() => ({ ok: true, result: { record: record({ text: "abcd", tokens: ["a", "b", "c", "d"].map((text) => token(text)) }) } }));
    delta(item({ at: 3, text_at: 3 }));
    delta(item({ at: 4, text_at: 4 }));
    await soon();
    expect(session.sent.filter((message) => message.name === "snapshot")).toHaveLength(1);
    expect(textOf(host.record.value)).toBe("abcd");
    delta(item({ at: 4, text_at: 4, text: "e", tokens: [token("e")] }));
    expect(textOf(host.record.value)).toBe("abcde");
  });

  it("falls back to the trait if the snapshot is refused", async () => {
    const { session, model, host, delta } = live();
    session.answerWith(() => ({ ok: false, error: "gone" }));
    model.traits.record = record({ text: "trait", tokens: [] });
    delta(item({ at: 9, text_at: 9 }));
    await soon();
    expect(textOf(host.record.value)).toBe("trait");
  });

  it("ignores a trait that is behind, takes one that is ahead, and always the final one", () => {
    const { model, host, delta } = live();
    delta(item(), item({ at: 1, text_at: 1, tokens: [token("b")], text: "b" }));
    model.set("record", record({ text: "a", tokens: [token("a")] }));
    expect(textOf(host.record.value)).toBe("ab");
    model.set("record", record({ text: "abc", tokens: [token("a"), token("b"), token("c")] }));
    expect(textOf(host.record.value)).toBe("abc");
    model.traits.state = "final";
    model.set("record", record({ text: "short", tokens: null, tokens_note: "dropped", status: "done" }));
    expect(textOf(host.record.value)).toBe("short");
    expect(host.final.value).toBe(true);
  });

  it("pairs answers with commands by id and gives a refusal as an error in words", async () => {
    const { session, host } = live();
    session.answerWith((name) => (name === "stop" ? { ok: true, result: { stopped: 1 } } : { ok: false, error: "There is no such turn." }));
    session.emit("msg:custom", { type: "answer", id: "nobody", ok: true }, []);
    await expect(host.command("stop", { run: 0 })).resolves.toEqual({ stopped: 1 });
    await expect(host.command("chat.edit")).rejects.toThrow("There is no such turn.");
    expect(session.sent[0]).toMatchObject({ type: "command", key: "k", name: "stop", args: { run: 0 } });
    expect(new Set(session.sent.map((message) => message.id)).size).toBe(2);
  });

  it("says so when the kernel does not answer", async () => {
    vi.useFakeTimers();
    const { host } = live();
    const refused = expect(host.command("regenerate")).rejects.toThrow("The kernel did not answer");
    await vi.advanceTimersByTimeAsync(16_000);
    await refused;
  });

  it("says soon what helps when a stop is not answered, as by a kernel that reads messages between cells only", async () => {
    vi.useFakeTimers();
    const { host } = live();
    const refused = expect(host.command("stop")).rejects.toThrow("interrupt the kernel");
    await vi.advanceTimersByTimeAsync(2_100);
    await refused;
  });

  it("sends a stop again until it is answered, with one id, and everything else once", async () => {
    vi.useFakeTimers();
    const { session, host } = live();
    const stopped = host.command("stop");
    host.command("regenerate").catch(() => undefined);
    await vi.advanceTimersByTimeAsync(700);
    const names = session.sent.map((message) => message.name);
    expect(names).toEqual(["stop", "regenerate", "stop", "stop"]);
    const ids = session.sent.filter((message) => message.name === "stop").map((message) => message.id);
    expect(new Set(ids).size).toBe(1);
    session.emit("msg:custom", { type: "answer", id: ids[0], ok: true, result: 1 }, []);
    await expect(stopped).resolves.toBe(1);
    await vi.advanceTimersByTimeAsync(5_000);
    expect(session.sent).toHaveLength(4);
  });

  it("stops by the page's own way to the kernel, and by the comm where that has no such comm, fails or is not answered", async () => {
    vi.useFakeTimers();
    const slot = Symbol.for("mlxnb.control");
    const page = globalThis as { [key: symbol]: unknown };
    const took: unknown[] = [];
    const ways: [unknown, boolean][] = [
      [(...words: unknown[]) => took.push(words) > 0, true],
      [() => false, false],
      [() => { throw new Error("closed"); }, false],
      ["no function", false],
    ];
    try {
      for (const [way, takes] of ways) {
        page[slot] = way;
        const { session, host } = live();
        Object.assign(session, { model_id: "session-id" });
        host.command("stop", { run: 2 }).catch(() => undefined);
        host.command("branch").catch(() => undefined);
        expect(session.sent.map((message) => message.name), String(way)).toEqual(takes ? ["branch"] : ["stop", "branch"]);
        await vi.advanceTimersByTimeAsync(250);
        expect(session.sent.at(-1)).toMatchObject({ name: "stop", key: "k", args: { run: 2 } });
      }
      expect(took).toEqual([["session-id", { method: "custom", content: expect.objectContaining({ type: "command", key: "k", name: "stop", args: { run: 2 } }) }]]);
    } finally {
      delete page[slot];
    }
  });

  it("survives messages that are not ours", () => {
    const { session, host } = live();
    for (const odd of [null, 3, "x", [], {}, { type: "delta" }, { type: "delta", items: 3 }, { type: "delta", items: [null, 3, { key: "k" }] }, { type: "answer" }]) session.emit("msg:custom", odd, []);
    expect(textOf(host.record.value)).toBe("");
  });

  it("hears nothing after it is disposed of", () => {
    const { model, host, delta } = live();
    host.dispose();
    delta(item());
    model.set("record", record({ text: "late", tokens: [token("late")] }));
    expect(textOf(host.record.value)).toBe("");
    expect(model.listening()).toBe(0);
  });
});

describe("the saved host", () => {
  it("shows its record and refuses commands in words", async () => {
    const host = savedHost({ a: 1 }, { view: "tokens" });
    expect([host.live, host.record.value, host.setting]).toEqual([false, { a: 1 }, { theme: "auto", view: "tokens" }]);
    await expect(host.command("stop")).rejects.toThrow("saved");
  });
});
