/** What the Loom shows: answers to one prompt merged by token ids, in pieces of text between their branches. Pure: no DOM, no host.
 *
 * Record "mlxnb.loom/1":
 *   {schema, key, epoch, model, runs: [RunRecord], rows: [{kind: "sample"|"more"|"probe", given}], growing, note, temp,
 *    kept, pruned: [{run, at, token}], opened: [{run, at, token, ids}]}
 * A place is the first `at` tokens of a run, then `token` if it is given. Same merge as mlxnb/trie.py.
 */
import { count, field, list, num, parseRecord, str, type AlternativeData, type Dict, type RunData, type TokenData } from "./parse";
import { maybe, oneOf } from "./read";
import { LOOM_SCHEMA } from "./protocol";

const KINDS = ["sample", "more", "probe"] as const;
const MAX_RUNS = 512;
const MAX_PLACES = 2000;
/** Ids from here on stand for whole answers whose tokens were not saved. */
const NO_TOKEN = 1e9;

export interface Place {
  readonly run: number;
  readonly at: number;
  readonly token: number | null;
}
export interface Row {
  readonly kind: (typeof KINDS)[number];
  readonly given: number;
}
export interface Opened extends Place {
  readonly ids: readonly number[];
}
export interface Loom {
  readonly model: string;
  readonly prompt: string;
  readonly runs: readonly RunData[];
  readonly rows: readonly Row[];
  readonly kept: readonly Place[];
  readonly pruned: readonly Place[];
  readonly opened: readonly Opened[];
  readonly growing: boolean;
  /** Why the last expansion ended before its time; "" if it did not. */
  readonly note: string;
  readonly temp: number | null;
}

/** One empty list for all: most nodes have one kid, and nobody looked beyond them. */
const NONE: readonly never[] = [];

/** The place after one token. p: of its token, null if nobody captured it. A class, since there may be ten thousands of them. */
export class Node {
  text = "";
  p: number | null = null;
  /** Samples and continuations that went through; 0 and 0 for what only could have been. */
  samples = 0;
  rows = 0;
  /** Rows that are writing here now, and those that ended here: by themselves, at their limit or by a hand, by a fault. */
  live = 0;
  ends = 0;
  cut = 0;
  failed = 0;
  kids: readonly Node[] = NONE;
  next: readonly AlternativeData[] = NONE;
  mark: "kept" | "pruned" | null = null;
  opened = false;
  private readonly one: number;
  private readonly two: number;

  constructor(
    readonly token: number,
    readonly parent: Node | null,
    /** The first run that came here, its tokens up to here, and for what no run took the alternative after them. */
    private readonly run: number,
    private readonly at: number,
    private readonly other: number | null = null,
  ) {
    const [one, two] = parent ? [parent.one, parent.two] : [0, 0];
    this.one = Math.imul(one ^ token, 0x9e3779b1) ^ (two >>> 7);
    this.two = (Math.imul(two + token + 1, 0x85ebca6b) ^ (one >>> 3)) >>> 0;
  }

  get place(): Place {
    return { run: this.run, at: this.at, token: this.other };
  }
  /** Of the tokens up to here: the same in every reading of the record. */
  get key(): string {
    return `${(this.one >>> 0).toString(36)}-${this.two.toString(36)}`;
  }
  add(kid: Node): void {
    if (this.kids === NONE) this.kids = [kid];
    else (this.kids as Node[]).push(kid);
  }
  kid(token: number): Node | undefined {
    for (const kid of this.kids) if (kid.token === token) return kid;
    return undefined;
  }
}

export type State = "kept" | "pruned" | null;

/** A piece of text between two branches. */
export interface Segment {
  readonly key: string;
  readonly first: Node;
  readonly last: Node;
  readonly text: string;
  readonly tokens: number;
  readonly kids: readonly Segment[];
  readonly mark: State;
  /** Below a pruned one. */
  readonly gone: boolean;
}

function placeOf(raw: unknown): Place | null {
  const place = maybe(raw);
  const [run, at] = [count(place?.run), count(place?.at)];
  return run === null || at === null ? null : { run, at, token: count(place?.token) };
}
const placesOf = (raw: unknown): Place[] => list(raw, MAX_PLACES).flatMap((one) => placeOf(one) ?? []);

/** The record as the view needs it, or null if it is none of ours. */
export function parseLoom(raw: unknown): Loom | null {
  const record = maybe(raw);
  if (record?.schema !== LOOM_SCHEMA) return null;
  const parsed = list(record.runs, MAX_RUNS).map((run) => parseRecord(run));
  const runs = parsed.flatMap((one) => (one.kind === "run" ? [one.run] : []));
  if (runs.length === 0 || runs.length !== parsed.length) return null;
  const rows = list(record.rows, MAX_RUNS).map((row) => ({ kind: oneOf(maybe(row)?.kind, KINDS, "sample"), given: count(maybe(row)?.given) ?? 0 }));
  return {
    model: str(record.model, 200),
    prompt: runs[0]!.promptText,
    runs,
    rows: runs.map((_, index) => rows[index] ?? { kind: "sample", given: 0 }),
    kept: placesOf(record.kept),
    pruned: placesOf(record.pruned),
    opened: list(record.opened, MAX_PLACES).flatMap((one) => {
      const place = placeOf(one);
      return place ? [{ ...place, ids: list(field(one as Dict, "ids"), 64).flatMap((id) => count(id) ?? []) }] : [];
    }),
    growing: (num(record.growing) ?? 0) > 0,
    note: str(record.note, 2000),
    temp: num(record.temp),
  };
}

