import { signal } from "@preact/signals";
import { afterEach, describe, expect, it, vi } from "vitest";

import * as samples from "../gallery/samples_more";
import * as trees from "../gallery/samples_trees";
import type { Host } from "../src/host";
import { mount, type ViewKind } from "../src/mount";
import "../src/views";
import "../src/monitor";
import "../src/playground";
import "../src/stepper";
import "../src/cache";
import "../src/loom";

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
    { schema: "mlxnb.loom/1", runs: [{ schema: "mlxnb.run/1", text: "<img src=x>", tokens: [{ id: "x", text: "<b>b</b>" }] }], rows: [{}] },
    { schema: "mlxnb.cache/1", state: "ready", ram: { blocks: 3 }, edges: [{ blocks: 3, users: ["<b>u</b>"], head: "<img src=x>" }] },
    { state: "ready", models: [{ slots: [{ slot: 0, id: "<b>" }] }], t: "now" },
  ];
  for (const kind of ["compare", "chat", "monitor", "playground", "stepper", "loom", "cache"] as const) {
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
        loom: trees.loomLive,
        cache: trees.cacheTree,
      }[kind];
      const { el, host } = show(kind, good);
      for (const record of [...hostile, good]) {
        host.record.value = record;
        await settle();
      }
      expect(el.textContent).toMatch(/SmolLM2|Qwen3/);
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
  it("goes to what stands beside a turn, and not where nothing does", async () => {
    const { button, sent, text } = show("chat", samples.chatDone);
    expect(text()).toContain("2/2");
    expect([button("Later question").disabled, button("Earlier answer").disabled]).toEqual([true, true]);
    button("Earlier question").click();
    await settle();
    button("Later answer").click();
    await settle();
    expect(sent).toEqual([
      ["chat.go", { turn: "t4" }],
      ["chat.go", { turn: "t6" }],
    ]);
  });
  it("forks at an answer, and says what it is called", async () => {
    const { button, sent, text } = show("chat", samples.chatDone, {
      answer: () => Promise.resolve({ ...samples.chatDone, note: "garden-2 begins with the turns up to here." }),
    });
    button("Fork").click();
    await settle();
    expect(sent).toEqual([["chat.fork", { turn: "t1" }]]);
    expect(text()).toContain("garden-2 begins with the turns up to here.");
  });
  it("draws its tree, picks a turn in it, and goes on from there", async () => {
    const { el, button, sent, text } = show("chat", samples.chatTree);
    expect([...el.querySelectorAll(".mlxnb-ch-tree b")].map((b) => b.textContent)).toEqual(["System", "t1", "t2", "t3", "t4", "t6", "t5"]);
    expect(el.querySelectorAll(".mlxnb-ch-tree [stroke-dasharray]").length).toBe(2);
    expect([button("Set as head"), button("Fork")!.disabled]).toEqual([undefined, false]);
    button("t4").click();
    await settle();
    button("Set as head").click();
    await settle();
    button("t3").click();
    await settle();
    expect(text()).toContain("t3 is stale");
    expect(button("Set as head")).toBeUndefined();
    button("Keep as a fork").click();
    await settle();
    expect(sent).toEqual([
      ["chat.go", { turn: "t4", exact: true }],
      ["chat.fork", { turn: "t3" }],
    ]);
    button("Chat").click();
    await settle();
    expect(el.querySelector("[aria-label='Message']")).not.toBeNull();
  });
  it("a saved tree can be read and not changed", () => {
    const { button, el } = show("chat", samples.chatTree, { live: false });
    expect([button("Fork"), button("Set as head"), el.querySelectorAll(".mlxnb-ch-tree button:enabled").length]).toEqual([undefined, undefined, 0]);
  });
  it("keeps stale turns as a fork, and says which cell brings them up to date", async () => {
    const { button, sent, text } = show("chat", samples.chatStale);
    expect(text()).toContain("Running cell [9] again");
    expect(text()).toContain("Lettuce and spinach");
    button("Keep as a fork").click();
    await settle();
    expect(sent).toEqual([["chat.fork", { turn: "t2" }]]);
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
    expect(text()).toContain("reads 1 prompt token, the others are in the cache");
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

describe("loom", () => {
  const pieces = (el: Element) => [...el.querySelectorAll<HTMLElement>("[role=treeitem]")];
  const choose = async (el: Element, words: string) => {
    pieces(el).find((one) => one.textContent!.includes(words))!.click();
    await settle();
  };
  it("shows shared text once, with counts, marks and ends, and reads the chosen path as one text", async () => {
    const { el, text } = show("loom", trees.loomLive);
    expect(pieces(el).filter((one) => one.textContent!.startsWith("found"))).toHaveLength(1);
    expect(pieces(el)[0]!.getAttribute("aria-label")).toBe("found, 9 of 16 samples, probability 0.55");
    await choose(el, "green wax");
    expect(text()).toContain("lighthouse keeper found a bottle wedged between two stones, its cork sealed with green wax.");
    expect(pieces(el).filter((one) => one.getAttribute("aria-selected") === "true")).toHaveLength(1);
  });
  it("acts on the chosen place by command", async () => {
    const { el, sent, button } = show("loom", trees.loomLive);
    await choose(el, "the boat already gone");
    for (const words of ["Mark this path", "Hide it", "4 samples from here", "One row"]) {
      button(words).click();
      await settle();
    }
    const place = { run: 5, at: 5, token: null };
    expect(sent).toEqual([
      ["loom.mark", { ...place, mark: "kept", on: true }],
      ["loom.mark", { ...place, mark: "pruned", on: true }],
      ["loom.more", { ...place, tokens: 64, rows: 4 }],
      ["loom.more", { ...place, tokens: 64, rows: 1 }],
    ]);
  });
  it("the keys walk the tree and act, one stop of the Tab key", async () => {
    const { el, sent } = show("loom", trees.loomLive);
    const stops = () => pieces(el).filter((one) => one.tabIndex === 0);
    expect(stops()).toHaveLength(1);
    stops()[0]!.focus();
    press(stops()[0]!, "ArrowRight");
    await settle();
    expect((document.activeElement as HTMLElement).textContent).toContain("a bottle wedged");
    press(document.activeElement!, "ArrowDown");
    await settle();
    expect(document.activeElement!.textContent).toContain("the boat");
    expect(stops()).toEqual([document.activeElement]);
    press(document.activeElement!, "k");
    await settle();
    expect(sent).toEqual([["loom.mark", { run: 5, at: 5, token: null, mark: "kept", on: true }]]);
    press(document.activeElement!, "ArrowLeft");
    await settle();
    expect(document.activeElement!.textContent).toContain("found");
  });
  it("expands by the ticked tokens, and says before what it costs", async () => {
    const { el, sent, button, text, find } = show("loom", trees.loomLive);
    await choose(el, "walked");
    button("Expand…").click();
    await settle();
    expect(text()).toContain("3 places, nothing to compute");
    type(find<HTMLInputElement>("input[type=number][max='8']"), "2");
    await settle();
    expect(text()).toContain("12 places, 3 steps of one token in 1 batch");
    const ticks = [...el.querySelectorAll<HTMLInputElement>("input[type=checkbox]")];
    ticks[0]!.click();
    await settle();
    [...el.querySelectorAll("button")].filter((one) => one.textContent === "Expand")[0]!.click();
    await settle();
    const [name, args] = sent.at(-1)!;
    expect([name, args.width, args.depth, (args.ids as number[]).length]).toEqual(["loom.expand", 3, 2, 2]);
  });
  it("asks for what could come next where nobody looked", async () => {
    const { el, sent, button } = show("loom", trees.loomLive);
    await choose(el, "the boat already gone");
    button("Expand…").click();
    await settle();
    expect(sent).toEqual([["loom.peek", { run: 5, at: 5, token: null }]]);
  });
  it("puts a path into a chat and says its name; what fails is said", async () => {
    const { el, text, button } = show("loom", trees.loomLive, { answer: () => Promise.resolve({ name: "loom_chat", tokens: 4 }) });
    await choose(el, "the boat already gone");
    button("Put the prompt and this path").click();
    await settle();
    expect(text()).toContain('loom_chat.send("…")');
    const refused = show("loom", trees.loomLive, { answer: refuse });
    await choose(refused.el, "the boat already gone");
    refused.button("Put the prompt and this path").click();
    await settle();
    expect(refused.text()).toContain("The kernel is gone.");
  });
  it("a saved loom is read and takes no command", async () => {
    const { el, sent, text } = show("loom", trees.loomLive, { live: false });
    await choose(el, "green wax");
    expect([...el.querySelectorAll(".mlxnb-lm-act button")]).toEqual([]);
    press(pieces(el)[0]!, "k");
    expect([sent, text().includes("saved before the end")]).toEqual([[], true]);
  });
  it("says that samples cannot differ only where they did not", () => {
    const words = "every sample is the same";
    const same = { ...trees.loomOne, runs: (trees.loomOne.runs as object[]).slice(0, 3), rows: (trees.loomOne.rows as object[]).slice(0, 3) };
    expect(show("loom", same).text()).toContain(words);
    expect(show("loom", { ...trees.loomGrown, temp: 0 }).text()).not.toContain(words);
    expect(show("loom", { ...same, temp: 0.8 }).text()).not.toContain(words);
  });
  it("folds what is pruned, and brings it back", async () => {
    const { el, sent, button } = show("loom", trees.loomLive);
    expect(el.textContent).not.toContain("spoke of it again");
    await choose(el, "never2 of 16");
    button("Bring it back").click();
    await settle();
    expect(sent.at(-1)![1]).toMatchObject({ mark: "pruned", on: false });
  });
});

describe("cache map", () => {
  it("draws a lane for each run of blocks with who uses it, and what it saves", () => {
    const { el, text } = show("cache", trees.cacheTree);
    expect(el.querySelectorAll(".mlxnb-cm-run")).toHaveLength(8);
    expect(el.querySelector(".mlxnb-cm-run")!.getAttribute("aria-label")).toBe("Blocks 0 to 15, 5 users, in RAM and on the SSD, in use");
    for (const words of ["444\u2009MB of 1.5\u2009GB RAM", "84 % from the cache", "2.8× by sharing", "drier-bed And if the bed were drier?"]) expect(text()).toContain(words);
  });
  it("reads a block when it has the focus, only then, and shows what the kernel answers", async () => {
    const { el, sent, text } = show("cache", trees.cacheTree, { answer: () => Promise.resolve({ text: "Clear the emitters\u0007 first" }) });
    expect(sent).toEqual([]);
    const run = el.querySelectorAll<HTMLElement>(".mlxnb-cm-run")[1]!;
    run.focus();
    await new Promise((done) => setTimeout(done, 20));
    press(run, "ArrowRight");
    await settle();
    expect(sent.at(-1)).toEqual(["cache.text", { edge: "b", block: 1 }]);
    expect(text()).toContain("Block 17");
    expect(text()).toContain("Clear the emitters␇ first");
    press(run, "Escape");
    await settle();
    expect(el.querySelector("[role=dialog]")).toBeNull();
  });
  it("ten thousand blocks are few elements, and it says what is left out", async () => {
    const { el, text, button } = show("cache", trees.cacheLarge);
    expect(el.querySelectorAll("*").length).toBeLessThan(600);
    expect(text()).toContain("Left out: 740 branches, 4,310 blocks.");
    button("Show all").click();
    await settle();
    expect(el.querySelectorAll(".mlxnb-cm-run")).toHaveLength(160);
  });
  it("an empty cache, one that is off and no engine are three different things", () => {
    expect(show("cache", trees.cacheEmpty).text()).toContain("No blocks yet");
    expect(show("cache", trees.cacheOff).text()).toContain("is off");
    expect(show("cache", { ...trees.cacheOff, state: "not started" }).text()).toContain("No engine is running");
  });
  it("lists who would free what, and what has left", async () => {
    const { el, text, button } = show("cache", trees.cacheTree);
    button("Chats and cells").click();
    await settle();
    expect(el.querySelectorAll("tbody tr")).toHaveLength(4);
    button("Evictions").click();
    await settle();
    expect(text()).toContain("17 blocks left the RAM");
    expect(text()).toContain("computed anew");
  });
});
