import { signal } from "@preact/signals";
import { afterEach, describe, expect, it, vi } from "vitest";

import * as samples from "../gallery/samples_more";
import type { Host } from "../src/host";
import { mount, type ViewKind } from "../src/mount";
import "../src/views";
import "../src/monitor";
import "../src/playground";
import "../src/stepper";

type Sent = [name: string, args: Record<string, unknown>];
const left: (() => void)[] = [];
afterEach(() => {
  for (const take of left.splice(0)) take();
  document.body.replaceChildren();
  vi.useRealTimers();
});

function show(kind: ViewKind, record: unknown, over: { live?: boolean; answer?: (...sent: Sent) => Promise<unknown> } = {}) {
  const el = document.createElement("div");
  document.body.append(el);
  const sent: Sent[] = [];
  const host: Host = {
    live: over.live ?? true,
    record: signal(record),
    command: (name, args = {}) => {
      sent.push([name, args as Sent[1]]);
      return over.answer?.(name, args as Sent[1]) ?? Promise.resolve(null);
    },
    setting: { theme: "light" },
  };
  left.push(mount(el, kind, host));
  const text = () => el.textContent ?? "";
  const find = <T extends Element = HTMLElement>(css: string) => el.querySelector<T>(css) as T;
  const button = (words: string) =>
    [...el.querySelectorAll("button")].find((one) => (one.getAttribute("aria-label") ?? one.textContent ?? "").includes(words)) as HTMLButtonElement;
  return { el, host, sent, text, find, button };
}
const settle = async () => {
  for (let i = 0; i < 4; i++) await new Promise((done) => setTimeout(done, 0));
};
function type(area: HTMLTextAreaElement | HTMLInputElement, text: string) {
  area.value = text;
  area.dispatchEvent(new Event("input", { bubbles: true }));
}
const press = (el: Element, key: string, over: object = {}) =>
  el.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...over }));
const refuse = () => Promise.reject(new Error("The kernel is gone."));

describe("every view takes any record", () => {
  const hostile = [
    null,
    7,
    "x",
    [],
    {},
    { schema: "mlxnb.group/1", runs: [null, [], { tokens: {} }] },
    { schema: "mlxnb.chat/1", turns: [[], { role: "user", text: [] }], runs: 4 },
    { schema: "mlxnb.stepper/1", step: { candidates: [{}] }, past: [{ id: 1 }] },
    { schema: "mlxnb.playground/1", runs: [3] },
    { state: "ready", models: [{ slots: [{ slot: 0, id: "<b>" }] }], t: "now" },
  ];
  for (const kind of ["compare", "chat", "monitor", "playground", "stepper"] as const) {
    it(`${kind} shows a notice or a poorer picture, and never markup of the record`, () => {
      for (const record of hostile) {
        const { el } = show(kind, record);
        expect(el.querySelector(".mlxnb")).not.toBeNull();
        expect(el.querySelector("b b, script, img")).toBeNull();
      }
    });
    it(`${kind} outlives a change from good to hostile and back`, async () => {
      const good = {
        compare: samples.compareDone,
        chat: samples.chatDone,
        monitor: samples.monitorBusy()[30],
        playground: samples.playgroundDone,
        stepper: samples.stepperReady,
      }[kind];
      const { el, host } = show(kind, good);
      for (const record of [...hostile, good]) {
        host.record.value = record;
        await settle();
      }
      expect(el.textContent).toContain("SmolLM2");
    });
  }
  it("text that looks like markup is text", () => {
    const evil = "<img src=x onerror=alert(1)><script>1</script>";
    const group = {
      schema: "mlxnb.group/1",
      runs: [0, 1].map((i) => samples.run({ id: evil, model: evil, labels: { [evil]: `${evil}${i}` }, text: `${evil} ${i}` })),
    };
    const step = {
      ...samples.stepperReady,
      model: evil,
      past: [{ id: 1, text: evil, how: "hand" }],
      step: { ...samples.stepOf({}), candidates: [{ id: 1, text: evil, logprob: -1 }] },
    };
    for (const [kind, record] of [
      ["compare", group],
      ["stepper", step],
    ] as const)
      expect(show(kind, record).el.querySelector("img, script")).toBeNull();
  });
});

