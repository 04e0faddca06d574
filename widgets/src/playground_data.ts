/** A prompt with sliders: what is set, what a change means, and what it will cost. Pure: no DOM, no host, no clock.
 *
 * Record "mlxnb.playground/1": {schema, model, mode: "chat"|"text", prompt, settings: {...SamplingSpec fields, max_tokens, seed}, runs: [RunRecord], error}.
 * `runs` holds the current run as its only entry, so that deltas reach it as run 0.
 */
import { dict, list, num, parseRecord, str, type Dict, type RunData } from "./parse";
import { maybe, oneOf } from "./read";

export const PLAYGROUND_SCHEMA = "mlxnb.playground/1";
export const DEBOUNCE_MS = 400;

export interface Settings {
  temp: number;
  top_p: number;
  top_k: number;
  min_p: number;
  repetition_penalty: number;
  max_tokens: number;
  seed: number;
}
/** max: end of the slider. most: what may be typed; the engine takes it too. */
export interface Knob {
  name: keyof Settings;
  title: string;
  min: number;
  max: number;
  most: number;
  step: number;
  neutral: number;
  off: string;
  says: string;
}

/** In the order in which the engine applies them: penalties, top-p, min-p, top-k, temperature, draw. */
export const KNOBS: readonly Knob[] = [
  {
    name: "repetition_penalty",
    title: "repetition penalty",
    min: 1,
    max: 2,
    most: 10,
    step: 0.01,
    neutral: 1,
    off: "off",
    says: "divides the scores of the last 20 tokens",
  },
  {
    name: "top_p",
    title: "top-p",
    min: 0.01,
    max: 1,
    most: 1,
    step: 0.01,
    neutral: 1,
    off: "off",
    says: "keeps the likeliest tokens up to this mass",
  },
  {
    name: "min_p",
    title: "min-p",
    min: 0,
    max: 1,
    most: 1,
    step: 0.01,
    neutral: 0,
    off: "off",
    says: "drops what is less likely than this share of the best",
  },
  { name: "top_k", title: "top-k", min: 0, max: 200, most: 1_000_000, step: 1, neutral: 0, off: "off", says: "keeps this many tokens" },
  {
    name: "temp",
    title: "temperature",
    min: 0,
    max: 2,
    most: 100,
    step: 0.05,
    neutral: 0,
    off: "greedy",
    says: "divides what is left, after the filters; 0 takes the likeliest",
  },
];
export const DEFAULTS: Settings = { temp: 0.7, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, max_tokens: 128, seed: 0 };
export const MAX_TOKENS = 4096;
export const MAX_SEED = Number.MAX_SAFE_INTEGER;

export interface Playground {
  readonly model: string;
  readonly mode: "chat" | "text";
  readonly prompt: string;
  readonly settings: Settings;
  readonly run: RunData | null;
  readonly error: string;
}

export function parsePlayground(raw: unknown): Playground | null {
  const record = maybe(raw);
  if (record?.schema !== PLAYGROUND_SCHEMA) return null;
  const parsed = parseRecord(list(record.runs, 1)[0]);
  return {
    model: str(record.model, 200),
    mode: oneOf(record.mode, ["chat", "text"] as const, "chat"),
    prompt: str(record.prompt, 200_000),
    settings: parseSettings(dict(record.settings)),
    run: parsed.kind === "run" ? parsed.run : null,
    error: str(dict(record.error).message, 2000),
  };
}

export function parseSettings(raw: Dict): Settings {
  const read = (name: keyof Settings, min: number, max: number): number => within(num(raw[name]) ?? DEFAULTS[name], min, max);
  const knobs = Object.fromEntries(KNOBS.map((knob) => [knob.name, read(knob.name, knob.min, knob.most)]));
  return { ...DEFAULTS, ...knobs, max_tokens: Math.round(read("max_tokens", 1, MAX_TOKENS)), seed: Math.round(read("seed", 0, MAX_SEED)) };
}

/** What a person chose: all that differs from what is in force or from what was sent last. The rest stays open for the model's own. */
export function chosenSettings(now: Settings, inForce: Settings, sent?: Settings): Partial<Settings> {
  return Object.fromEntries(Object.entries(now).filter(([name, value]) => value !== inForce[name as keyof Settings] || (sent && value !== sent[name as keyof Settings])));
}

export const within = (value: number, min: number, max: number): number => Math.min(max, Math.max(min, value));

/** A typed figure as a setting, or null while it is not one. */
export function typed(name: keyof Settings, text: string): number | null {
  const value = Number(text.trim().replace(",", "."));
  if (!text.trim() || !Number.isFinite(value)) return null;
  if (name === "max_tokens") return value >= 1 ? Math.round(within(value, 1, MAX_TOKENS)) : null;
  if (name === "seed") return value >= 0 ? Math.round(within(value, 0, MAX_SEED)) : null;
  const knob = KNOBS.find((one) => one.name === name)!;
  return value >= knob.min && value <= knob.most ? (knob.step === 1 ? Math.round(value) : value) : null;
}

export const figure = (knob: Knob, value: number): string =>
  value === knob.neutral ? knob.off : knob.step === 1 ? String(value) : value.toFixed(2).replace(/0$/, "");

/** What was asked last and what is on the sliders now: whether they differ, and in what. */
export interface Asked {
  prompt: string;
  settings: Settings;
}
export function changedNames(asked: Asked | null, now: Asked): string[] {
  if (!asked) return ["prompt"];
  const names = (Object.keys(now.settings) as (keyof Settings)[]).filter((name) => now.settings[name] !== asked.settings[name]);
  return [...(now.prompt === asked.prompt ? [] : ["prompt"]), ...names];
}

export interface Cost {
  /** To be read: those that the last run did not find in the prefix cache. */
  promptTokens: number | null;
  cached: boolean;
  maxTokens: number;
  seconds: number | null;
  reason: string;
}

/** What the next run will take, from the figures of the last one: reading the prompt again, then at most `max_tokens` forwards.
 * An estimate; null seconds where nothing was measured yet.
 */
export function costOf(run: RunData | null, changed: readonly string[], settings: Settings): Cost {
  const first = run?.timing.firstToken ?? null;
  const ended = run?.timing.ended ?? null;
  const tokens = run?.usage.completionTokens ?? run?.tokens.length ?? 0;
  const perToken = first !== null && ended !== null && tokens > 1 ? (ended - first) / (tokens - 1) : null;
  const seconds = perToken === null || first === null ? null : first + perToken * settings.max_tokens;
  const { promptTokens: whole = null, cachedTokens = null } = changed.includes("prompt") ? {} : (run?.usage ?? {});
  const promptTokens = whole === null ? null : Math.max(0, whole - (cachedTokens ?? 0));
  return { promptTokens, cached: (cachedTokens ?? 0) > 0, maxTokens: settings.max_tokens, seconds, reason: reasonOf(changed, settings) };
}

/** What stays the same between two runs, by the engine's rules: a draw depends on the seed and the position alone. */
function reasonOf(changed: readonly string[], settings: Settings): string {
  if (changed.includes("prompt")) return "A new prompt is read from where it departs from what the cache has.";
  if (changed.length && changed.every((name) => name === "max_tokens")) return "Same seed, same beginning: only the length changes.";
  if (settings.temp === 0) return "Temperature 0 draws nothing: top-p, min-p, top-k and the seed have no effect.";
  if (changed.includes("seed")) return "Another seed: other draws from the same chances.";
  return "Same seed, same noise: the answer changes only from the first token that the settings decide otherwise.";
}
