/** A page that mounts every view from the built bundle with sample records, without Jupyter.
 *
 * Query: view (a kind, or kind.sample; default all), theme (light or dark), focus (index of a token to open), tab, stream (tokens per second:
 * the first sample grows by real deltas; figures appear in document.title).
 */

import { MORE } from "./pages_more";
import { RUNS, type Sample } from "./samples";

const query = new URLSearchParams(location.search);
const wanted = query.get("view") ?? "";
document.documentElement.dataset.theme = query.get("theme") === "dark" ? "dark" : "light";

const ALL: Readonly<Record<string, Readonly<Record<string, Sample>>>> = { run: RUNS, ...MORE };

function chosen(): Sample[] {
  const [kind, name] = wanted.split(".");
  return Object.entries(ALL)
    .filter(([group]) => !kind || group === kind)
    .flatMap(([, samples]) => Object.entries(samples).filter(([key]) => !name || key === name))
    .map(([, sample]) => sample);
}

const url = new URL("../../mlxnb_widgets/static/bundle.js", import.meta.url).href;
const { mount, applyDelta, signal } = (await import(/* @vite-ignore */ url)) as typeof import("../src/bundle");
const main = document.getElementById("main") as HTMLElement;
const log: unknown[] = [];
Object.assign(globalThis, { commands: log });

for (const sample of chosen()) {
  const title = document.createElement("h2");
  title.textContent = sample.title;
  const el = document.createElement("div");
  main.append(title, el);
  const record = signal(sample.record);
  const rate = Number(query.get("stream"));
  if (rate > 0) record.value = grow(sample.record, rate, record);
  mount(el, sample.kind, {
    live: sample.live ?? false,
    record,
    command: (name: string, args?: object) => {
      log.push([name, args]);
      return Promise.resolve(null);
    },
    setting: { theme: "auto", ...sample.setting, ...(query.get("tab") ? { view: query.get("tab") as string } : {}) },
  });
  for (const next of sample.feed ?? []) setTimeout(() => (record.value = next), 500); // the chunk of instruments is here by then
}

/** The record without its tokens, which then come at `rate` a second in 20 deltas a second. Frame times go to document.title. */
function grow(whole: unknown, rate: number, record: { value: unknown }): unknown {
  const full = whole as { tokens: { text: string }[]; usage: object };
  const start = { ...full, status: "running", text: "", tokens: [], finish_reason: null, usage: { ...full.usage, completion_tokens: null } };
  const frames: number[] = [];
  let last = performance.now();
  const frame = (now: number) => {
    frames.push(now - last);
    last = now;
    if (at < full.tokens.length) requestAnimationFrame(frame);
  };
  let at = 0;
  let text = 0;
  const began = performance.now();
  const timer = setInterval(() => {
    const upTo = Math.min(full.tokens.length, Math.floor(((performance.now() - began) / 1000) * rate));
    const tokens = full.tokens.slice(at, upTo);
    const delta = tokens.map((token) => token.text).join("");
    const applied = applyDelta(record.value, { key: "", run: 0, at, tokens: tokens as never, text_at: text, text: delta });
    if (applied.ok) record.value = applied.record;
    at = upTo;
    text += delta.length;
    if (at < full.tokens.length) return;
    clearInterval(timer);
    record.value = { ...(record.value as object), status: "done", finish_reason: "stop" };
    const sorted = frames.slice(5).sort((a, b) => a - b);
    const p = (share: number) => (sorted[Math.floor(sorted.length * share)] ?? 0).toFixed(1);
    document.title = `done tokens=${at} frames=${sorted.length} p50=${p(0.5)} p95=${p(0.95)} p99=${p(0.99)} max=${p(0.9999)} dom=${document.querySelectorAll("*").length}`;
  }, 50);
  requestAnimationFrame(frame);
  return start;
}

const focus = query.get("focus");
if (focus !== null) setTimeout(() => document.querySelector<HTMLElement>(`.mlxnb-tok[data-i="${Number(focus)}"]`)?.focus(), 100);