describe("compare", () => {
  it("opens at the tokens if the cell asked for them", () => {
    const { el } = show("compare", { ...samples.compareDone, view: "tokens" });
    expect(el.querySelector("[aria-selected=true]")?.textContent).toBe("Tokens");
  });
  it("names each answer by what differs and stops one alone", async () => {
    const { text, sent, button } = show("compare", samples.compareLive);
    expect(text()).toContain("seed 8");
    expect(text()).toContain("1 of 4 · 2 running · 1 waiting");
    button("Stop only B").click();
    await settle();
    expect(sent).toEqual([["stop", { run: 1 }]]);
  });
  it("stops all with one command", () => {
    const { sent, button } = show("compare", samples.compareLive);
    button("Stop all").click();
    expect(sent).toEqual([["stop", {}]]);
  });
  it("says which answers agree", () => {
    const { text } = show("compare", samples.compareVotes);
    expect(text()).toContain("5 of 8 say the same");
    expect(text()).toContain("A B D E G");
  });
  it("a saved comparison has nothing that needs a kernel", () => {
    const { button } = show("compare", samples.compareLive, { live: false });
    expect([button("Stop"), button("Run all again")]).toEqual([undefined, undefined]);
  });
  it("the table sorts by a column, then the other way round, then not at all", async () => {
    const { el, button } = show("compare", samples.compareDone);
    button("Table").click();
    await settle();
    const letters = () => [...el.querySelectorAll("tbody .mlxnb-cmp-key")].map((one) => one.textContent).join("");
    const orders = [letters()];
    for (let i = 0; i < 3; i++) {
      button("tokens").click();
      await settle();
      orders.push(letters());
    }
    expect(orders).toEqual(["ABCD", "DCAB", "BACD", "ABCD"]);
  });
});

describe("chat", () => {
  it("sends with Enter, and the box is empty once the kernel took it", async () => {
    const { find, sent } = show("chat", samples.chatDone);
    const area = find<HTMLTextAreaElement>("[aria-label='Message']");
    type(area, "Hello?");
    await settle();
    press(area, "Enter", { shiftKey: true });
    press(area, "Enter", { isComposing: true });
    expect(sent).toEqual([]);
    press(area, "Enter");
    await settle();
    expect(sent).toEqual([["chat.send", { text: "Hello?" }]]);
    expect(area.value).toBe("");
  });
  it("a refused message is still in its box, with the reason beside it", async () => {
    const { find, text } = show("chat", samples.chatDone, { answer: refuse });
    const area = find<HTMLTextAreaElement>("[aria-label='Message']");
    type(area, "Keep me");
    await settle();
    press(area, "Enter");
    await settle();
    expect(area.value).toBe("Keep me");
    expect(text()).toContain("The kernel is gone.");
  });
  it("edits a turn of the person's and regenerates an answer by their ids", async () => {
    const { find, button, sent } = show("chat", samples.chatDone);
    button("Regenerate this answer").click();
    await settle();
    button("Edit this turn").click();
    await settle();
    const area = find<HTMLTextAreaElement>(".mlxnb-ch-edit textarea");
    expect(area.value).toContain("Bed 4 lost its mulch");
    type(area, "Anew");
    await settle();
    press(area, "Enter");
    await settle();
    expect(sent).toEqual([
      ["chat.regenerate", { turn: "a1" }],
      ["chat.edit", { turn: "u1", text: "Anew" }],
    ]);
    expect(find(".mlxnb-ch-edit")).toBeNull();
  });
  it("Escape leaves an edit without a command", async () => {
    const { find, button, sent } = show("chat", samples.chatDone);
    button("Edit this turn").click();
    await settle();
    press(find(".mlxnb-ch-edit textarea"), "Escape");
    await settle();
    expect([find(".mlxnb-ch-edit"), sent.length]).toEqual([null, 0]);
  });
  it("while an answer is written only Stop is offered, with the run's index", async () => {
    const { button, sent, find } = show("chat", samples.chatLive);
    expect([button("Regenerate"), button("Edit")]).toEqual([undefined, undefined]);
    expect(find<HTMLTextAreaElement>("[aria-label='Message']").placeholder).toMatch(/being written/);
    button("Stop").click();
    await settle();
    expect(sent).toEqual([["stop", { run: 2 }]]);
  });
  it("takes the record that the kernel answers with, though it has fewer tokens, unless it is older", async () => {
    const next = { ...samples.chatEmpty, epoch: 9, name: "fresh" };
    const { find, host } = show("chat", samples.chatDone, { answer: () => Promise.resolve(next) });
    const area = find<HTMLTextAreaElement>("[aria-label='Message']");
    type(area, "x");
    await settle();
    press(area, "Enter");
    await settle();
    expect(host.record.value).toBe(next);
    const old = show("chat", samples.chatDone, { answer: () => Promise.resolve({ ...samples.chatEmpty, epoch: 1 }) });
    type(old.find<HTMLTextAreaElement>("[aria-label='Message']"), "x");
    await settle();
    press(old.find("[aria-label='Message']"), "Enter");
    await settle();
    expect(old.host.record.value).toBe(samples.chatDone);
  });
});

