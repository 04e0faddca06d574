/** A linear conversation, read from a record that may hold anything, and the state of its boxes. Pure: no DOM, no host.
 *
 * Record "mlxnb.chat/1": {schema, name, model, turns: [{id, role: "system"|"user"|"assistant", text, run: index|null, cell, stale}], runs: [RunRecord...], error}.
 * A stale turn answers a turn that was since replaced: it is kept in view, and not part of what the model reads.
 * An assistant turn names its run by index into `runs`: deltas reach a run by that index, as in a group.
 */
import { list, MAX_TEXT, num, parseRecord, str, type Dict, type RunData } from "./parse";
import { maybe, oneOf } from "./read";

export const CHAT_SCHEMA = "mlxnb.chat/1";
const MAX_TURNS = 4096;
const ROLES = ["system", "user", "assistant"] as const;

export interface Turn {
  readonly id: string;
  readonly role: (typeof ROLES)[number];
  readonly number: number;
  readonly cell: string;
  readonly text: string;
  readonly stale: boolean;
  /** The run that answers, for the parts that draw it; null for what a person said and for an answer that was taken over as text. */
  readonly run: RunData | null;
  readonly runIndex: number | null;
}
export interface Chat {
  readonly name: string;
  readonly model: string;
  readonly turns: readonly Turn[];
  readonly error: string;
  readonly live: Turn | null;
}

/** The conversation as the view needs it, or null if the record is none. */
export function parseChat(raw: unknown): Chat | null {
  const chat = maybe(raw);
  if (chat?.schema !== CHAT_SCHEMA) return null;
  const runs = list(chat.runs, MAX_TURNS);
  let number = 0;
  const turns = list(chat.turns, MAX_TURNS).flatMap((raw, at): Turn[] => {
    const turn = maybe(raw);
    const role = oneOf(turn?.role, [...ROLES, ""] as const, "");
    if (!turn || role === "") return [];
    if (role !== "system") number += 1;
    return [parseTurn(turn, role, runs, at, role === "system" ? 0 : number)];
  });
  const error = maybe(chat.error);
  const live = [...turns].reverse().find((turn) => turn.run?.live) ?? null;
  return { name: str(chat.name, 120), model: str(chat.model, 200), turns, error: error ? str(error.message, 2000) : "", live };
}

function parseTurn(turn: Dict, role: Turn["role"], runs: readonly unknown[], at: number, number: number): Turn {
  const index = num(turn.run);
  const parsed = role === "assistant" && index !== null ? parseRecord(runs[index]) : null;
  const run = parsed?.kind === "run" ? parsed.run : null;
  return {
    id: str(turn.id, 200) || `turn-${at}`,
    role,
    number,
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
  busy: "send" | "edit" | "regenerate" | "stop" | null;
  /** What the box held when it was sent: only that leaves it once it is accepted. */
  sent: string;
  error: string;
}
export const NO_BOXES: Boxes = { draft: "", editing: null, busy: null, sent: "", error: "" };

export type Act =
  | { type: "draft"; text: string }
  | { type: "edit"; turn: string; text: string }
  | { type: "edit-text"; text: string }
  | { type: "edit-cancel" }
  | { type: "sent"; what: NonNullable<Boxes["busy"]> }
  | { type: "accepted" }
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
      return boxes.busy ? boxes : { ...boxes, busy: act.what, error: "", sent: act.what === "edit" ? (boxes.editing?.text ?? "") : boxes.draft };
    case "accepted":
      return { ...boxes, ...settled(boxes), busy: null, sent: "" };
    case "refused":
      return { ...boxes, busy: null, sent: "", error: act.message || "The kernel did not take this." };
    case "dismiss":
      return { ...boxes, error: "" };
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

/** How many turns an edit or a new answer of this turn takes away, for the sentence that says so before it happens. */
export function turnsAfter(chat: Chat, id: string): number {
  const at = chat.turns.findIndex((turn) => turn.id === id);
  return at < 0 ? 0 : chat.turns.slice(at + 1).filter((turn) => !turn.stale).length;
}

/** The conversation as plain text, to copy. */
export function chatText(chat: Chat): string {
  return chat.turns
    .filter((turn) => !turn.stale)
    .map((turn) => `${{ system: "System", user: "You", assistant: chat.model || "Model" }[turn.role]}:\n${turn.text}`)
    .join("\n\n");
}