/** Where in `text` each token ends. A character that several tokens make up ends with the last of them. As `cuts` of mlxnb/trie.py. */
export function cuts(tokens: readonly TokenData[], text: string): number[] {
  const ends: number[] = [];
  let here = 0;
  tokens.forEach((token, index) => {
    const piece = index === 0 && !text.startsWith(token.text) ? token.text.replace(/^ +/, "") : token.text;
    if (text.startsWith(piece, here)) here += piece.length;
    else if (!tokens[index + 1]?.text.includes("\ufffd")) {
      const after = tokens.slice(index + 1, index + 64).find((one) => one.text && !one.text.includes("\ufffd"))?.text;
      const found = after ? text.indexOf(after, here) : text.length;
      here = found >= 0 ? found : text.length;
    }
    ends.push(here);
  });
  return ends;
}

const share = (logprob: number | null | undefined): number | null => (logprob == null ? null : Math.exp(Math.min(0, logprob)));
export interface Tree {
  readonly root: Node;
  readonly samples: number;
  /** Tokens produced by all rows, what they were given left out; and tokens of the tree. */
  readonly sampled: number;
  readonly size: number;
  /** Whether some probability was captured. */
  readonly shares: boolean;
}

/** Merge the runs. A probe's own draw is no part of the tree; a run whose tokens were not saved is one piece of text. */
export function weave(loom: Loom): Tree {
  const root = new Node(-1, null, 0, 0);
  const ways: Node[][] = [];
  const texts = new Map<string, number>();
  let [sampled, size, shares] = [0, 0, false];
  const add = (parent: Node, token: number, text: string, p: number | null, run: number, at: number, other: number | null): Node => {
    const made = new Node(token, parent, run, at, other);
    made.text = text;
    made.p = p ?? (parent.next.length ? share(parent.next.find((one) => one.id === token)?.logprob) : null);
    shares ||= made.p !== null;
    parent.add(made);
    size++;
    return made;
  };
  loom.runs.forEach((run, index) => {
    const row = loom.rows[index]!;
    const way = [root];
    ways.push(way);
    const [sample, more] = [row.kind === "sample" ? 1 : 0, row.kind === "more" ? 1 : 0];
    root.samples += sample;
    root.rows += more;
    const whole = run.tokens.length === 0 && run.text !== "";
    if (whole && !texts.has(run.text)) texts.set(run.text, NO_TOKEN + texts.size);
    const tokens: readonly Pick<TokenData, "id" | "text" | "logprob" | "top">[] = whole ? [{ id: texts.get(run.text)!, text: run.text, logprob: null, top: [] }] : run.tokens;
    const ends = whole ? [run.text.length] : cuts(run.tokens, run.text);
    sampled += Math.max(0, (run.usage.completionTokens ?? run.tokens.length) - row.given);
    const last = row.kind === "probe" ? row.given : tokens.length;
    let node = root;
    for (let at = 0; at < tokens.length; at++) {
      const token = tokens[at]!;
      if (token.top.length && !node.next.length) node.next = token.top;
      if (at >= last) break;
      const known = node.kid(token.id);
      node = known ?? add(node, token.id, run.text.slice(at ? ends[at - 1] : 0, ends[at]), share(token.logprob), index, at + 1, null);
      // The words of a live row lag its tokens where a character is not whole yet.
      if (known && !known.text) known.text = run.text.slice(at ? ends[at - 1] : 0, ends[at]);
      if (known && known.p === null) known.p = share(token.logprob);
      node.samples += sample;
      if (at >= row.given) node.rows += more;
      way.push(node);
    }
    if (row.kind === "probe") return;
    if (run.live) node.live++;
    else if (run.status === "failed") node.failed++;
    else if (run.finish === "stop") node.ends++;
    else node.cut++;
  });
  const at = (place: Place): Node | undefined => ways[place.run]?.[place.at];
  for (const open of loom.opened) {
    const node = open.token === null ? at(open) : undefined;
    if (!node) continue;
    node.opened = true;
    for (const one of node.next) if (open.ids.includes(one.id) && !node.kid(one.id)) add(node, one.id, one.text, null, open.run, open.at, one.id);
  }
  const find = (place: Place): Node | undefined => (place.token === null ? at(place) : at(place)?.kid(place.token));
  for (const [places, mark] of [[loom.kept, "kept"], [loom.pruned, "pruned"]] as const) {
    for (const place of places) {
      const node = find(place);
      if (node && node !== root) node.mark = mark;
    }
  }
  return { root, samples: loom.rows.filter(({ kind }) => kind === "sample").length, sampled, size, shares };
}