describe("stepper", () => {
  it("shows the rules in the engine's order, dropped tokens with the rule that dropped them", () => {
    const { el } = show("stepper", samples.stepperReady);
    expect([...el.querySelectorAll(".mlxnb-stp th b")].map((one) => one.textContent)).toEqual([
      "Token",
      "Model",
      "→ Penalties",
      "→ Top-p",
      "→ Min-p",
      "→ Temperature",
    ]);
    const dropped = [...el.querySelectorAll(".mlxnb-stp-gone button")].map((one) => one.getAttribute("aria-label"));
    expect(dropped).toContain("dark: dropped by min-p. Choose it anyway");
    expect(el.querySelectorAll(".mlxnb-stp-gone s").length).toBe(dropped.length);
  });
  it("the drawn token has the largest sum", () => {
    const { el } = show("stepper", samples.stepperReady);
    expect(el.querySelector(".mlxnb-draw-table tbody tr")!.className).toBe("mlxnb-draw-hit");
  });
  it("chooses, steps, undoes and switches rules by command", async () => {
    const { button, sent, find } = show("stepper", samples.stepperReady);
    const acts = [
      () => button("dark: dropped").click(),
      () => press(find(".mlxnb-stp-view"), "ArrowRight"),
      () => press(find(".mlxnb-stp-view"), "Backspace"),
      () => button("Top-p on").click(),
      () => button("Turn XTC on").click(),
    ];
    for (const act of acts) {
      act();
      await settle();
    }
    expect(sent).toEqual([
      ["stepper.choose", { id: 9 }],
      ["stepper.step", { count: 1 }],
      ["stepper.undo", { count: 1 }],
      ["stepper.set", { settings: { top_p: 1 } }],
      ["stepper.set", { settings: { xtc_probability: 0.5, xtc_threshold: 0.1 } }],
    ]);
  });
  it("the arrows move among the tokens", () => {
    const { el } = show("stepper", samples.stepperReady);
    const picks = [...el.querySelectorAll<HTMLButtonElement>(".mlxnb-stp-pick")];
    picks[0]!.focus();
    press(picks[0]!, "ArrowDown");
    expect(document.activeElement).toBe(picks[1]);
    press(picks[1]!, "ArrowUp");
    expect(document.activeElement).toBe(picks[0]);
  });
  it("an error of a step is said, and the text so far stays", async () => {
    const { button, text } = show("stepper", samples.stepperReady, { answer: refuse });
    button("Step: sea").click();
    await settle();
    expect(text()).toContain("The kernel is gone.");
    expect(text()).toContain("keeper");
  });
  it("a saved stepper takes no command", () => {
    const { el } = show("stepper", samples.stepperReady, { live: false });
    for (const pick of el.querySelectorAll<HTMLButtonElement>(".mlxnb-stp-pick, .mlxnb-bar .mlxnb-btn")) expect(pick.disabled).toBe(true);
  });
  it("greedy has neither filters nor a draw", () => {
    const { el, text } = show("stepper", samples.stepperGreedy);
    expect(el.querySelectorAll(".mlxnb-stp thead th").length).toBe(2);
    expect(text()).toContain("No draw");
  });
});

