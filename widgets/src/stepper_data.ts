/** What the Stepper shows, read from a record that may hold anything. Pure: no DOM, no host.
 *
 * Record "mlxnb.stepper/1":
 *   {schema, status: "waiting"|"loading"|"working"|"ready"|"done"|"failed", model, error: {kind, message, hint}|null, finish_reason,
 *    settings: {temp, top_p, top_k, min_p, xtc_probability, xtc_threshold, repetition_penalty, presence_penalty, frequency_penalty, seed},
 *    past: [{id, text, how: "prompt"|"drawn"|"hand", probability, rank, dropped_by}],
 *    step: {position, text, vocab, logsumexp, chosen, coin, seconds,
 *           stages: [{name, rule, left, mass}],
 *           candidates: [{id, text, logit, penalised, logprob, kept, dropped_by, probability_after, noise, seen}]} | null}
 * Order of the engine: processors, log-softmax, top-p, min-p, XTC, top-k, temperature, then the largest of score + noise.
 */
import { list, num, str, type Dict } from "./parse";
import { maybe, oneOf } from "./read";

export const STEPPER_SCHEMA = "mlxnb.stepper/1";
export const STAGES = ["model", "penalties", "top_p", "min_p", "xtc", "top_k", "temperature"] as const;
export type StageName = (typeof STAGES)[number];
const DROPS = ["top_p", "min_p", "xtc", "top_k"] as const;
export type Drop = (typeof DROPS)[number];
const STATUSES = ["waiting", "loading", "working", "ready", "done", "failed"] as const;
const HOWS = ["prompt", "drawn", "hand"] as const;

export const STAGE_TITLES: Record<StageName, string> = {
  model: "Model",
  penalties: "Penalties",
  top_p: "Top-p",
  min_p: "Min-p",
  xtc: "XTC",
  top_k: "Top-k",
  temperature: "Temperature",
};
/** A value to switch a stage on with, and the neutral one. Names are those of SamplingSpec. */
export const SWITCHES: Partial<Record<StageName, { on: Dict; off: Dict }>> = {
  penalties: { on: { repetition_penalty: 1.1 }, off: { repetition_penalty: null, presence_penalty: null, frequency_penalty: null } },
  top_p: { on: { top_p: 0.95 }, off: { top_p: 1 } },
  min_p: { on: { min_p: 0.05 }, off: { min_p: 0 } },
  xtc: { on: { xtc_probability: 0.5, xtc_threshold: 0.1 }, off: { xtc_probability: 0 } },
  top_k: { on: { top_k: 40 }, off: { top_k: 0 } },
  temperature: { on: { temp: 0.8 }, off: { temp: 0 } },
};

export interface Stage {
  name: StageName;
  rule: string;
  left: number | null;
  mass: number | null;
}
export interface Candidate {
  id: number;
  text: string;
  logit: number | null;
  penalised: number | null;
  logprob: number;
  kept: boolean;
  droppedBy: Drop | null;
  after: number | null;
  noise: number | null;
  seen: number;
}
export interface Step {
  position: number;
  vocab: number | null;
  logsumexp: number | null;
  chosen: number | null;
  coin: number | null;
  seconds: number | null;
  stages: Stage[];
  candidates: Candidate[];
}
export interface Past {
  id: number;
  text: string;
  how: (typeof HOWS)[number];
  probability: number | null;
  rank: number | null;
  droppedBy: Drop | null;
}
export interface Stepper {
  status: (typeof STATUSES)[number];
  model: string;
  finish: string;
  settings: Dict;
  past: Past[];
  step: Step | null;
  error: { message: string; hint: string } | null;
}

/** The record as the view needs it, or null if it is none of ours. */
export function parseStepper(raw: unknown): Stepper | null {
  const record = maybe(raw);
  if (record?.schema !== STEPPER_SCHEMA) return null;
  const error = maybe(record.error);
  return {
    status: oneOf(record.status, STATUSES, "waiting"),
    model: str(record.model, 200),
    finish: str(record.finish_reason, 40),
    settings: maybe(record.settings) ?? {},
    past: list(record.past, 8192).flatMap(parsePast),
    step: parseStep(record.step),
    error: error && { message: str(error.message, 2000) || "The step failed.", hint: str(error.hint, 2000) },
  };
}

function parsePast(raw: unknown): Past[] {
  const token = maybe(raw);
  const id = num(token?.id);
  if (!token || id === null) return [];
  return [
    {
      id,
      text: str(token.text, 400),
      how: oneOf(token.how, HOWS, "drawn"),
      probability: num(token.probability),
      rank: num(token.rank),
      droppedBy: dropOf(token.dropped_by),
    },
  ];
}

const dropOf = (raw: unknown): Drop | null => DROPS.find((name) => name === raw) ?? null;

function parseStep(raw: unknown): Step | null {
  const step = maybe(raw);
  if (!step) return null;
  const stages = list(step.stages, 16).flatMap(parseStage);
  const candidates = list(step.candidates, 256).flatMap(parseCandidate);
  if (!candidates.length) return null;
  return {
    position: num(step.position) ?? 0,
    vocab: num(step.vocab),
    logsumexp: num(step.logsumexp) ?? sumOf(candidates),
    chosen: num(step.chosen),
    coin: num(step.coin),
    seconds: num(step.seconds),
    // The engine's order is fixed: a record that lists it otherwise is drawn in the true order all the same.
    stages: STAGES.flatMap((name) => stages.find((stage) => stage.name === name) ?? []),
    candidates: unique(candidates).sort((a, b) => b.logprob - a.logprob || a.id - b.id),
  };
}

