/** A status of the engine, read from a snapshot that may hold anything. Pure.
 *
 * A snapshot is `client.status()` plus: `t` (seconds, monotonic), per model `tokens` (produced so far, all rows), `codec`,
 * `slots: [{slot, id, label, phase: "prefill"|"running", tokens, prompt_tokens, cached_tokens, kv_bytes, from}]`,
 * `waiting: [{id, label, why}]`, and `ended: [{id, how: "done"|"stopped"|"failed", label, from, to}]` (the last 64), `memory: {active_bytes, cache_bytes, limit_bytes}`.
 * What is missing is left out of the picture, never guessed.
 */
import { list, num, str, type Dict } from "./parse";
import { maybe, oneOf } from "./read";

/** How a row left its slot; "running" while it has not. */
export type How = "running" | "moved" | "done" | "stopped" | "failed" | "ended";

export interface Slot {
  slot: number;
  id: string;
  label: string;
  phase: "prefill" | "running";
  tokens: number;
  prompt: number | null;
  cached: number | null;
  kv: number | null;
  codec: string;
  /** When it began, on the clock of `t`; null if that is not told. */
  from: number | null;
}
export interface Waiting {
  id: string;
  label: string;
  why: string;
}
/** A row that is over. from, to: when it was at work, on the clock of `t`; null where that is not told. */
export interface End {
  how: How;
  label: string;
  from: number | null;
  to: number | null;
}
export interface Snapshot {
  t: number;
  state: string;
  error: string;
  device: string;
  models: string[];
  loading: { name: string; phase: string; done: number; total: number }[];
  rows: number;
  queue: number;
  maxRows: number | null;
  steps: number;
  tokens: number | null;
  kv: number;
  maxKv: number | null;
  weights: number;
  weightsAs: string;
  memory: { active: number; cache: number | null; limit: number | null } | null;
  slots: Slot[] | null;
  waiting: Waiting[];
  ended: Map<string, End>;
}
/** A snapshot as the view needs it, or null if this is none. `now` stands in for a missing `t`. */
export function parseStatus(raw: unknown, now: number): Snapshot | null {
  const status = maybe(raw);
  if (!status || typeof status.state !== "string") return null;
  const models = list(status.models, 32).flatMap((model): Dict[] => {
    const one = maybe(model);
    return one ? [one] : [];
  });
  const sum = (name: string): number => models.reduce((total, model) => total + Math.max(0, num(model[name]) ?? 0), 0);
  const limits = maybe(status.limits) ?? {};
  const memory = maybe(status.memory);
  const active = num(memory?.active_bytes);
  const told = models.filter((model) => Array.isArray(model.slots));
  return {
    t: num(status.t) ?? now,
    state: str(status.state, 40),
    error: str(status.error, 2000),
    device: str(maybe(status.backend)?.device, 40),
    models: models.map((model) => str(model.name, 120)),
    loading: list(status.loading, 32).flatMap(parseLoading),
    rows: sum("rows"),
    queue: sum("queue") + sum("preparing"),
    maxRows: positive(limits.max_rows),
    steps: sum("steps"),
    tokens: models.some((model) => num(model.tokens) !== null) ? sum("tokens") : null,
    kv: sum("kv_bytes"),
    maxKv: positive(limits.max_kv_bytes),
    weights: sum("weight_bytes"),
    weightsAs: str(models[0]?.weights, 60),
    memory: memory && active !== null ? { active, cache: num(memory.cache_bytes), limit: positive(memory.limit_bytes) } : null,
    slots: told.length ? told.flatMap((model, at) => slotsOf(model, told, at)) : models.length ? null : [],
    waiting: models.flatMap((model) => list(model.waiting, 256).flatMap(parseWaiting)),
    ended: new Map(list(status.ended, 256).flatMap(parseEnded)),
  };
}

const positive = (raw: unknown): number | null => {
  const value = num(raw);
  return value !== null && value > 0 ? value : null;
};

/** Rows of a model. The slots of a second model come after those of the first, so that two rows never share a lane. */
function slotsOf(model: Dict, all: Dict[], at: number): Slot[] {
  const before = all.slice(0, at).reduce((n, other) => n + list(other.slots, 256).length, 0);
  return list(model.slots, 256).flatMap((raw) => {
    const row = maybe(raw);
    const slot = num(row?.slot);
    const id = str(row?.id, 200);
    if (!row || slot === null || slot < 0 || slot > 255 || !id) return [];
    return [
      {
        slot: before + Math.floor(slot),
        id,
        label: str(row.label, 80) || id,
        phase: oneOf(row.phase, ["prefill", "running"] as const, "running"),
        tokens: num(row.tokens) ?? 0,
        prompt: num(row.prompt_tokens),
        cached: num(row.cached_tokens),
        kv: num(row.kv_bytes),
        codec: str(model.codec, 20),
        from: num(row.from),
      },
    ];
  });
}

function parseWaiting(raw: unknown): Waiting[] {
  const row = maybe(raw);
  const id = str(row?.id, 200);
  return row && id ? [{ id, label: str(row.label, 80) || id, why: str(row.why, 200) }] : [];
}

function parseEnded(raw: unknown): [string, End][] {
  const row = maybe(raw);
  const id = str(row?.id, 200);
  if (!row || !id) return [];
  return [[id, { how: oneOf(row.how, ["done", "stopped", "failed"] as const, "done"), label: str(row.label, 80) || id, from: num(row.from), to: num(row.to) }]];
}

function parseLoading(raw: unknown): Snapshot["loading"] {
  const one = maybe(raw);
  return one ? [{ name: str(one.name, 120), phase: str(one.phase, 60), done: num(one.done) ?? 0, total: num(one.total) ?? 0 }] : [];
}
