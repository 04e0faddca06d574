/** What a page keeps of a view that is open, for who saves or opens a notebook: which view its record is, and its text. */

import { chatText, parseChat } from "./chat_data";
import { visibleText } from "./markdown";
import type { ViewKind } from "./mount";
import { dict, field, list, MAX_TEXT, parseRecord, str } from "./parse";
import { CACHE_SCHEMA, CHAT_SCHEMA, LOOM_SCHEMA, MONITOR_SCHEMA, PLAYGROUND_SCHEMA, STEPPER_SCHEMA } from "./protocol";

const KINDS: Readonly<Record<string, ViewKind>> = {
  [CHAT_SCHEMA]: "chat", [PLAYGROUND_SCHEMA]: "playground", [STEPPER_SCHEMA]: "stepper", [MONITOR_SCHEMA]: "monitor",
  [LOOM_SCHEMA]: "loom", [CACHE_SCHEMA]: "cache",
};

/** The view that draws a record; "run" for anything unknown, which says so. */
export function kindOf(record: unknown): ViewKind {
  const schema = field(dict(record), "schema");
  if (typeof schema === "string" && Object.hasOwn(KINDS, schema)) return KINDS[schema] as ViewKind;
  return parseRecord(record).kind === "group" ? "compare" : "run";
}

const answers = (runs: readonly unknown[]): string[] => runs.map((run) => parseRecord(run)).flatMap((run) => (run.kind === "run" ? [run.run.answer] : []));

/** The words of a record, as a reader without our views shows them, with controls made visible; "" if there are none. */
export const textOf = (record: unknown): string => visibleText(wordsOf(record));

function wordsOf(record: unknown): string {
  const whole = dict(record);
  switch (kindOf(record)) {
    case "chat": {
      const chat = parseChat(record);
      return chat ? chatText(chat) : "";
    }
    case "playground":
      return [str(field(whole, "prompt"), MAX_TEXT), ...answers(list(field(whole, "runs"), 1))].filter(Boolean).join("\n\n");
    case "stepper":
      return list(field(whole, "past"), 10_000).map((token) => str(field(dict(token), "text"), 1000)).join("");
    case "loom":
    case "compare":
      return answers(list(field(whole, "runs"))).join("\n\n");
    case "run":
      return answers([record]).join("");
    default:
      return "";
  }
}

/** Views of this page that are open, by key. The JupyterLab extension writes notebooks from it. */
const OPEN = Symbol.for("mlxnb.open");

export interface OpenView {
  /** The record as it is now. */
  record(): unknown;
  text(): string;
}

export function openViews(): Map<string, OpenView> {
  const page = globalThis as { [OPEN]?: Map<string, OpenView> };
  return (page[OPEN] ??= new Map());
}
