/** Every sample of the gallery, live and saved: what can be pressed has a name and a role, and nothing is told by a picture alone. */

import { signal } from "@preact/signals";
import { afterEach, describe, expect, it } from "vitest";

import { MORE } from "../gallery/pages_more";
import { RUNS, type Sample } from "../gallery/samples";
import type { Host } from "../src/host";
import { mount } from "../src/mount";
import "../src/views";
import "../src/monitor";
import "../src/playground";
import "../src/stepper";
import "../src/cache";
import "../src/loom";

const SAMPLES = Object.entries({ run: RUNS, ...MORE }).flatMap(([kind, samples]) => Object.entries(samples).map(([name, sample]) => [`${kind}.${name}`, sample] as const));
const PRESSABLE = "button, a[href], input, select, textarea, summary, [tabindex], [role=button], [role=tab], [role=switch], [role=slider]";
const left: (() => void)[] = [];

afterEach(() => {
  for (const take of left.splice(0)) take();
  document.body.replaceChildren();
});

async function show(sample: Sample, view?: string): Promise<HTMLElement> {
  const el = document.createElement("div");
  document.body.append(el);
  const record = signal<unknown>(sample.record);
  const host: Host = { live: sample.live ?? false, record, command: () => Promise.resolve(null), setting: { theme: "light", ...sample.setting, ...(view ? { view } : {}) } };
  left.push(mount(el, sample.kind, host));
  for (const next of sample.feed ?? []) record.value = next;
  for (let i = 0; i < 3; i++) await new Promise((done) => setTimeout(done, 0));
  return el;
}

/** The name that a screen reader gives an element, as far as our markup needs it. */
function nameOf(el: Element): string {
  const by = el.getAttribute("aria-labelledby");
  if (by) return by.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim();
  const own = el.getAttribute("aria-label");
  if (own !== null) return own.trim();
  const copy = el.cloneNode(true) as Element;
  copy.querySelectorAll("[aria-hidden=true]").forEach((hidden) => hidden.remove());
  const label = el.id ? document.querySelector(`label[for="${el.id}"]`)?.textContent : el.closest("label")?.textContent;
  return ((el.matches("input, select, textarea") ? "" : copy.textContent) || label || el.getAttribute("title") || "").trim();
}

function faults(root: HTMLElement): string[] {
  const found: string[] = [];
  const say = (what: string, el: Element) => found.push(`${what}: ${el.outerHTML.slice(0, 140)}`);
  for (const el of root.querySelectorAll(PRESSABLE)) {
    if (!nameOf(el)) say("no name", el);
    if (Number(el.getAttribute("tabindex") ?? 0) > 0) say("jumps the tab order", el);
    if (el.parentElement?.closest("button, a[href], summary")) say("a control in a control", el);
    if (el.closest("[aria-hidden=true]")) say("hidden from who cannot see it", el);
  }
  for (const el of root.querySelectorAll("[role=img], [role=progressbar], [role=dialog], [role=group], section")) if (!nameOf(el)) say("no name", el);
  for (const el of root.querySelectorAll("i:empty, svg, canvas")) if (!el.closest("[aria-hidden=true], [role=img]")) say("a picture without words", el);
  for (const el of root.querySelectorAll("[role=progressbar]")) if (!el.hasAttribute("aria-valuenow")) say("progress without a value", el);
  for (const el of root.querySelectorAll("[role=tablist]")) {
    const tabs = [...el.querySelectorAll<HTMLElement>("[role=tab]")];
    if (tabs.filter((tab) => tab.tabIndex === 0).length !== 1) say("not one tab stop", el);
    const chosen = tabs.filter((tab) => tab.getAttribute("aria-selected") === "true");
    const panel = document.getElementById(chosen[0]?.getAttribute("aria-controls") ?? "");
    if (chosen.length !== 1 || panel?.getAttribute("role") !== "tabpanel" || panel.getAttribute("aria-labelledby") !== chosen[0]?.id) say("a tab without its panel", el);
  }
  for (const el of root.querySelectorAll("table.mlxnb-table th, .mlxnb-stp th, .mlxnb-draw-table th")) if (!el.hasAttribute("scope")) say("a heading of nothing", el);
  for (const name of ["aria-labelledby", "aria-describedby"]) {
    for (const el of root.querySelectorAll(`[${name}]`)) if (!document.getElementById(el.getAttribute(name) ?? "")) say(`${name} of nobody`, el);
  }
  const ids = [...root.querySelectorAll("[id]")].map((el) => el.id);
  for (const id of ids) if (document.querySelectorAll(`[id="${id}"]`).length > 1) found.push(`twice the id ${id}`);
  return found;
}

describe("the check of names and roles", () => {
  it("catches what it is for", () => {
    document.body.innerHTML = '<div id=r><button></button><button tabindex=2>x</button><button>a<a href=x>b</a></button><div role=img></div><i></i><div role=progressbar aria-label=x></div><div role=tablist><button role=tab>x</button></div></div>';
    expect(faults(document.body).map((fault) => fault.split(":")[0])).toEqual(expect.arrayContaining(["no name", "jumps the tab order", "a control in a control", "a picture without words", "progress without a value", "a tab without its panel"]));
  });
});

describe.each(SAMPLES)("%s", { timeout: 30_000 }, (_, sample) => {
  it("has names and roles for everything", async () => {
    for (const view of sample.kind === "run" || sample.kind === "compare" ? [undefined, "tokens"] : [undefined]) {
      const el = await show(sample, view);
      expect(faults(el)).toEqual([]);
      expect(el.querySelectorAll("[role=status]").length, "one voice for a view").toBeLessThanOrEqual(1);
    }
  });

  it("says whose glyph is whose in words as well", async () => {
    const el = await show(sample);
    for (const strip of el.querySelectorAll(".mlxnb-strip")) expect(strip.getAttribute("aria-label")).toMatch(/\w/);
    for (const state of el.querySelectorAll(".mlxnb-state, .mlxnb-warn, .mlxnb-err, .mlxnb-ok")) expect(state.closest(".mlxnb-note, .mlxnb-state")?.textContent?.trim() || state.textContent?.trim(), state.outerHTML).toBeTruthy();
  });
});
