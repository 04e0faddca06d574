/** A conversation, read from a record that may hold anything, and the state of its boxes. Pure: no DOM, no host.
 *
 * Record "mlxnb.chat/1": {schema, name, model, tab, turns: [{id, turn, role: "system"|"user"|"assistant", text, run: index|null, cell, stale,
 * others}], tree: [{id, parent, lines, branch, text, cell, tokens, stale, on_path, head}], runs: [RunRecord...], error}.
 * `turns` is the way to the head, each turn of the tree as a question and an answer; `others` are the turns of the tree that stand beside one.
 * A stale turn answers a turn that was since replaced: it is kept in view, and not part of what the model reads.
 * An assistant turn names its run by index into `runs`: deltas reach a run by that index, as in a group.
 */
import { dict, list, MAX_TEXT, num, parseRecord, str, type Dict, type RunData } from "./parse";
import { maybe, oneOf } from "./read";

export const CHAT_SCHEMA = "mlxnb.chat/1";
const MAX_TURNS = 4096;
const MAX_LANES = 64;
const ROLES = ["system", "user", "assistant"] as const;

export interface Turn {
  readonly id: string;
  /** Of the tree: a question and its answer have one. "new" while it is in no tree yet. */
  readonly turn: string;
  /** The turns of the tree that stand in this place, this one included; empty if it is alone. */
  readonly others: readonly string[];
  readonly role: (typeof ROLES)[number];
  readonly cell: string;
  readonly text: string;
  readonly stale: boolean;
  /** The run that answers, for the parts that draw it; null for what a person said and for an answer that was taken over as text. */
  readonly run: RunData | null;
  readonly runIndex: number | null;
}
/** A turn of the tree as a row of its drawing. lines: for each lane to its left, whether a line goes on downwards there. */
export interface Row {
  readonly id: string;
  readonly parent: number;
  readonly lines: readonly boolean[];
  readonly branch: boolean;
  readonly text: string;
  readonly cell: string;
  readonly tokens: number;
  readonly stale: boolean;
  readonly onPath: boolean;
  readonly head: boolean;
}
export interface Chat {
  readonly name: string;
  readonly model: string;
  readonly tab: "chat" | "tree";
  readonly turns: readonly Turn[];
  readonly tree: readonly Row[];
  readonly error: string;
  readonly live: Turn | null;
}

/** The conversation as the view needs it, or null if the record is none. */
export function parseChat(raw: unknown): Chat | null {
  const chat = maybe(raw);
  if (chat?.schema !== CHAT_SCHEMA) return null;
  const runs = list(chat.runs, MAX_TURNS);
  const turns = list(chat.turns, MAX_TURNS).flatMap((raw, at): Turn[] => {
    const turn = maybe(raw);
    const role = oneOf(turn?.role, [...ROLES, ""] as const, "");
    if (!turn || role === "") return [];
    return [parseTurn(turn, role, runs, at)];
  });
  const error = maybe(chat.error);
  const live = [...turns].reverse().find((turn) => turn.run?.live) ?? null;
  const tree = list(chat.tree, MAX_TURNS).map((row, at) => parseRow(dict(row), at));
  const tab = oneOf(chat.tab, ["chat", "tree"] as const, "chat");
  return { name: str(chat.name, 120), model: str(chat.model, 200), tab, turns, tree, error: error ? str(error.message, 2000) : "", live };
}

function parseRow(row: Dict, at: number): Row {
  const parent = num(row.parent) ?? -1;
  return {
    id: str(row.id, 40),
    parent: Number.isInteger(parent) && parent < at ? Math.max(parent, -1) : -1,
    lines: list(row.lines, MAX_LANES).map((on) => on === true),
    branch: row.branch === true,
    text: str(row.text, 200),
    cell: str(row.cell, 40),
    tokens: Math.max(0, num(row.tokens) ?? 0),
    stale: row.stale === true,
    onPath: row.on_path === true,
    head: row.head === true,
  };
}

