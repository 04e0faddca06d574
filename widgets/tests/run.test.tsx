import { signal } from "@preact/signals";
import { act } from "preact/test-utils";
import { afterEach, beforeAll, describe, expect, it, vi } from "vitest";

import { setAssetSource } from "../src/chunks";
import { applyDelta, savedHost, type Host } from "../src/host";
import { kinds, mount, register } from "../src/mount";
import "../src/run";
import { PAYLOADS } from "./corpus";
import { record, soon, token } from "./records";

let undo: (() => void)[] = [];
afterEach(() => {
  act(() => undo.forEach((each) => each()));
  undo = [];
  document.body.replaceChildren();
});
beforeAll(() => setAssetSource(() => Promise.reject(new Error("no chunks here"))));

function show(value: unknown, over: Partial<Host> = {}, kind = "run") {
  const el = document.createElement("div");
  document.body.append(el);
  const sent: unknown[] = [];
  const host: Host = {
    live: true,
    record: signal(value),
    command: (name, args) => {
      sent.push([name, args]);
      return Promise.resolve(null);
    },
    setting: { theme: "auto" },
    ...over,
  };
  act(() => {
    undo.push(mount(el, kind, host));
  });
  const button = (label: string) => [...el.querySelectorAll("button")].find((one) => one.textContent === label || one.getAttribute("aria-label")?.startsWith(label));
  const press = (label: string) => act(() => button(label)?.click());
  const key = (key: string) => act(() => void document.activeElement?.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })));
  return { el, host, sent, button, press, key, tok: (i: number) => el.querySelector<HTMLElement>(`.mlxnb-tok[data-i="${i}"]`) };
}

const TOP = { logprob: -0.4, rank: 0, top: [{ id: 6, text: " never", logprob: -0.3, masked: "not allowed by Reading" }, { id: 1, text: "a", logprob: -0.4 }, { id: 9, text: "z", logprob: -3 }] };
const tokens = [token("a", { ...TOP, id: 1 }), token(" b", { id: 2, origin: "forced", t: 0.2 }), token("\n", { id: 3, origin: "forced", t: 0.3 }), token("c", { id: 4, t: 0.5 })];
const done = record({ status: "done", finish_reason: "stop", text: "a b\nc", tokens, timing: { started: 0, first_token: 0.1, ended: 0.5 } });

