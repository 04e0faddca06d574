/** The engine over time, folded from status snapshots at 1 Hz. Pure: no DOM, no clock of its own. */

import { parseStatus, type End, type How, type Slot, type Snapshot } from "./monitor_status";
import { field, list, num, str } from "./parse";
import { maybe } from "./read";
import { HISTORY_SCHEMA } from "./protocol";

export { parseStatus, type Snapshot };

export const KEPT_S = 3600;
const MAX_SPANS = 2000;
/** Bars drawn at once, the newest: an hour of short runs would be thousands of slivers. */
const MAX_DRAWN = 400;
/** The kernel tells once a second, and only what changed: a longer silence means that nothing did until a beat ago. */
const BEAT_S = 1;
const GAP_S = 5;

export interface Sample {
  t: number;
  rows: number;
  queue: number;
  tokensPerS: number | null;
  forwardsPerS: number | null;
  perForward: number | null;
}
export interface Span {
  id: string;
  label: string;
  slot: number;
  from: number;
  to: number | null;
  promptUntil: number;
  how: How;
  movedIn: boolean;
}
export interface Move {
  t: number;
  id: string;
  label: string;
  from: number;
  to: number;
}
export interface Wait {
  id: string;
  label: string;
  from: number;
  to: number | null;
}
export interface History {
  last: Snapshot | null;
  samples: Sample[];
  spans: Span[];
  moves: Move[];
  waits: Wait[];
  rates: Map<string, number>;
  idleSince: number | null;
}

export const EMPTY: History = { last: null, samples: [], spans: [], moves: [], waits: [], rates: new Map(), idleSince: null };

/** The history with one more snapshot. A clock that runs backwards, or counters that do, mean another engine: start afresh. */
export function advance(history: History, now: Snapshot): History {
  const last = history.last;
  if (!last) return start(now);
  if (now.t === last.t) return history;
  if (now.t < last.t || now.steps < last.steps) return start(now);
  const gap = now.t - last.t > GAP_S;
  const sample = sampleOf(last, now, gap ? BEAT_S : now.t - last.t);
  const quiet = gap
    ? [last.t + BEAT_S, now.t - BEAT_S].map((t) => ({
        ...sample,
        t,
        rows: last.rows,
        queue: last.queue,
        tokensPerS: sample.tokensPerS === null ? null : 0,
        forwardsPerS: 0,
        perForward: null,
      }))
    : [];
  const oldest = now.t - KEPT_S;
  const { spans, moves } = foldRows(gap ? history.spans.map((span) => closed(span, last.t, "ended")) : history.spans, history.moves, now, last.t);
  return {
    last: now,
    samples: [...history.samples.filter((old) => old.t >= oldest), ...quiet, sample],
    spans: spans.filter((span) => span.to === null || span.to >= oldest).slice(-MAX_SPANS),
    moves: moves.filter((move) => move.t >= oldest).slice(-MAX_SPANS),
    waits: foldWaits(history.waits, now)
      .filter((wait) => wait.to === null || wait.to >= oldest)
      .slice(-MAX_SPANS),
    rates: ratesOf(last, now),
    idleSince: now.rows || now.queue || now.steps > last.steps ? null : (history.idleSince ?? now.t),
  };
}

/** What the kernel kept from before this view was there, as mlxnb/history.py writes it, with the newest status on top. */
export function withPast(history: History, raw: unknown): History {
  const past = maybe(raw);
  if (past?.schema !== HISTORY_SCHEMA) return history;
  const labels = maybe(past.labels) ?? {};
  const named = (id: unknown) => ({ id, label: field(labels, str(id, 200)) });
  const status = (moment: unknown): unknown => ({
    state: "ready",
    t: maybe(moment)?.t,
    ended: list(maybe(moment)?.ended, 256).map((row) => (Array.isArray(row) ? { ...named(row[0]), how: row[1], from: row[2], to: row[3] } : null)),
    models: list(maybe(moment)?.models, 32).map((model) => ({
      ...maybe(model),
      slots: Array.isArray(maybe(model)?.slots) ? list(maybe(model)?.slots, 256).map((row) => (Array.isArray(row) ? { slot: row[0], ...named(row[1]), phase: row[2] === 1 ? "prefill" : "running" } : null)) : null,
      waiting: list(maybe(model)?.waiting, 256).map(named),
    })),
  });
  let folded = EMPTY;
  for (const moment of list(past.moments, KEPT_S)) {
    const snapshot = num(maybe(moment)?.t) === null ? null : parseStatus(status(moment), 0);
    if (snapshot && (history.last === null || snapshot.t < history.last.t)) folded = advance(folded, snapshot);
  }
  return folded.last && history.last ? advance(folded, history.last) : folded.last ? folded : history;
}