function parseTurn(turn: Dict, role: Turn["role"], runs: readonly unknown[], at: number): Turn {
  const index = num(turn.run);
  const parsed = role === "assistant" && index !== null ? parseRecord(runs[index]) : null;
  const run = parsed?.kind === "run" ? parsed.run : null;
  return {
    id: str(turn.id, 200) || `turn-${at}`,
    turn: str(turn.turn, 40),
    others: list(turn.others, MAX_TURNS).map((other) => str(other, 40)),
    role,
    run,
    runIndex: run ? index : null,
    cell: str(turn.cell, 40),
    text: run ? run.answer : str(turn.text, MAX_TEXT),
    stale: turn.stale === true,
  };
}

// --- the boxes: what a person has typed is never lost ---------------------------------------------------------------------------

export interface Boxes {
  draft: string;
  editing: { turn: string; text: string; original: string } | null;
  busy: "send" | "edit" | "regenerate" | "stop" | "go" | "fork" | null;
  /** What the box held when it was sent: only that leaves it once it is accepted. */
  sent: string;
  error: string;
  /** What the kernel has done, where nothing else shows it. */
  note: string;
}
export const NO_BOXES: Boxes = { draft: "", editing: null, busy: null, sent: "", error: "", note: "" };

export type Act =
  | { type: "draft"; text: string }
  | { type: "edit"; turn: string; text: string }
  | { type: "edit-text"; text: string }
  | { type: "edit-cancel" }
  | { type: "sent"; what: NonNullable<Boxes["busy"]> }
  | { type: "accepted"; note?: string }
  | { type: "refused"; message: string }
  | { type: "dismiss" };

/** The next state of the boxes. A refused message stays in its box; an accepted one leaves it, unless it was changed meanwhile. */
export function step(boxes: Boxes, act: Act): Boxes {
  switch (act.type) {
    case "draft":
      return { ...boxes, draft: act.text };
    case "edit":
      return { ...boxes, editing: { turn: act.turn, text: act.text, original: act.text }, error: "" };
    case "edit-text":
      return boxes.editing ? { ...boxes, editing: { ...boxes.editing, text: act.text } } : boxes;
    case "edit-cancel":
      return { ...boxes, editing: null };
    case "sent":
      return boxes.busy ? boxes : { ...boxes, busy: act.what, error: "", note: "", sent: act.what === "edit" ? (boxes.editing?.text ?? "") : boxes.draft };
    case "accepted":
      return { ...boxes, ...settled(boxes), busy: null, sent: "", note: act.note ?? "" };
    case "refused":
      return { ...boxes, busy: null, sent: "", error: act.message || "The kernel did not take this." };
    case "dismiss":
      return { ...boxes, error: "", note: "" };
  }
}

function settled(boxes: Boxes): Partial<Boxes> {
  if (boxes.busy === "send" && boxes.draft === boxes.sent) return { draft: "" };
  return boxes.busy === "edit" && boxes.editing?.text === boxes.sent ? { editing: null } : {};
}

/** Why the send box cannot send now; "" if it can. */
export function blockedBy(chat: Chat, boxes: Boxes, live: boolean): string {
  if (!live) return "This is a saved conversation: run its cell again to go on.";
  if (boxes.busy) return "Waiting for the kernel…";
  if (chat.live) return "An answer is being written: stop it, or wait for its end.";
  return "";
}

/** The name of a turn as `--after` and `%mlx fork` take it, "" for what has none yet. */
export const nameOf = (turn: Turn): string => (turn.turn === "new" ? "" : turn.turn);

/** How many turns are told, or are kept aside: a question and its answer are one. */
export const turnCount = (chat: Chat, stale: boolean): number => chat.turns.filter((turn) => turn.stale === stale && turn.role === "user").length;

/** Where a turn stands among those beside it, and its neighbours; null if it is alone. at: from 1. */
export function beside(turn: Turn): { at: number; of: number; before: string | null; after: string | null } | null {
  const at = turn.others.indexOf(turn.turn);
  if (at < 0 || turn.others.length < 2) return null;
  return { at: at + 1, of: turn.others.length, before: turn.others[at - 1] ?? null, after: turn.others[at + 1] ?? null };
}

/** The conversation as plain text, to copy. */
export function chatText(chat: Chat): string {
  return chat.turns
    .filter((turn) => !turn.stale)
    .map((turn) => `${{ system: "System", user: "You", assistant: chat.model || "Model" }[turn.role]}:\n${turn.text}`)
    .join("\n\n");
}
