import { afterEach, expect, it } from "vitest";

import { renderLive, renderSaved } from "../src/bundle";
import { kindOf, openViews, textOf } from "../src/stored";
import { FakeModel, record } from "./records";

const done = (over: object) => record({ status: "done", finish_reason: "stop", ...over });
const chat = {
  schema: "mlxnb.chat/1", key: "k1", epoch: 0, name: "", model: "m", error: null,
  turns: [{ id: "t0", role: "user", text: "hi \u202e", run: null }, { id: "t1", role: "assistant", text: "", run: 0 }],
  runs: [done({ text: "hello" })],
};

afterEach(() => document.body.replaceChildren());

it("knows the view of every record, and of nonsense", () => {
  expect(["chat", "playground", "stepper", "monitor", "loom", "cache", "run"].map((name) => kindOf({ schema: `mlxnb.${name}/1` }))).toEqual(["chat", "playground", "stepper", "monitor", "loom", "cache", "run"]);
  expect(kindOf({ schema: "mlxnb.group/1", runs: [] })).toBe("compare");
  for (const record of [null, 7, "x", [], {}, { schema: "constructor" }, { schema: ["mlxnb.chat/1"] }, { schema: "mlxnb.chat/9" }]) expect(kindOf(record), JSON.stringify(record)).toBe("run");
});

it("has the words of every record for readers without our views, controls made visible", () => {
  expect(textOf(chat)).toBe("You:\nhi <U+202E>\n\nm:\nhello");
  expect(textOf({ schema: "mlxnb.playground/1", prompt: "Why?", runs: [done({ text: "So." })] })).toBe("Why?\n\nSo.");
  expect(textOf({ schema: "mlxnb.stepper/1", past: [{ text: "a" }, { text: " b" }, null] })).toBe("a b");
  expect(textOf(done({ text: "hello" }))).toBe("hello");
  expect(textOf({ schema: "mlxnb.group/1", runs: [done({ text: "a" }), done({ text: "b" })] })).toBe("a\n\nb");
  for (const record of [null, {}, { schema: "mlxnb.chat/1", turns: 3 }, { schema: "mlxnb.stepper/1", past: "x" }, { schema: "mlxnb.monitor/1" }]) expect(textOf(record), JSON.stringify(record)).toBe("");
});

it("draws a saved conversation without a kernel, and says that it is one", () => {
  const el = document.createElement("div");
  document.body.append(el);
  renderSaved(chat, el);
  expect(el.textContent).toContain("hello");
  expect(el.querySelector("textarea")?.placeholder).toMatch(/saved conversation/);
});

it("tells the page which views are open and what they hold now, as long as they are", async () => {
  const fake = new FakeModel({ kind: "chat", key: "k1", record: chat, state: "live", setting: {} });
  const model = fake.any;
  const el = document.createElement("div");
  document.body.append(el);
  const close = await renderLive(model, el);
  const second = document.createElement("div");
  document.body.append(second);
  const closeSecond = await renderLive(model, second);
  fake.set("record", { ...chat, turns: chat.turns.slice(0, 1) });
  expect(openViews().get("k1")?.record()).toBe(fake.traits.record);
  expect(openViews().get("k1")?.text()).toContain("You:");
  closeSecond();
  expect(openViews().has("k1")).toBe(true);
  close();
  expect(openViews().has("k1")).toBe(false);
});
