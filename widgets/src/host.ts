/** What a view may ask of the page around it. Two hosts: a live one over an anywidget model, a saved one over a stored record. */

import type { AnyModel } from "@anywidget/types";
import { signal, type Signal } from "@preact/signals";

import { hubOf, type Hub } from "./hub";
import type { DeltaItem } from "./protocol";
import type { Theme } from "./theme";
import { unpackRecord } from "./unpack";

export interface Host {
  /** False: a saved output, no kernel behind it. */
  readonly live: boolean;
  /** The whole record. A live host applies deltas into it and sets a new value each time. */
  readonly record: Signal<unknown>;
  /** Asks the kernel: stop, branch, regenerate, ... Rejects with an Error whose message a person can read. */
  command(name: string, args?: object): Promise<unknown>;
  readonly setting: Setting;
}

export interface Setting {
  readonly theme: Theme;
  /** The tab to open first, if the cell asked for one. */
  readonly view?: string;
}

const SAVED = "This output is saved: there is no kernel behind it. Run the cell again to act on it.";

/** A host over a stored record. */
export function savedHost(record: unknown, setting: Partial<Setting> = {}): Host {
  return {
    live: false,
    record: signal(record),
    command: () => Promise.reject(new Error(SAVED)),
    setting: { theme: "auto", ...setting },
  };
}

export interface LiveHost extends Host {
  /** The kernel has put the final record into the trait; no delta follows. */
  readonly final: Signal<boolean>;
  dispose(): void;
}

type Loose = Record<string, unknown>;

const isDict = (value: unknown): value is Loose => typeof value === "object" && value !== null && !Array.isArray(value);

/** The record of run `index`, a run or one of a group; null where there is none. */
function runOf(record: unknown, index: number): Loose | null {
  if (!isDict(record)) return null;
  const found = Array.isArray(record.runs) ? record.runs[index] : index === 0 ? record : null;
  return isDict(found) ? found : null;
}

export type Applied = { readonly ok: true; readonly record: unknown } | { readonly ok: false; readonly reason: "gap" | "unknown run" };

/** The record with a delta in it. Token arrays grow in place, so that a reader may go on where it stopped; all else is new.
 *
 * `at` counts tokens and `text_at` UTF-16 units before the delta. What the record already has is skipped; what it lacks is a gap.
 */
export function applyDelta(record: unknown, item: DeltaItem): Applied {
  const run = runOf(record, item.run);
  if (!run) return { ok: false, reason: "unknown run" };
  const tokens: unknown[] = Array.isArray(run.tokens) ? run.tokens : [];
  const text = typeof run.text === "string" ? run.text : "";
  const textAt = typeof item.text_at === "number" ? item.text_at : -1;
  const numbers = typeof item.at === "number" && item.at >= 0;
  if (!(numbers && item.at <= tokens.length) || textAt < 0 || textAt > text.length) return { ok: false, reason: "gap" };
  const news = Array.isArray(item.tokens) ? item.tokens : [];
  for (let i = tokens.length - item.at; i < news.length; i++) tokens.push(news[i]);
  const delta = typeof item.text === "string" ? item.text.slice(text.length - textAt) : "";
  const changed: Loose = { ...run, ...(isDict(item.status) ? item.status : {}), tokens, text: text + delta };
  const whole = record as Loose;
  if (!Array.isArray(whole.runs)) return { ok: true, record: changed };
  const runs = whole.runs.slice();
  runs[item.run] = changed;
  return { ok: true, record: { ...whole, runs } };
}

/** Runs were replaced so many times; 0 for a record that does not count it. */
function epochOf(record: unknown): number {
  return isDict(record) && typeof record.epoch === "number" ? record.epoch : 0;
}

/** Whether a snapshot may replace what is shown: never an earlier one. */
function isAhead(fresh: unknown, shown: unknown): boolean {
  const epochs = epochOf(fresh) - epochOf(shown);
  return epochs > 0 || (epochs === 0 && progressOf(fresh) >= progressOf(shown));
}

function progressOf(record: unknown): number {
  if (!isDict(record)) return -1;
  const runs = Array.isArray(record.runs) ? record.runs : [record];
  return runs.reduce<number>((sum, run) => sum + (isDict(run) && Array.isArray(run.tokens) ? run.tokens.length : 0), 0);
}

/** A deep enough copy of a trait, unpacked: token arrays of ours grow in place, and the model's own value must not. */
function ownCopy(packed: unknown): unknown {
  const record = unpackRecord(packed);
  if (!isDict(record)) return record;
  const copy: Loose = { ...record };
  if (Array.isArray(copy.tokens)) copy.tokens = copy.tokens.slice();
  if (Array.isArray(copy.runs)) copy.runs = copy.runs.map(ownCopy);
  return copy;
}

/** A host over an anywidget model and its kernel's session model.
 *
 * Traits of the model: key, record (snapshot about once a second), state ("live" or "final"), setting. A gap in the deltas, or a trait
 * that is ahead, replaces the record; a trait that is behind is ignored, except the final one.
 */
export function liveHost(model: AnyModel, session: AnyModel, theme: Theme = "auto"): LiveHost {
  const hub: Hub = hubOf(session);
  const named: unknown = model.get("key");
  const key = typeof named === "string" ? named : "";
  const record = signal<unknown>(ownCopy(model.get("record")));
  const final = signal(model.get("state") === "final");
  let repairing = false;

  const take = (packed: unknown, force: boolean) => {
    const fresh = ownCopy(packed);
    if (force || isAhead(fresh, record.peek())) record.value = fresh;
  };
  const repair = () => {
    if (repairing) return;
    repairing = true;
    hub
      .command(key, "snapshot")
      .then(
        (answer) => take(isDict(answer) && "schema" in answer ? answer : isDict(answer) && "record" in answer ? answer.record : model.get("record"), false),
        () => take(model.get("record"), true),
      )
      .finally(() => {
        repairing = false;
      });
  };
  const onItem = (item: DeltaItem) => {
    const applied = applyDelta(record.peek(), item);
    if (applied.ok) record.value = applied.record;
    else repair();
  };
  const onTrait = () => {
    final.value = model.get("state") === "final";
    take(model.get("record"), final.value);
  };
  const release = hub.listen(key, onItem);
  model.on("change:record", onTrait);
  model.on("change:state", onTrait);

  const setting = model.get("setting");
  return {
    live: true,
    record,
    final,
    command: (name, args) => hub.command(key, name, args),
    setting: { theme, ...(isDict(setting) && typeof setting.view === "string" ? { view: setting.view } : {}) },
    dispose() {
      release();
      model.off("change:record", onTrait);
      model.off("change:state", onTrait);
    },
  };
}