function start(now: Snapshot): History {
  const { spans, moves } = foldRows([], [], now, now.t);
  const idleSince = now.rows || now.queue ? null : now.t;
  return {
    ...EMPTY,
    last: now,
    samples: [{ t: now.t, rows: now.rows, queue: now.queue, tokensPerS: null, forwardsPerS: null, perForward: null }],
    spans,
    moves,
    waits: foldWaits([], now),
    idleSince,
  };
}

function sampleOf(last: Snapshot, now: Snapshot, seconds: number): Sample {
  const steps = now.steps - last.steps;
  const tokens = now.tokens !== null && last.tokens !== null && now.tokens >= last.tokens ? now.tokens - last.tokens : null;
  return {
    t: now.t,
    rows: now.rows,
    queue: now.queue,
    tokensPerS: tokens === null ? null : tokens / seconds,
    forwardsPerS: steps / seconds,
    perForward: tokens === null || steps === 0 ? null : tokens / steps,
  };
}

const closed = (span: Span, t: number, how: How): Span => (span.to === null ? { ...span, to: t, how } : span);

/** Close the bars of rows that left their slot, open those of rows that came. A row seen in another slot has moved. */
function foldRows(before: Span[], moves: Move[], now: Snapshot, previous: number): { spans: Span[]; moves: Move[] } {
  const here = new Map((now.slots ?? []).map((slot) => [slot.id, slot]));
  const open = new Map(before.filter((span) => span.to === null).map((span) => [span.id, span]));
  const spans = before.map((span) => {
    if (span.to !== null) return span;
    const slot = here.get(span.id);
    if (!slot) return exactly(closed(span, now.t, "ended"), now.ended.get(span.id));
    if (slot.slot !== span.slot) return closed(span, now.t, "moved");
    return slot.phase === "prefill" ? { ...span, promptUntil: now.t } : span;
  });
  const fresh: Move[] = [];
  for (const slot of here.values()) {
    const was = open.get(slot.id);
    if (was?.slot === slot.slot) continue;
    if (was) fresh.push({ t: now.t, id: slot.id, label: slot.label, from: was.slot, to: slot.slot });
    const from = was ? now.t : (slot.from ?? previous);
    spans.push({
      id: slot.id,
      label: slot.label,
      slot: slot.slot,
      from,
      to: null,
      promptUntil: !was && slot.phase === "prefill" ? now.t : from,
      how: "running",
      movedIn: Boolean(was),
    });
  }
  return { spans: [...spans, ...unseen(spans, now)], moves: [...moves, ...fresh] };
}

/** A bar that has ended, by what the engine says of its end: two snapshots only tell between which of them it was. */
function exactly(span: Span, end: End | undefined): Span {
  if (!end) return span;
  const from = span.movedIn ? span.from : (end.from ?? span.from);
  const to = Math.max(from, end.to ?? span.to ?? from);
  return { ...span, from, to, promptUntil: Math.max(from, Math.min(span.promptUntil, to)), how: end.how };
}

/** Bars of rows that came and went between two snapshots. Each takes the first slot that was free, as the engine gives them out. */
function unseen(spans: readonly Span[], now: Snapshot): Span[] {
  const known = new Set(spans.map(({ id }) => id));
  const added: Span[] = [];
  for (const [id, { how, label, from, to }] of now.ended) {
    if (known.has(id) || from === null || to === null || to < from || to > now.t + BEAT_S) continue;
    const taken = new Set([...spans, ...added].filter((span) => span.from < to && (span.to ?? now.t) > from).map(({ slot }) => slot));
    let slot = 0;
    while (taken.has(slot)) slot++;
    added.push({ id, label, slot, from, to, promptUntil: from, how, movedIn: false });
  }
  return added;
}

