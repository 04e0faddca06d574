/** The only way from a record or trait to a view. Input is hostile: any JSON gives a typed value or a notice, never a throw. */

import type { Origin, Status } from "./protocol";
import { unpackRecord } from "./unpack";

export const MAX_RUNS = 512;
export const MAX_TOKENS = 20_000;
export const MAX_TOP = 64;
export const MAX_TEXT = 2_000_000;
export const MAX_SHORT = 2_000;
const MAX_ENTRIES = 256;
const MAX_TOKEN_TEXT = 4_000;

export const ORIGINS: readonly Origin[] = ["sampled", "filled", "echo", "drafted", "forced"];
const STATUSES: readonly Status[] = ["waiting", "loading", "prefill", "running", "done", "stopped", "failed"];

export interface AlternativeData {
  readonly id: number;
  readonly text: string;
  readonly logprob: number | null;
  /** Why it could not be chosen; null if it could. */
  readonly masked: string | null;
}

export interface TokenData {
  readonly id: number;
  readonly text: string;
  readonly origin: Origin;
  /** Seconds since submit; null if unknown. */
  readonly t: number | null;
  readonly logprob: number | null;
  readonly rank: number | null;
  readonly top: readonly AlternativeData[];
  /** A person chose it. */
  readonly byHand: boolean;
}

export interface PhaseData {
  readonly kind: string;
  readonly phase: string;
  readonly t: number;
  readonly until: number;
  readonly done: number | null;
  readonly total: number | null;
}

export interface RunData {
  readonly id: string;
  readonly status: Status;
  readonly model: string;
  readonly labels: readonly (readonly [string, string])[];
  readonly text: string;
  readonly prefill: string;
  /** `prefill + text`: the assistant's whole turn. */
  readonly answer: string;
  readonly promptText: string;
  readonly messages: readonly { readonly role: string; readonly content: string }[];
  /** Shared and append-only while the run lives: compare lengths, not identity. */
  readonly tokens: readonly TokenData[];
  /** Why tokens are missing or cut; null if they are all there. */
  readonly tokensNote: string | null;
  readonly usage: UsageData;
  readonly seed: string | null;
  readonly finish: string | null;
  readonly stop: string | null;
  readonly error: { readonly kind: string; readonly message: string; readonly hint: string } | null;
  readonly timing: { readonly started: number | null; readonly firstToken: number | null; readonly ended: number | null };
  readonly phases: readonly PhaseData[];
  readonly request: Readonly<Record<string, unknown>>;
  readonly maxTokens: number | null;
  readonly live: boolean;
  /** Asked to stop, and not over yet. */
  readonly stopping: boolean;
}

export interface UsageData {
  readonly promptTokens: number | null;
  readonly cachedTokens: number | null;
  /** Of those, read from the SSD tier. */
  readonly ssdTokens: number | null;
  readonly completionTokens: number | null;
  readonly forwards: number | null;
  readonly kvBytes: number | null;
  readonly codec: string | null;
  readonly declined: readonly string[];
}

export type Parsed =
  | { readonly kind: "run"; readonly run: RunData; readonly raw: unknown }
  | { readonly kind: "group"; readonly runs: readonly RunData[]; readonly note: string | null; readonly raw: unknown }
  | { readonly kind: "notice"; readonly message: string };

// -- scalars: each gives a safe value for anything ------------------------------------------------------------------------

export type Dict = Readonly<Record<string, unknown>>;

export function dict(value: unknown): Dict {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Dict) : {};
}

/** An own property only: a record cannot reach a prototype. */
export function field(of: Dict, name: string): unknown {
  return Object.prototype.hasOwnProperty.call(of, name) ? of[name] : undefined;
}

export function list(value: unknown, limit: number = MAX_ENTRIES): readonly unknown[] {
  return Array.isArray(value) ? (value.length > limit ? value.slice(0, limit) : value) : [];
}