describe("RunView", () => {
  it("says in words how a run is going and how it ended", () => {
    const words = (over: object, live = true) => show(record(over), { live }).el.querySelector(".mlxnb-state")?.textContent?.replaceAll("\u2009", " ");
    expect(words({ status: "waiting" })).toBe("waiting");
    expect(words({ status: "loading", phases: [{ kind: "load", phase: "download", t: 0, until: 3, done: 63e6, total: 92e6 }] })).toBe("downloading · 63 MB of 92 MB · 1.4 s left");
    expect(words({ status: "prefill", phases: [{ kind: "prefill", t: 0, until: 1, done: 1536, total: 2310 }] })).toBe("reading the prompt · 1,536 of 2,310");
    expect(words({ tokens: [token("a")], text: "a" })).toBe("streaming · 1 token · 100 ms");
    expect(words({ stopping: true })).toBe("stopping");
    expect(words({}, false)).toBe("saved before the end");
    expect(words({ status: "stopped", tokens, timing: { ended: 2 } })).toBe("stopped · 2.0 s");
    expect(words({ status: "failed", error: { kind: "ModelError", message: "m", hint: "h" } })).toBe("failed · ModelError");
    expect(words({ status: "done", finish_reason: "stop", timing: { ended: 2 } })).toBe("complete · 2.0 s");
    expect(words({ status: "done" })).toBe("done");
    expect(words({ status: "done", finish_reason: "length", usage: { completion_tokens: 512 } })).toBe("length · 512 tokens");
  });

  it("offers Stop alone while it streams, and other actions once it is over", () => {
    const running = show(record({ tokens, text: "a b\nc" }));
    expect(running.button("Stop")).toBeTruthy();
    expect(running.button("Copy answer") ?? running.button("Run again")).toBeUndefined();
    running.press("Stop");
    expect(running.sent).toEqual([["stop", { run: 0 }]]);
    expect(running.button("Stop")?.disabled).toBe(true);
    const over = show(done);
    expect(over.button("Stop")).toBeUndefined();
    over.press("Run again");
    expect(over.sent).toEqual([["regenerate", { run: 0 }]]);
    const saved = show(done, { live: false });
    expect(saved.button("Copy answer")).toBeTruthy();
    expect(saved.button("Run again") ?? saved.button("Branch") ?? saved.button("Stop")).toBeUndefined();
  });

  it("shows a refusal as a sentence and lets Stop be pressed again", async () => {
    const view = show(record(), { command: () => Promise.reject(new Error("The kernel did not answer.")) });
    view.press("Stop");
    await act(() => soon());
    expect(view.el.querySelector("[role=alert]")?.textContent).toContain("The kernel did not answer.");
    expect(view.button("Stop")?.disabled).toBe(false);
  });

  it("shows a failure beside the partial answer, with what to do next", () => {
    const { el } = show(record({ status: "failed", text: "part", tokens: [token("part")], error: { kind: "EngineDead", message: "It <b>died</b>.", hint: "Restart." } }));
    expect(el.querySelector(".mlxnb-answer")?.textContent).toBe("part");
    expect(el.querySelector("[role=alert]")?.textContent).toBe("It <b>died</b>. Restart.");
  });

  it("writes out every count and leaves out what it does not know", () => {
    const { el } = show(done);
    expect(el.querySelector(".mlxnb-strips")?.textContent).toBe("Prompt 5prefilled 5Answer 4sampled 2forced 2");
    expect([...el.querySelectorAll(".mlxnb-metrics dt")].map((dt) => dt.textContent)).toEqual(["TTFT", "speed", "seed"]);
  });

  it("has tabs that arrow keys move between", () => {
    const { el, key } = show(done);
    const selected = () => el.querySelector("[role=tab][aria-selected=true]");
    act(() => (selected() as HTMLElement).focus());
    key("ArrowRight");
    expect(selected()?.textContent).toBe("Tokens");
    expect(document.activeElement).toBe(selected());
    expect(el.querySelector("[role=tabpanel]")?.getAttribute("aria-labelledby")).toBe(selected()?.id);
    key("End");
    expect(el.querySelector("[role=tabpanel] pre")?.textContent).toBe("a b\nc");
    key("ArrowRight");
    expect(selected()?.textContent).toBe("Answer");
  });

  it("opens at the tab that the cell asked for", () => {
    expect(show(done, { setting: { theme: "auto", view: "tokens" } }).el.querySelector("[aria-selected=true]")?.textContent).toBe("Tokens");
    expect(show(done, { setting: { theme: "auto", view: "nosuch" } }).el.querySelector("[aria-selected=true]")?.textContent).toBe("Answer");
    for (const live of [true, false])
      for (const [view, tab] of [["tokens", "Tokens"], ["raw", "Raw"], ["answer", "Answer"], [7, "Answer"]])
        expect(show({ ...done, view }, { live }).el.querySelector("[aria-selected=true]")?.textContent).toBe(tab);
  });
});

const asTokens = (value: unknown, over: Partial<Host> = {}) => show(value, { setting: { theme: "auto", view: "tokens" }, ...over });

