/** Front ends that are not JupyterLab: no labextension, other models, `send` that fails in their own way, events that come late. */

import type { AnyModel } from "@anywidget/types";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { renderLive } from "../src/bundle";
import { liveHost } from "../src/host";
import loader from "../src/loader";
import { FakeModel, record, soon, token } from "./records";

const SLOT = Symbol.for("mlxnb.bundle");
const textOf = (value: unknown) => (value as { text: string }).text;
const delta = (text: string, at: number, textAt: number, over: object = {}) => ({
  type: "delta", seq: at + 1, items: [{ key: "k", run: 0, at, tokens: [token(text)], text_at: textAt, text, ...over }],
});
const words = (count: number) => Array.from({ length: count }, (_, i) => `w${i} `);

/** Ways in which a front end tells that a message cannot leave. */
const FAILING: readonly [string, () => unknown][] = [
  ["throws", () => { throw new Error("comm is closed"); }],
  ["throws what is no error", () => { throw "comm is closed"; }],
  ["returns a promise that is rejected", () => Promise.reject(new Error("comm is closed"))],
];

/** A model whose `send` fails so from now on. */
function failing(model: FakeModel, way: () => unknown): FakeModel {
  model.send = way as FakeModel["send"];
  return model;
}

const unhandled: unknown[] = [];
const note = (error: unknown) => unhandled.push(error);

beforeEach(() => {
  unhandled.length = 0;
  process.on("unhandledRejection", note);
  process.on("uncaughtException", note);
  delete (globalThis as { [SLOT]?: unknown })[SLOT];
});
afterEach(() => {
  vi.useRealTimers();
  process.off("unhandledRejection", note);
  process.off("uncaughtException", note);
});

describe("a front end whose messages do not leave", () => {
  for (const [name, way] of FAILING) {
    it(`(send ${name}) gets a sentence from the loader, at once, and no listener stays`, async () => {
      const model = failing(new FakeModel({ kind: "run", session: "" }), way);
      const el = document.createElement("div");
      const end = await loader.render({ model: model.any, el });
      expect(el.textContent).toBe("mlxnb cannot draw this view here (comm is closed). The answer is kept: see the run object, or run the cell again.");
      expect(model.listening()).toBe(0);
      end();
      await soon(20);
      expect(unhandled).toEqual([]);
    });

    it(`(send ${name}) still shows what comes, and a command is refused in words`, async () => {
      const model = new FakeModel({ key: "k", kind: "run", session: "", record: record(), state: "live" });
      const host = liveHost(model.any, model.any);
      failing(model, way);
      model.emit("msg:custom", delta("a", 0, 0), []);
      expect(textOf(host.record.value)).toBe("a");
      for (const command of ["stop", "branch"]) await expect(host.command(command), command).rejects.toThrow("comm is closed");
      await soon(600); // the acknowledgement of the frame, and the second try of the stop
      expect(unhandled).toEqual([]);
    });
  }
});

describe("a front end that hears nothing", () => {
  it("says so after a while, for nobody answers", async () => {
    vi.useFakeTimers();
    const model = new FakeModel({ kind: "run", session: "" });
    const el = document.createElement("div");
    const drawn = loader.render({ model: model.any, el });
    await vi.advanceTimersByTimeAsync(20_500);
    await drawn;
    expect(el.textContent).toContain("the kernel did not answer");
    expect(model.listening()).toBe(0);
  });

  it("shows the answer from the trait alone, as it grows and to its end", async () => {
    const model = new FakeModel({ key: "k", kind: "run", session: "", record: record(), state: "live" });
    const el = document.createElement("div");
    document.body.append(el);
    const end = await renderLive(model.any, el);
    const all = words(6);
    for (let n = 1; n <= all.length; n++) {
      model.set("record", record({ text: all.slice(0, n).join(""), tokens: all.slice(0, n).map((word) => token(word)), status: n === all.length ? "done" : "running" }));
      await soon(10);
      expect(el.textContent).toContain(all[n - 1]!.trim());
    }
    expect(el.querySelector(".mlxnb-bar, [role=tablist]")).not.toBeNull();
    end();
    expect(model.listening(), "the channel's own, which lives as long as the model").toBe(1);
  });
});

describe("a front end whose change events are slow", () => {
  it("never shows less than it had, and ends with the whole", () => {
    const model = new FakeModel({ key: "k", kind: "run", session: "", record: record(), state: "live" });
    const host = liveHost(model.any, model.any);
    const all = words(30);
    let text = "";
    let shown = 0;
    const grew = () => {
      const now = textOf(host.record.value).length;
      expect(now).toBeGreaterThanOrEqual(shown);
      shown = now;
    };
    all.forEach((word, n) => {
      model.emit("msg:custom", delta(word, n, text.length), []);
      text += word;
      grew();
      // The snapshot of ten tokens ago arrives now; the value is there long before the event that tells of it.
      if (n % 7 === 6) {
        const old = all.slice(0, n - 5);
        model.traits.record = record({ text: old.join(""), tokens: old.map((one) => token(one)) });
        model.emit("change:state");
        grew();
        model.emit("change:record");
        grew();
      }
    });
    model.traits.record = record({ text, tokens: all.map((one) => token(one)), status: "done" });
    model.traits.state = "final";
    grew();
    model.emit("change:record");
    expect([textOf(host.record.value), host.final.value]).toEqual([text, true]);
  });

  it("draws a record that comes after the view, as hosts do that open the model empty", async () => {
    const model = new FakeModel({ key: "k", kind: "run", session: "", state: "live" });
    const el = document.createElement("div");
    document.body.append(el);
    await renderLive(model.any, el);
    expect(el.textContent).toContain("This output");
    model.set("record", record({ text: "late", tokens: [token("late")], status: "done" }));
    await soon(10);
    expect(el.textContent).toContain("late");
  });
});