const weight = (node: Node): number => node.samples + node.rows;
const likelier = (a: Segment, b: Segment): number =>
  weight(b.first) - weight(a.first) || (b.first.p ?? -1) - (a.first.p ?? -1) || (a.first.key < b.first.key ? -1 : 1);

/** The pieces below a node, the ones most rows took first, then the likeliest. */
export function segmentsBelow(node: Node, gone = false): Segment[] {
  return node.kids.map((kid) => segmentFrom(kid, gone)).sort(likelier);
}

function segmentFrom(first: Node, gone: boolean): Segment {
  let [last, tokens] = [first, 1];
  const texts = [first.text];
  // A piece ends where something branches off, ends, is marked or was opened by hand.
  while (last.kids.length === 1 && !last.ends && !last.cut && !last.failed && !last.live && !last.mark && !last.opened) {
    const only: Node = last.kids[0]!;
    if (only.samples !== first.samples || only.rows !== first.rows) break;
    last = only;
    texts.push(only.text);
    tokens++;
  }
  const mark = last.mark;
  const below = gone || mark === "pruned";
  return { key: first.key, first, last, text: texts.join(""), tokens, kids: segmentsBelow(last, below), mark, gone };
}

/** From the first piece to the one with this key; [] if there is none. */
export function pathTo(segments: readonly Segment[], key: string): Segment[] {
  for (const one of segments) {
    if (one.key === key) return [one];
    const below = pathTo(one.kids, key);
    if (below.length) return [one, ...below];
  }
  return [];
}

export const pathText = (path: readonly Segment[]): string => path.map(({ text }) => text).join("");

/** Its own tokens, from the first on. */
export function nodesOf(path: readonly Segment[]): Node[] {
  const nodes: Node[] = [];
  let node: Node | null = path.at(-1)?.last ?? null;
  for (; node?.parent; node = node.parent) nodes.push(node);
  return nodes.reverse();
}

/** The token of a way that was least likely, of those whose probability is known. */
export function leastCertain(nodes: readonly Node[]): Node | null {
  return nodes.reduce<Node | null>((least, node) => (node.p !== null && (least?.p == null || node.p < least.p) ? node : least), null);
}

export const ways = (segments: readonly Segment[]): number =>
  segments.reduce((sum, one) => sum + (one.kids.length ? ways(one.kids) + (one.last.ends ? 1 : 0) : 1), 0);

export type Show = "all" | "kept" | "ends";

/** Whether a piece, or something below it, is what is asked for. */
export function wanted(one: Segment, show: Show): boolean {
  if (show === "all") return true;
  const own = show === "kept" ? one.mark === "kept" : one.last.ends > 0;
  return own || one.kids.some((kid) => wanted(kid, show));
}

export interface Shown {
  readonly segment: Segment;
  readonly kids: readonly Shown[];
  /** Pieces right below that are folded away, and how many rows took them. */
  readonly folded: number;
  readonly foldedRows: number;
}

/** What is drawn: at most `most` pieces, `kids` of them at each branch unless it is unfolded, nearest to the root first. */
export function drawn(segments: readonly Segment[], show: Show, unfolded: ReadonlySet<string>, most = 120, kids = 6): { top: Shown[]; folded: number; foldedRows: number } {
  let left = most;
  type Draft = { segment: Segment | null; all: readonly Segment[]; kids: Draft[]; folded: number; foldedRows: number };
  const draft = (segment: Segment | null, below: readonly Segment[]): Draft => ({ segment, all: below.filter((one) => wanted(one, show)), kids: [], folded: 0, foldedRows: 0 });
  const top = draft(null, segments);
  const todo = [top];
  for (let next = todo.shift(); next; next = todo.shift()) {
    if (next.segment?.mark === "pruned") continue;
    const open = unfolded.has(next.segment?.key ?? "");
    const room = Math.max(open ? next.all.length : 0, Math.min(left, next.all.length > kids + 1 ? kids : next.all.length));
    next.kids = next.all.slice(0, room).map((one) => draft(one, one.kids));
    next.folded = next.all.length - next.kids.length;
    next.foldedRows = next.all.slice(room).reduce((sum, one) => sum + weight(one.first), 0);
    left -= next.kids.length;
    todo.push(...next.kids);
  }
  const done = (one: Draft): Shown => ({ segment: one.segment!, kids: one.kids.map(done), folded: one.folded, foldedRows: one.foldedRows });
  return { top: top.kids.map(done), folded: top.folded, foldedRows: top.foldedRows };
}

/** How many places an expansion makes, and how many rows it takes: each level but the last is one step of a row for each place. */
export function costOf(first: number, width: number, depth: number, known: boolean): { places: number; rows: number } {
  let [places, level, rows] = [0, first, known ? 0 : 1];
  for (let d = 0; d < depth; d++) {
    places += level;
    if (d + 1 < depth) rows += level;
    level *= width;
  }
  return { places, rows };
}
