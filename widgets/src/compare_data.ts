/** Many answers side by side: labels, votes, differences and the table. Pure; the word diff itself is loaded on demand.
 *
 * Record "mlxnb.group/1": {schema, runs: [RunRecord...], labels: [names that vary]?}. A run's own `labels` tell it from its siblings.
 */
import { parseRecord, type RunData, type TokenData } from "./parse";

/** A run of a group with what names it. `label` tells it from its siblings in words. */
export interface Answer {
  readonly index: number;
  readonly letter: string;
  readonly label: string;
  readonly labels: ReadonlyMap<string, string>;
  readonly run: RunData;
}

export interface Group {
  readonly answers: readonly Answer[];
  /** Names of the labels that differ between the answers, in order of first appearance. */
  readonly names: readonly string[];
  readonly note: string | null;
}

/** A..Z, then AA, AB, ... as spreadsheets count. */
export function letterOf(index: number): string {
  const head = Math.floor(index / 26);
  return (head ? letterOf(head - 1) : "") + String.fromCharCode(65 + (index % 26));
}

/** The answers of a group record, of a lone run, or the sentence that says why there are none. */
export function parseGroup(raw: unknown): Group | { readonly message: string } {
  const parsed = parseRecord(raw);
  if (parsed.kind === "notice") return { message: parsed.message };
  const runs = parsed.kind === "run" ? [parsed.run] : parsed.runs;
  const labels = runs.map((run) => new Map(run.labels));
  const all = [...new Set(labels.flatMap((one) => [...one.keys()]))];
  const names = all.filter((name) => new Set(labels.map((one) => one.get(name) ?? "")).size > 1);
  const answers = runs.map((run, index) => {
    const own = labels[index]!;
    const told = names.filter((name) => own.get(name)).map((name) => `${name} ${own.get(name)}`);
    return { index, letter: letterOf(index), labels: own, run, label: told.join(" · ") || fallbackLabel(run, index) };
  });
  return { answers, names, note: parsed.kind === "group" ? parsed.note : null };
}

const fallbackLabel = (run: RunData, index: number): string => (run.seed && run.seed.length <= 12 ? `seed ${run.seed}` : `answer ${index + 1}`);

/** Sums of log probabilities, kept per token array: a live run appends to it, so only new tokens are added. */
const sums = new WeakMap<readonly TokenData[], { read: number; known: number; sum: number }>();

/** The geometric mean of the probabilities of what was drawn; null where they were not captured. */
export function meanP(run: RunData): number | null {
  const kept = sums.get(run.tokens) ?? { read: 0, known: 0, sum: 0 };
  sums.set(run.tokens, kept);
  for (; kept.read < run.tokens.length; kept.read++) {
    const logprob = run.tokens[kept.read]!.logprob;
    if (logprob === null) continue;
    kept.known += 1;
    kept.sum += logprob;
  }
  return kept.known ? Math.exp(kept.sum / kept.known) : null;
}

export const tokensOf = (run: RunData): number => run.usage.completionTokens ?? run.tokens.length;

// --- state of the whole -------------------------------------------------------------------------------------------------

export interface Summary {
  total: number;
  ended: number;
  running: number;
  waiting: number;
  stopped: number;
  failed: number;
  tokens: number;
  seconds: number | null;
}

export function summaryOf(answers: readonly Answer[]): Summary {
  const count = (...statuses: RunData["status"][]): number => answers.filter(({ run }) => statuses.includes(run.status)).length;
  const seconds = answers.flatMap(({ run }) => run.timing.ended ?? []);
  return {
    total: answers.length,
    ended: answers.filter(({ run }) => !run.live).length,
    running: count("prefill", "running"),
    waiting: count("waiting", "loading"),
    stopped: count("stopped"),
    failed: count("failed"),
    tokens: answers.reduce((sum, { run }) => sum + tokensOf(run), 0),
    seconds: seconds.length ? Math.max(...seconds) : null,
  };
}

// --- equal answers --------------------------------------------------------------------------------------------------------

export interface Vote {
  text: string;
  members: number[];
}

/** Letter case, outer and repeated space, and a final stop do not make two answers different. */
export const alike = (text: string): string =>
  text
    .normalize("NFKC")
    .toLowerCase()
    .replace(/\s+/g, " ")
    .trim()
    .replace(/[.!。]+$/u, "");