describe("a view whose traits are not what ours are", () => {
  const HOSTILE: readonly unknown[] = [null, 7, true, [], {}, { toString: 1 }, { toString: "x", valueOf: 3 }, ["IPY_MODEL_s"], "x".repeat(5000), "constructor", "__proto__"];

  it("is a notice or an empty view, whichever trait it is, and never an exception", async () => {
    for (const name of ["kind", "key", "session", "record", "state", "setting"]) {
      for (const odd of HOSTILE) {
        const model = new FakeModel({ kind: "run", key: "k", session: "", record: record(), state: "live", setting: {}, [name]: odd });
        const el = document.createElement("div");
        document.body.append(el);
        const end = await renderLive(model.any, el);
        expect(el.textContent, `${name} ${JSON.stringify(odd).slice(0, 60)}`).not.toBe("");
        end();
        el.remove();
      }
    }
  });

  it("takes messages of any shape", () => {
    const model = new FakeModel({ key: "k", kind: "run", session: "", record: record(), state: "live" });
    const host = liveHost(model.any, model.any);
    for (const odd of HOSTILE) {
      for (const message of [odd, { type: odd }, { type: "answer", id: odd, ok: odd }, { type: "delta", seq: odd, items: odd }]) model.emit("msg:custom", message, []);
      for (const name of ["key", "run", "at", "tokens", "text_at", "status"]) {
        model.emit("msg:custom", { type: "delta", seq: 1, items: [odd, { key: "k", run: 0, at: 0, tokens: [], text_at: 0, text: "", [name]: odd }] }, []);
      }
    }
    expect(textOf(host.record.value)).toBe("");
  });
});

describe("a front end that wraps its models", () => {
  /** A new object each time, with nothing of a model but what `AnyModel` promises. */
  const wrapped = (model: FakeModel): AnyModel =>
    ({
      get: (name: string) => model.get(name),
      set: () => undefined,
      save_changes: () => undefined,
      send: (content: Record<string, unknown>) => model.send(content),
      on: (name: string, take: () => void) => model.on(name, take),
      off: (name: string, take: () => void) => model.off(name, take),
      widget_manager: { get_model: () => Promise.reject(new Error("no models of others here")) },
    }) as unknown as AnyModel;

  it("shows one answer in two views, acknowledges, and takes commands from both", async () => {
    const model = new FakeModel({ key: "k", kind: "run", session: "", record: record(), state: "live" });
    model.answerWith((name) => ({ ok: name === "stop", result: null }));
    const hosts = [0, 1].map(() => liveHost(wrapped(model), wrapped(model)));
    model.emit("msg:custom", delta("a", 0, 0), []);
    for (const host of hosts) {
      expect(textOf(host.record.value)).toBe("a");
      await expect(host.command("stop")).resolves.toBeNull();
    }
    await soon(80);
    expect(model.sent.filter((message) => message.type === "ack").map((message) => message.seq)).toEqual([1, 1]);
  });

  it("has a chat in one widget: a message is sent, its answer streams, and the box is free again", async () => {
    const turns = (text: string) => [{ id: "t0", role: "user", text, run: null }, { id: "t1", role: "assistant", text: "", run: 0 }];
    const chat = (over: object) => ({ schema: "mlxnb.chat/1", key: "k", epoch: 0, name: "", model: "m", turns: [], runs: [], error: null, ...over });
    const model = new FakeModel({ key: "k", kind: "chat", session: "", record: chat({}), state: "live" });
    model.answerWith((_, args) => ({ ok: true, result: chat({ epoch: 1, turns: turns((args as { text: string }).text), runs: [record()] }) }));
    const el = document.createElement("div");
    document.body.append(el);
    await renderLive(wrapped(model), el);
    const box = el.querySelector("textarea")!;
    box.value = "hello";
    box.dispatchEvent(new Event("input", { bubbles: true }));
    await soon(10);
    el.querySelector("form")!.dispatchEvent(new Event("submit", { bubbles: true, cancelable: true }));
    await soon(30);
    model.emit("msg:custom", delta("answer", 0, 0, { status: { status: "done" } }), []);
    await soon(30);
    expect(model.sent.find((message) => message.name === "chat.send")).toMatchObject({ key: "k", args: { text: "hello" } });
    expect(el.textContent).toContain("hello");
    expect(el.textContent).toContain("answer");
    expect(el.querySelector("textarea")!.value).toBe("");
  });
});