export function str(value: unknown, limit: number = MAX_SHORT): string {
  if (typeof value === "string") return value.length > limit ? `${value.slice(0, limit)}…` : value;
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  return "";
}

/** A finite number; null for anything else. Python writes what JSON has not as "inf", "-inf" or "nan". */
export function num(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** A log probability: what cannot happen is -Infinity, a number from a damaged record never above 0. */
function nats(value: unknown): number | null {
  const n = value === "-inf" ? -Infinity : num(value);
  return n === null ? null : Math.min(0, n);
}

export function count(value: unknown): number | null {
  const n = num(value);
  return n !== null && n >= 0 && Number.isSafeInteger(n) ? n : null;
}

/** Any JSON value as one short line. */
export function short(value: unknown, limit = 60): string {
  let shown: string;
  if (typeof value === "number") shown = String(Number.isInteger(value) ? value : Number(value.toPrecision(6)));
  else if (typeof value === "object" && value !== null) shown = Array.isArray(value) ? `[${value.length} items]` : "{…}";
  else shown = String(value ?? "");
  shown = shown.slice(0, limit * 4).replace(/\s+/g, " ");
  return shown.length > limit ? `${shown.slice(0, limit - 1)}…` : shown;
}

// -- a run ----------------------------------------------------------------------------------------------------------------

function alternative(value: unknown): AlternativeData {
  const d = dict(value);
  const masked = field(d, "masked");
  return {
    id: count(field(d, "id")) ?? -1,
    text: str(field(d, "text"), MAX_TOKEN_TEXT),
    logprob: nats(field(d, "logprob")),
    masked: typeof masked === "string" ? str(masked) : masked === true ? "not allowed here" : null,
  };
}

export function parseToken(value: unknown): TokenData {
  const d = dict(value);
  const origin = field(d, "origin");
  return {
    id: count(field(d, "id")) ?? -1,
    text: str(field(d, "text"), MAX_TOKEN_TEXT),
    origin: ORIGINS.find((known) => known === origin) ?? "sampled",
    t: num(field(d, "t")),
    logprob: nats(field(d, "logprob")),
    rank: count(field(d, "rank")),
    top: list(field(d, "top"), MAX_TOP).map(alternative),
    byHand: field(d, "by_hand") === true,
  };
}

/** Tokens already seen of a raw array: a live host appends to it, so only what is new is read again. */
const seen = new WeakMap<object, TokenData[]>();

function parseTokens(value: unknown): readonly TokenData[] {
  if (!Array.isArray(value)) return [];
  const known = seen.get(value) ?? [];
  if (known.length === 0) seen.set(value, known);
  for (let i = known.length; i < Math.min(value.length, MAX_TOKENS); i++) known.push(parseToken(value[i]));
  return known;
}

function phase(value: unknown): PhaseData {
  const d = dict(value);
  const t = num(field(d, "t")) ?? 0;
  return {
    kind: str(field(d, "kind")),
    phase: str(field(d, "phase")),
    t,
    until: num(field(d, "until")) ?? t,
    done: count(field(d, "done")),
    total: count(field(d, "total")),
  };
}

function usage(value: unknown): UsageData {
  const d = dict(value);
  const execution = dict(field(d, "execution"));
  const kv = dict(field(d, "kv"));
  const prompt = dict(field(d, "prompt_tokens_details"));
  return {
    promptTokens: count(field(d, "prompt_tokens")),
    cachedTokens: count(field(prompt, "cached_tokens")),
    ssdTokens: count(field(prompt, "ssd_tokens")),
    completionTokens: count(field(d, "completion_tokens")),
    forwards: count(field(execution, "steps")) ?? count(field(execution, "forwards")),
    kvBytes: count(field(kv, "bytes")) ?? count(field(execution, "kv_bytes")),
    codec: str(field(execution, "codec"), 32) || null,
    declined: list(field(execution, "declined")).map((reason) => str(reason, 120)).filter(Boolean),
  };
}

function problem(value: unknown): RunData["error"] {
  if (typeof value !== "object" || value === null) return null;
  const d = dict(value);
  return { kind: str(field(d, "kind"), 80), message: str(field(d, "message")), hint: str(field(d, "hint")) };
}

function parseRun(d: Dict): RunData {
  const status = field(d, "status");
  const known = STATUSES.find((name) => name === status) ?? "done";
  const prompt = dict(field(d, "prompt"));
  const text = str(field(d, "text"), MAX_TEXT);
  const prefill = str(field(prompt, "prefill"), MAX_TEXT);
  const messages = list(field(prompt, "messages")).map((m) => ({
    role: str(field(dict(m), "role"), 40),
    content: str(field(dict(m), "content"), MAX_TEXT),
  }));
  const rawTokens = field(d, "tokens");
  const request = dict(field(d, "request"));
  const timing = dict(field(d, "timing"));
  const seed = field(dict(field(d, "seed")), "value");
  return {
    id: str(field(d, "id"), 120),
    status: known,
    model: str(field(d, "model"), 200),
    labels: Object.entries(dict(field(d, "labels"))).slice(0, 32).map(([name, value]) => [short(name), short(value)] as const),
    text,
    prefill,
    answer: prefill + text,
    promptText: str(field(prompt, "text"), MAX_TEXT) || (messages.at(-1)?.content ?? ""),
    messages,
    tokens: parseTokens(rawTokens),
    tokensNote: tokensNote(d, rawTokens),
    usage: usage(field(d, "usage")),
    seed: typeof seed === "number" || typeof seed === "string" ? str(seed, 32) : null,
    finish: str(field(d, "finish_reason"), 40) || null,
    stop: str(field(d, "stop"), 200) || null,
    error: problem(field(d, "error")),
    timing: {
      started: num(field(timing, "started")),
      firstToken: num(field(timing, "first_token")),
      ended: num(field(timing, "ended")),
    },
    phases: list(field(d, "phases"), 64).map(phase),
    request,
    maxTokens: count(field(request, "max_tokens")),
    live: known !== "done" && known !== "stopped" && known !== "failed",
    stopping: field(d, "stopping") === true,
  };
}

function tokensNote(d: Dict, raw: unknown): string | null {
  const note = str(field(d, "tokens_note"), 200);
  if (note) return note;
  if (raw === null || raw === undefined) return "This output was saved without its tokens.";
  if (!Array.isArray(raw)) return "The tokens of this output cannot be read.";
  return raw.length > MAX_TOKENS ? `Only the first ${MAX_TOKENS.toLocaleString("en")} tokens are shown.` : null;
}

// -- a whole record -------------------------------------------------------------------------------------------------------

/** A run, a group, or a notice that says in words why there is nothing to draw. */
export function parseRecord(value: unknown): Parsed {
  try {
    return parse(value);
  } catch {
    return { kind: "notice", message: "This output cannot be read: its data is damaged." };
  }
}

function parse(value: unknown): Parsed {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    return { kind: "notice", message: "This output has no run record." };
  }
  const schema = field(dict(value), "schema");
  const d = dict(unpackRecord(value));
  if (schema === "mlxnb.run/1") return { kind: "run", run: parseRun(d), raw: value };
  if (schema === "mlxnb.group/1") {
    const all = field(d, "runs");
    if (!Array.isArray(all)) return { kind: "notice", message: "This output is a group without runs." };
    const runs = list(all, MAX_RUNS).map((run) => parseRun(dict(run)));
    const note = all.length > MAX_RUNS ? `Only the first ${MAX_RUNS} of ${all.length.toLocaleString("en")} runs are shown.` : null;
    return { kind: "group", runs, note, raw: value };
  }
  if (typeof schema === "string" && schema.startsWith("mlxnb.")) {
    return {
      kind: "notice",
      message: `This output was made by another version of mlxnb (${short(schema)}). Update mlxnb to see it, or run the cell again.`,
    };
  }
  return { kind: "notice", message: "This output is not a run record of mlxnb." };
}