describe("the token inspector", () => {
  it("draws a glyph once at the head of each run of one origin, and the text untouched", () => {
    const { el } = asTokens(done);
    expect([...el.querySelectorAll(".mlxnb-run")].map((run) => run.className)).toEqual(["mlxnb-run mlxnb-o-sampled", "mlxnb-run mlxnb-o-forced", "mlxnb-run mlxnb-o-sampled"]);
    expect(el.querySelectorAll(".mlxnb-tokens .mlxnb-g")).toHaveLength(3);
    expect(el.querySelector(".mlxnb-tokens")?.textContent).toBe("a b↵\nc");
  });

  it("keeps an empty line on the side of the line above it", () => {
    const tokens = ["مرحبا", "\n", "\n", "שלום", "\n", "ok", "\n", "\n", "x"].map((text) => token(text));
    const { el } = asTokens({ ...done, tokens, text: "" });
    expect([...el.querySelectorAll(".mlxnb-nl")].map((sign) => sign.classList.contains("mlxnb-leftward"))).toEqual([false, true, false, false, false]);
  });

  it("only appends while the answer grows", () => {
    const view = asTokens(record({ tokens: [token("a")], text: "a" }));
    const first = view.tok(0);
    for (let at = 1; at < 200; at++) {
      const applied = applyDelta(view.host.record.value, { key: "k", run: 0, at, tokens: [token(" w") as never], text_at: 2 * at - 1, text: " w" });
      if (!applied.ok) throw new Error(applied.reason);
      act(() => void (view.host.record.value = applied.record));
    }
    expect(view.el.querySelectorAll(".mlxnb-tok")).toHaveLength(200);
    expect(view.tok(0)).toBe(first);
    expect(view.el.querySelectorAll(".mlxnb-new").length).toBeLessThanOrEqual(1);
  });

  it("starts anew when the answer is another one", () => {
    const view = asTokens(done);
    act(() => void (view.host.record.value = record({ id: "r2", tokens: [token("new")], text: "new" })));
    expect(view.el.querySelector(".mlxnb-tokens")?.textContent).toBe("new");
  });

  it("keeps its keys from the shortcuts of JupyterLab", () => {
    const view = asTokens(done);
    act(() => view.tok(0)?.focus());
    for (const place of [".mlxnb-tok", "[role=tab]", ".mlxnb-pop button"]) expect(view.el.querySelector(place)?.closest("[data-lm-suppress-shortcuts]"), place).toBeTruthy();
  });

  it("offers only metrics that were captured, and says why the others are absent", () => {
    const metrics = (el: HTMLElement) => [...el.querySelectorAll(".mlxnb-seg button")].map((one) => one.textContent);
    expect(metrics(asTokens(done).el)).toEqual(["Probability", "Rank", "Entropy", "Latency"]);
    const { el } = asTokens(record({ tokens: [token("a"), token("b")], text: "ab" }));
    expect(metrics(el)).toEqual(["Latency"]);
    expect(el.querySelector(".mlxnb-encoding")?.textContent).toContain("no probabilities: run with --logprobs 5");
  });

  it("colours by the chosen metric and has a legend for the ramp", () => {
    const view = asTokens(done);
    expect(view.tok(0)?.className).toContain("mlxnb-m3");
    expect(view.el.querySelector(".mlxnb-tokens")?.getAttribute("data-metric")).toBe("unsure");
    view.press("Latency");
    expect(view.el.querySelector(".mlxnb-tokens")?.getAttribute("data-metric")).toBe("slow");
    expect(view.tok(0)?.className).toBe("mlxnb-tok");
    expect(view.el.querySelector(".mlxnb-ramp")?.getAttribute("aria-label")).toContain("ms");
  });

  it("is one stop in the tab order, moved by arrow keys", () => {
    const view = asTokens(done);
    const stops = () => [...view.el.querySelectorAll(".mlxnb-tok")].map((one) => (one as HTMLElement).tabIndex);
    expect(stops()).toEqual([0, -1, -1, -1]);
    act(() => view.tok(0)?.focus());
    view.key("ArrowRight");
    view.key("ArrowRight");
    expect(document.activeElement).toBe(view.tok(2));
    expect(stops()).toEqual([-1, -1, 0, -1]);
    expect(view.tok(2)?.getAttribute("aria-label")).toBe("↵, forced, 3 of 4");
    view.key("End");
    expect(document.activeElement).toBe(view.tok(3));
    view.key("Home");
    expect(view.tok(0)?.getAttribute("aria-label")).toBe("a, sampled, probability 0.67, rank 1, 1 of 4");
    expect([...view.el.querySelectorAll(".mlxnb-tok[role=button]")]).toEqual([view.tok(0)]);
  });

  it("opens a token's story on focus, and on hover after a moment", async () => {
    vi.useFakeTimers();
    const view = asTokens(done);
    const pop = () => view.el.querySelector(".mlxnb-pop");
    act(() => view.tok(0)?.focus());
    expect(pop()?.textContent).toContain("token 1 · sampled");
    expect(pop()?.querySelector(".mlxnb-facts")?.textContent).toContain("p.670rank1");
    view.key("Escape");
    expect(pop()).toBeNull();
    act(() => void view.tok(1)?.dispatchEvent(new Event("pointerover", { bubbles: true })));
    await act(async () => void (await vi.advanceTimersByTimeAsync(150)));
    expect(pop()).toBeNull();
    await act(async () => void (await vi.advanceTimersByTimeAsync(80)));
    expect(pop()?.textContent).toContain("The only token the grammar allowed");
    vi.useRealTimers();
  });

  it("strikes out a masked alternative with its reason and does not let it be chosen", () => {
    const view = asTokens(done);
    act(() => view.tok(0)?.focus());
    const masked = view.el.querySelector(".mlxnb-alt-masked");
    expect([masked?.nodeName, masked?.getAttribute("title")]).toEqual(["DIV", "not allowed by Reading"]);
    expect(view.el.querySelector(".mlxnb-pop-foot")?.textContent).toContain("Struck out: not allowed by Reading");
    expect([...view.el.querySelectorAll(".mlxnb-pop button")].map((one) => one.getAttribute("aria-label"))).toEqual(["Branch with a, probability 0.670, chosen", "Branch with z, probability 0.050"]);
  });

  it("branches by a click on an open token, by Enter, and by an alternative", () => {
    const view = asTokens(done);
    const click = (i: number) => act(() => view.tok(i)?.click());
    click(1);
    expect(view.el.querySelector(".mlxnb-pop")?.textContent).toContain("branch here");
    expect(view.sent).toEqual([]);
    click(1);
    expect(view.sent.splice(0)).toEqual([["branch", { run: 0, at: 1, token: 2 }]]);
    view.key("ArrowRight");
    view.key("Enter");
    expect(view.sent.splice(0)).toEqual([["branch", { run: 0, at: 2, token: 3 }]]);
    act(() => view.tok(0)?.focus());
    view.press("Branch with z");
    expect(view.sent).toEqual([["branch", { run: 0, at: 0, token: 9 }]]);
  });

  it("of a saved output tells the story and offers no branch", () => {
    const view = asTokens(done, { live: false });
    act(() => view.tok(0)?.focus());
    view.key("Enter");
    expect(view.sent).toEqual([]);
    expect(view.el.querySelectorAll(".mlxnb-pop button")).toHaveLength(0);
    expect(view.el.querySelector(".mlxnb-pop")?.textContent).not.toContain("branch");
  });

  it("dims the other origins when one is pressed in the legend", () => {
    const view = asTokens(done);
    view.press("forced");
    expect(view.el.querySelector(".mlxnb-tokens")?.getAttribute("data-only")).toBe("forced");
    view.press("forced");
    expect(view.el.querySelector(".mlxnb-tokens")?.hasAttribute("data-only")).toBe(false);
  });
});