/** Complete answers that say the same, most frequent first. Stopped, failed and running ones have no vote. */
export function votesOf(answers: readonly Answer[]): Vote[] {
  const votes = new Map<string, Vote>();
  for (const answer of answers) {
    const text = answer.run.answer.trim();
    if (answer.run.status !== "done" || !text) continue;
    const key = alike(text);
    const vote = votes.get(key) ?? { text, members: [] };
    vote.members.push(answer.index);
    votes.set(key, vote);
  }
  return [...votes.values()].sort((a, b) => b.members.length - a.members.length || a.members[0]! - b.members[0]!);
}

// --- differences ------------------------------------------------------------------------------------------------------------

export interface Piece {
  kind: "same" | "add" | "del";
  text: string;
}
export interface Change {
  value: string;
  added?: boolean;
  removed?: boolean;
}
export type DiffWords = (base: string, text: string) => Change[] | undefined;

const MAX_DIFF = 40_000;

/** Pieces of `text` against `base`, or null where they differ too much for a diff to be of use to a reader. */
export function piecesOf(diff: DiffWords, base: string, text: string): Piece[] | null {
  if (base.length + text.length > MAX_DIFF) return null;
  const changes = diff(base, text);
  return changes ? smoothed(changes.map((change) => ({ kind: change.added ? "add" : change.removed ? "del" : "same", text: change.value }))) : null;
}

/** Changes with no more than space, a mark or one short word between them become one left-out and one added stretch: taken word
 * by word they cannot be read. Both texts stay whole, the word in between stands in both. */
export function smoothed(pieces: readonly Piece[]): Piece[] {
  const out: Piece[] = [];
  let [del, add, space] = ["", "", ""];
  const flush = (): void => {
    if (del) out.push({ kind: "del", text: del });
    if (add) out.push({ kind: "add", text: add });
    if (space) out.push({ kind: "same", text: space });
    [del, add, space] = ["", "", ""];
  };
  for (const { kind, text } of pieces) {
    if (kind === "same" && (!/^\s*[^\s]{0,3}\s*$/u.test(text) || (!del && !add))) {
      flush();
      out.push({ kind, text });
    } else if (kind === "same") {
      space += text;
    } else {
      [del, add, space] = [del + space, add + space, ""];
      if (kind === "del") del += text;
      else add += text;
    }
  }
  flush();
  return joined(out);
}

/** Neighbours of one kind as one, so that a cut or a count sees whole stretches. */
function joined(pieces: readonly Piece[]): Piece[] {
  return pieces.reduce<Piece[]>((all, piece) => {
    const last = all.at(-1);
    if (last?.kind === piece.kind) all[all.length - 1] = { kind: piece.kind, text: last.text + piece.text };
    else all.push(piece);
    return all;
  }, []);
}

const words = (text: string): string[] => text.split(/\s+/).filter(Boolean);

/** Words of the longer text that both have in this order, as a share; 1 for equal texts. */
export function likeness(pieces: Piece[]): number {
  const count = (...kinds: Piece["kind"][]): number =>
    pieces.filter((piece) => kinds.includes(piece.kind)).reduce((sum, piece) => sum + words(piece.text).length, 0);
  const most = Math.max(count("same", "add"), count("same", "del"));
  return most ? count("same") / most : 1;
}

/** A text so different that struck-out words would only be noise. */
export const isRewritten = (pieces: Piece[]): boolean => likeness(pieces) < 0.25;

/** Long unchanged stretches cut to their edges, so that only what changed is left to read. */
export function onlyChanges(pieces: Piece[], edge = 3): Piece[] {
  return pieces.map((piece, index) => {
    if (piece.kind !== "same") return piece;
    const list = words(piece.text);
    const head = index > 0 ? edge : 0;
    const tail = index < pieces.length - 1 ? edge : 0;
    if (list.length <= head + tail + 2) return piece;
    return {
      kind: "same",
      text: `${list.slice(0, head).join(" ")} … ${list.slice(list.length - tail).join(" ")}`.replace(/^ /, "").concat(tail ? " " : ""),
    };
  });
}

/** The first output position (from 1) at which two answers drew different tokens; null if one is the beginning of the other. */
export function leavesAt(base: Answer, other: Answer): number | null {
  const [one, two] = [base.run.tokens, other.run.tokens];
  for (let i = 0; i < Math.min(one.length, two.length); i++) if (one[i]!.id !== two[i]!.id) return i + 1;
  return null;
}