function foldWaits(before: Wait[], now: Snapshot): Wait[] {
  const here = new Map(now.waiting.map((wait) => [wait.id, wait]));
  const kept = before.map((wait) => (wait.to === null && !here.has(wait.id) ? { ...wait, to: now.t } : wait));
  const known = new Set(kept.filter((wait) => wait.to === null).map((wait) => wait.id));
  const fresh = [...here.values()].filter((wait) => !known.has(wait.id));
  return [...kept, ...fresh.map((wait) => ({ id: wait.id, label: wait.label, from: now.t, to: null }))];
}

function ratesOf(last: Snapshot, now: Snapshot): Map<string, number> {
  const before = new Map((last.slots ?? []).map((slot) => [slot.id, slot.tokens]));
  const seconds = now.t - last.t;
  return new Map(
    (now.slots ?? []).flatMap((slot) => {
      const was = before.get(slot.id);
      return was === undefined || slot.tokens < was ? [] : [[slot.id, (slot.tokens - was) / seconds] as const];
    }),
  );
}

// --- what is drawn ----------------------------------------------------------------------------------------------------

export interface Lane {
  slot: number;
  spans: Span[];
  slotNow: Slot | null;
}

/** One lane per slot: all that the engine may fill, at most 16 unless more are in use, and those seen in the window. */
export function lanesOf(history: History, window: number): Lane[] {
  const now = history.last;
  if (!now?.slots) return [];
  const since = now.t - window;
  const seen = history.spans.filter((span) => span.to === null || span.to > since).slice(-MAX_DRAWN);
  const most = Math.max(Math.min(now.maxRows ?? 1, 16), ...seen.map((span) => span.slot + 1));
  return Array.from({ length: most }, (_, slot) => ({
    slot,
    spans: seen.filter((span) => span.slot === slot),
    slotNow: now.slots!.find((row) => row.slot === slot) ?? null,
  }));
}

/** Left edge and width in percent of the window. */
export function placed(from: number, to: number | null, now: number, window: number): { left: number; width: number } {
  const at = (t: number): number => Math.min(100, Math.max(0, (100 * (t - (now - window))) / window));
  const left = at(from);
  return { left, width: Math.max(0, at(to ?? now) - left) };
}

/** Samples of the window as columns for a plot. */
export function columnsOf(
  history: History,
  window: number,
): { t: number[]; rows: number[]; tokens: (number | null)[]; perForward: (number | null)[] } {
  const end = history.last?.t ?? 0;
  const samples = history.samples.filter((sample) => sample.t >= end - window);
  return {
    t: samples.map((sample) => sample.t - end),
    rows: samples.map((sample) => sample.rows),
    tokens: samples.map((sample) => sample.tokensPerS),
    perForward: samples.map((sample) => sample.perForward),
  };
}

export interface Part {
  name: string;
  kind: "weights" | "kv" | "work" | "free";
  bytes: number;
}

/** Memory in parts that add up to the limit, or null where the engine does not say. */
export function memoryOf(now: Snapshot): { parts: Part[]; used: number; limit: number | null } | null {
  if (!now.memory && !now.weights) return null;
  const used = now.memory?.active ?? now.weights + now.kv;
  const work = Math.max(0, used - now.weights - now.kv);
  const limit = now.memory?.limit ?? null;
  const parts: Part[] = [
    { name: `weights${now.weightsAs ? ` ${now.weightsAs}` : ""}`, kind: "weights", bytes: now.weights },
    { name: "K/V", kind: "kv", bytes: now.kv },
    { name: "working", kind: "work", bytes: work },
    { name: "free", kind: "free", bytes: limit === null ? 0 : Math.max(0, limit - used) },
  ];
  return { parts: parts.filter((part) => part.bytes > 0), used, limit };
}
