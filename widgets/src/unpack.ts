/** Token tables as they are saved and sent as snapshots: columns of numbers as short text (mlxnb/packing.py). Never throws. */

import { ALPHABET } from "./protocol";

const ENDS = 64;
const GOES_ON = 28;
const MAX_UNPACKED = 100_000;
const DAMAGED = "The tokens of this output cannot be read.";
const VALUE = new Map(Array.from(ALPHABET, (digit, value) => [digit, value] as const));

type Loose = Record<string, unknown>;
const isDict = (value: unknown): value is Loose => typeof value === "object" && value !== null && !Array.isArray(value);

/** The numbers of a text. Throws for anything that the kernel did not write. */
export function readNumbers(text: unknown): number[] {
  if (typeof text !== "string" || text.length > 10 * MAX_UNPACKED) throw new Error("not packed numbers");
  const out: number[] = [];
  const pending: number[] = [];
  for (const digit of text) {
    let value = VALUE.get(digit) ?? -1;
    if (value >= ENDS) {
      pending.push(value - ENDS);
      continue;
    }
    if (value < 0 || pending.length > 10) throw new Error("not a packed number");
    while (pending.length) value = value * GOES_ON + pending.pop()! + ENDS;
    if (!Number.isSafeInteger(value) || out.length >= MAX_UNPACKED) throw new Error("too large");
    out.push(value);
  }
  if (pending.length) throw new Error("cut off");
  return out;
}

function same(...columns: { length: number }[]): void {
  if (columns.some((column) => column.length !== columns[0]!.length)) throw new Error("columns of different length");
}

const finite = (value: unknown): number => {
  if (typeof value !== "number" || !Number.isFinite(value)) throw new Error("not a number");
  return value;
};

function at<T>(of: readonly T[], index: number): T {
  const found = of[index];
  if (found === undefined) throw new Error("out of range");
  return found;
}

/** Plain token records of a table. Throws for a damaged one. */
export function unpackTokens(table: unknown): Loose[] {
  if (!isDict(table) || table.form !== 1) throw new Error("unknown form");
  const ids = readNumbers(table.ids);
  const lengths = readNumbers(table.lengths);
  same(ids, lengths);
  const letters = Array.from(String(table.texts));
  let start = 0;
  const distinct = ids.map((id, i) => ({ id, text: letters.slice(start, (start += lengths[i]!)).join("") }));
  const index = readNumbers(table.index);
  const t = isDict(table.t) ? table.t : {};
  const steps = readNumbers(t.steps);
  const unit = finite(t.unit);
  const origins: string[] = [];
  for (const run of Array.isArray(table.origin) ? table.origin : []) {
    const [name, count] = Array.isArray(run) ? run : [];
    if (origins.length + finite(count) > MAX_UNPACKED) throw new Error("too large");
    for (let i = 0; i < finite(count); i++) origins.push(String(name));
  }
  same(index, steps, origins);
  let reached = 0;
  const tokens: Loose[] = index.map((which, i) => {
    reached += steps[i]!;
    return { ...at(distinct, which), origin: origins[i], t: Math.round(reached * unit * 1e6) / 1e6 };
  });
  addScores(table, tokens, distinct);
  return tokens;
}

function addScores(table: Loose, tokens: Loose[], distinct: readonly { id: number; text: string }[]): void {
  if (table.by_hand !== undefined) {
    let position = 0;
    for (const gap of readNumbers(table.by_hand)) at(tokens, (position += gap)).by_hand = true;
  }
  const nats = (score: number, unit: number) => -Math.round((score - 1) * unit * 1e6) / 1e6;
  if (isDict(table.scores)) {
    const unit = finite(table.scores.unit);
    const logprob = readNumbers(table.scores.logprob);
    const rank = readNumbers(table.scores.rank);
    same(tokens, logprob, rank);
    tokens.forEach((token, i) => {
      if (logprob[i]) Object.assign(token, { logprob: nats(logprob[i]!, unit), rank: rank[i] ? rank[i]! - 1 : null, top: [] });
    });
  }
  if (isDict(table.top)) {
    const unit = finite(table.top.unit);
    const count = readNumbers(table.top.count);
    const index = readNumbers(table.top.index);
    const logprob = readNumbers(table.top.logprob);
    same(tokens, count);
    same(index, logprob);
    let next = 0;
    tokens.forEach((token, i) => {
      if (!count[i]) return;
      token.top = Array.from({ length: count[i]! }, () => {
        const other = at(distinct, at(index, next));
        return { ...other, logprob: nats(logprob[next++]!, unit) };
      });
    });
  }
}

function unpackRun(run: unknown): unknown {
  if (!isDict(run) || !isDict(run.tokens)) return run;
  try {
    const tokens = unpackTokens(run.tokens);
    return { ...run, tokens, text: typeof run.text === "string" ? run.text : tokens.map((token) => token.text).join("") };
  } catch {
    return { ...run, tokens: null, tokens_note: DAMAGED };
  }
}

/** The same record with plain tokens and text; a group, chat or playground has that of each of its `runs`. */
export function unpackRecord(record: unknown): unknown {
  if (!isDict(record)) return record;
  if (Array.isArray(record.runs)) return { ...record, runs: record.runs.map(unpackRun) };
  return unpackRun(record);
}