describe("any view", () => {
  it("of an unknown kind, version or shape is a plain notice", () => {
    expect(show(done, {}, "nosuch").el.textContent).toContain('There is no view "nosuch"');
    for (const odd of [{ schema: "mlxnb.run/9" }, null, 3, [], "x", {}]) expect(show(odd).el.querySelector("[role=note]")?.textContent).toMatch(/^This output/);
  });

  it("that throws becomes a notice", () => {
    vi.spyOn(console, "error").mockImplementation(() => undefined);
    register("stepper", () => {
      throw new Error("no");
    });
    expect(show(done, {}, "stepper").el.textContent).toContain("This output cannot be shown");
    expect(kinds()).toContain("run");
    vi.restoreAllMocks();
  });

  it("leaves nothing behind when it is taken away", () => {
    const el = document.createElement("div");
    const end = mount(el, "run", savedHost(done));
    expect(el.childElementCount).toBe(1);
    end();
    expect(el.childElementCount).toBe(0);
  });

  it("shows hostile text of every field as text, in every tab", () => {
    for (const view of ["answer", "tokens", "raw"]) {
      for (const [kind, text] of PAYLOADS.filter((_, i) => i % 4 === 0)) {
        const hostile = record({
          status: "failed", text, model: text, stop: text, finish_reason: text, tokens: [token(text, { logprob: -1, rank: 0, top: [{ id: 1, text, logprob: -1, masked: text }] })], error: { kind: text, message: text, hint: text },
          usage: { execution: { codec: text, declined: [text], kv_bytes: 5 } }, labels: { [text]: text }, tokens_note: text,
        });
        const { el } = show(hostile, { setting: { theme: "auto", view } });
        expect(el.querySelectorAll("script, img, iframe, svg, math, style, link, form, input, object, embed, video, audio, base, meta, [onerror], [onload], [onclick], [srcdoc], [data-commandlinker-command]").length, `${kind}: ${text}`).toBe(0);
        act(() => undo.splice(0).forEach((each) => each()));
        document.body.replaceChildren();
      }
    }
  });
});