describe("playground", () => {
  it("a change runs once, after a pause, with what was changed", async () => {
    vi.useFakeTimers();
    const { find, sent, text } = show("playground", samples.playgroundDone);
    const temp = find<HTMLInputElement>("input[type=range][aria-label=temperature]");
    for (const value of ["0.8", "0.9", "1"]) {
      type(temp, value);
      await vi.advanceTimersByTimeAsync(100);
    }
    expect(sent).toEqual([]);
    expect(text()).toContain("reads 39 prompt tokens again");
    await vi.advanceTimersByTimeAsync(1000);
    expect(sent.map(([name, args]) => [name, args.settings])).toEqual([["playground.run", { temp: 1 }]]);
  });
  it("shows the settings that are in force once the kernel knows them, until a slider was moved", async () => {
    const { el, host, find } = show("playground", samples.playgroundDone);
    const value = () => find<HTMLInputElement>("input[type=range][aria-label=top-p]").value;
    const said = async (top_p: number) => {
      host.record.value = { ...samples.playgroundDone, settings: { ...(samples.playgroundDone.settings as object), top_p } };
      await settle();
      await new Promise((drawn) => setTimeout(drawn, 50));
    };
    await said(0.5);
    expect(value()).toBe("0.5");
    expect(el.textContent).not.toContain("top-p changed");
    type(find<HTMLInputElement>("input[type=range][aria-label=top-p]"), "0.6");
    await settle();
    await said(0.7);
    expect(value()).toBe("0.6");
  });
  it("a change made while a run is being started runs after it", async () => {
    vi.useFakeTimers();
    let free: (value: unknown) => void = () => undefined;
    const { find, sent } = show("playground", samples.playgroundDone, { answer: () => new Promise((done) => (free = done)) });
    const temp = find<HTMLInputElement>("input[type=range][aria-label=temperature]");
    type(temp, "1");
    await vi.advanceTimersByTimeAsync(600);
    type(temp, "1.5");
    await vi.advanceTimersByTimeAsync(600);
    expect(sent.length).toBe(1);
    free(null);
    await vi.advanceTimersByTimeAsync(600);
    expect(sent.map(([, args]) => (args.settings as { temp: number }).temp)).toEqual([1, 1.5]);
  });
  it("a refusal keeps text and sliders and is not tried again by itself", async () => {
    vi.useFakeTimers();
    const { find, sent, text } = show("playground", samples.playgroundDone, { answer: refuse });
    const prompt = find<HTMLTextAreaElement>(".mlxnb-pg-prompt");
    type(prompt, "Something else");
    await vi.advanceTimersByTimeAsync(3000);
    expect(sent.length).toBe(1);
    expect(prompt.value).toBe("Something else");
    expect(text()).toContain("The kernel is gone.");
  });
  it("a figure that is none changes nothing and is marked", async () => {
    const { find, sent } = show("playground", samples.playgroundDone);
    const field = find<HTMLInputElement>("[aria-label='temp, exact']");
    type(field, "hot");
    await settle();
    expect([field.getAttribute("aria-invalid"), field.value, sent.length]).toEqual(["true", "hot", 0]);
  });
  it("nothing runs before a person touched something", async () => {
    vi.useFakeTimers();
    const { sent } = show("playground", { ...samples.playgroundDone, runs: [] });
    await vi.advanceTimersByTimeAsync(2000);
    expect(sent).toEqual([]);
  });
});

describe("monitor", () => {
  const feed = (over: object = {}) => {
    const [first, ...rest] = samples.monitorBusy();
    const view = show("monitor", first, over);
    for (const record of rest) view.host.record.value = record;
    return view;
  };
  it("counts every snapshot, also those between two frames", async () => {
    const { el, text } = feed();
    await settle();
    expect(text()).toContain("5 running · 2 waiting");
    expect(el.querySelectorAll(".mlxnb-mon-bar").length).toBeGreaterThan(12);
    expect(el.querySelectorAll(".mlxnb-mon-move").length).toBeGreaterThan(3);
    expect(text()).toMatch(/forwards\/s1[0-9]\.[0-9]/);
  });
  it("stops a row by its id, and not while the view is paused", async () => {
    const { button, sent } = feed();
    await settle();
    button("Stop [13] loom 4").click();
    await settle();
    expect(sent).toEqual([["history", {}], ["monitor.stop", { id: "13d" }]]);
    button("Pause view").click();
    await settle();
    expect(button("Stop [13] loom 4")).toBeUndefined();
  });
  it("a paused view stands still and catches up", async () => {
    const { button, host, text } = feed();
    await settle();
    button("Pause view").click();
    await settle();
    host.record.value = { ...samples.monitorBusy().at(-1)!, t: 61, models: [] };
    await settle();
    expect(text()).toContain("5 running");
    button("Go on").click();
    await settle();
    expect(text()).not.toContain("5 running");
  });
  it("idle is a bar and no table", async () => {
    const { host, text, find } = show("monitor", samples.monitorIdle[0]);
    host.record.value = samples.monitorIdle[1];
    await settle();
    expect(text()).toContain("idle for 4");
    expect(find("table")).toBeNull();
  });
});