/** Where no rule has touched a listed score, the log-sum of all scores is what normalised them; null where that is not so. */
function sumOf(candidates: readonly Candidate[]): number | null {
  const first = candidates[0]!;
  const untouched = candidates.every((one) => one.logit !== null && one.penalised !== null && Math.abs(one.logit - one.penalised) < 1e-6);
  return untouched && first.penalised !== null ? first.penalised - first.logprob : null;
}

/** The step with the stages that do something: an idle rule is named elsewhere and takes no column. */
export function atWork(step: Step, settings: Dict): Step {
  const greedy = !isOn(settings, "temperature");
  return { ...step, stages: step.stages.filter(({ name }) => name === "model" || (isOn(settings, name) && (!greedy || name === "penalties"))) };
}

function unique(candidates: Candidate[]): Candidate[] {
  const seen = new Set<number>();
  return candidates.filter((candidate) => !seen.has(candidate.id) && seen.add(candidate.id));
}

function parseStage(raw: unknown): Stage[] {
  const stage = maybe(raw);
  const name = STAGES.find((known) => known === stage?.name);
  if (!stage || !name) return [];
  const mass = num(stage.mass);
  return [{ name, rule: str(stage.rule, 60), left: num(stage.left), mass: mass !== null && mass > 0 ? mass : null }];
}

function parseCandidate(raw: unknown): Candidate[] {
  const one = maybe(raw);
  const id = num(one?.id);
  const logprob = num(one?.logprob);
  if (!one || id === null || logprob === null) return [];
  const droppedBy = dropOf(one.dropped_by);
  return [
    {
      id,
      text: str(one.text, 400),
      logit: num(one.logit),
      penalised: num(one.penalised),
      logprob,
      kept: droppedBy === null && one.kept !== false,
      droppedBy,
      after: num(one.probability_after),
      noise: num(one.noise),
      seen: Math.max(0, num(one.seen) ?? 0),
    },
  ];
}

// --- figures of the columns -------------------------------------------------------------------------------------------

export interface Cell {
  state: "in" | "out" | "gone";
  value: number | null;
  before: number | null;
}

/** Whether a candidate is still in play after a stage, falls at it, or fell before. */
export function fate(candidate: Candidate, stage: StageName): Cell["state"] {
  if (!candidate.droppedBy) return "in";
  const at = STAGES.indexOf(candidate.droppedBy);
  const here = STAGES.indexOf(stage);
  return here < at ? "in" : here === at ? "out" : "gone";
}

/** Probability of a candidate after a stage, renormalised over what that stage keeps; null where the record does not say. */
export function probabilityAt(step: Step, candidate: Candidate, stage: Stage): number | null {
  if (stage.name === "model") {
    return candidate.logit !== null && step.logsumexp !== null ? share(candidate.logit - step.logsumexp) : null;
  }
  if (stage.name === "temperature") return candidate.kept ? candidate.after : null;
  if (stage.name === "penalties") return share(candidate.logprob);
  return stage.mass === null ? null : Math.min(1, share(candidate.logprob) / stage.mass);
}

/** The score a stage works on: logit, penalised logit, log probability, log probability divided by T. */
export function scoreAt(candidate: Candidate, stage: Stage, temp: number): number | null {
  if (stage.name === "model") return candidate.logit;
  if (stage.name === "penalties") return candidate.penalised;
  return stage.name === "temperature" && temp > 0 ? candidate.logprob / temp : candidate.logprob;
}

const share = (logprob: number): number => Math.min(1, Math.exp(logprob));

export function cellOf(step: Step, candidate: Candidate, index: number): Cell {
  const stage = step.stages[index]!;
  const state = fate(candidate, stage.name);
  if (state === "gone") return { state, value: null, before: null };
  const earlier = index > 0 ? probabilityAt(step, candidate, step.stages[index - 1]!) : null;
  // What a stage drops keeps the figure it came with: that is the figure the rule looked at.
  const value = state === "out" ? earlier : probabilityAt(step, candidate, stage);
  return { state, value, before: state === "out" ? null : earlier };
}

/** The tokens that are not listed: how many a stage leaves, and their share of it. */
export function restAt(step: Step, index: number): { count: number | null; mass: number | null } {
  const stage = step.stages[index]!;
  const listed = step.candidates.filter((candidate) => fate(candidate, stage.name) === "in");
  const values = listed.map((candidate) => probabilityAt(step, candidate, stage));
  const known = values.every((value) => value !== null);
  return {
    count: stage.left === null ? null : Math.max(0, stage.left - listed.length),
    mass: known ? Math.max(0, 1 - values.reduce<number>((sum, value) => sum + (value ?? 0), 0)) : null,
  };
}

export const isOn = (settings: Dict, stage: StageName): boolean => {
  const above = (name: string, neutral: number): boolean => (num(settings[name]) ?? neutral) !== neutral;
  switch (stage) {
    case "model":
      return true;
    case "penalties":
      return above("repetition_penalty", 1) || above("presence_penalty", 0) || above("frequency_penalty", 0);
    case "top_p":
      return above("top_p", 1);
    case "min_p":
      return above("min_p", 0);
    case "xtc":
      return above("xtc_probability", 0);
    case "top_k":
      return above("top_k", 0);
    case "temperature":
      return above("temp", 0);
  }
};

/** The settings that turn a stage on or off; `kept` are values it had before it was turned off. */
export function toggled(settings: Dict, stage: StageName, kept: Dict): Dict {
  const change = SWITCHES[stage];
  if (!change) return {};
  if (isOn(settings, stage)) return change.off;
  const names = Object.keys(change.off);
  const remembered = Object.fromEntries(names.filter((name) => name in kept).map((name) => [name, kept[name]]));
  return { ...change.on, ...remembered };
}
