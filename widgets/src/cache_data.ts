/** What the CacheMap shows, read from a record that may hold anything. Pure: no DOM, no host.
 *
 * Record "mlxnb.cache/1", made by mlxnb/cachemap.py:
 *   {schema, key, epoch, state: "ready"|"off"|"not started", models: [name],
 *    ram: {used, budget, leased, blocks, tails}, disk: {used, budget, records, pending} | null,
 *    counts: {hits, misses, hit_tokens, asked_tokens, evictions, spilled, refused},
 *    edges: [{id, parent, root, at, blocks, tail, bytes, states, users, user_count, shares, head}],
 *    users: [{name, shared, own, blocks, stored, edges}], gone: [{t, blocks, stored, users}],
 *    left_out: {edges, blocks}}
 * An edge is a run of blocks that nothing branches off, oldest first. states: one run per state, "r12s3l1":
 *   r in RAM, s in RAM and on the SSD, l leased by a running row, m leased and on the SSD. A tail is the last, part-filled one.
 */
import { count, list, str, type Dict } from "./parse";
import { maybe, oneOf } from "./read";
import { CACHE_SCHEMA } from "./protocol";

export const BLOCK_TOKENS = 64;
const MAX_EDGES = 400;
const MAX_USERS = 200;
const STATES = ["r", "s", "l", "m"] as const;
export type BlockState = (typeof STATES)[number];

export interface Edge {
  readonly id: string;
  readonly parent: number | null;
  /** Which namespace: a model, its adapters and how it keeps its state. */
  readonly root: number;
  /** Blocks before it, its own blocks, and tokens of a part-filled one at its end. */
  readonly at: number;
  readonly blocks: number;
  readonly tail: number;
  readonly bytes: number;
  readonly states: readonly (readonly [BlockState, number])[];
  readonly users: readonly string[];
  readonly userCount: number;
  readonly shares: number;
  readonly head: string;
}
export interface User {
  readonly name: string;
  readonly shared: number;
  readonly own: number;
  readonly blocks: number;
  readonly stored: number;
}
export interface Gone {
  readonly t: string;
  readonly blocks: number;
  readonly stored: number;
  readonly users: readonly string[];
}
export interface CacheMap {
  readonly state: "ready" | "off" | "not started";
  readonly models: readonly string[];
  readonly ram: { used: number; budget: number; leased: number; blocks: number; tails: number };
  readonly disk: { used: number; budget: number | null; records: number | null; pending: number } | null;
  readonly counts: { hits: number; misses: number; hitTokens: number; askedTokens: number; evictions: number; spilled: number; refused: number };
  readonly edges: readonly Edge[];
  readonly users: readonly User[];
  readonly gone: readonly Gone[];
  readonly leftOut: { edges: number; blocks: number };
}

const whole = (raw: unknown): number => count(raw) ?? 0;
const names = (raw: unknown): string[] => list(raw, 16).map((name) => str(name, 120)).filter(Boolean);

/** The record as the view needs it, or null if it is none of ours. */
export function parseCache(raw: unknown): CacheMap | null {
  const record = maybe(raw);
  if (record?.schema !== CACHE_SCHEMA) return null;
  const [ram, disk, counts, out] = [maybe(record.ram) ?? {}, maybe(record.disk), maybe(record.counts) ?? {}, maybe(record.left_out) ?? {}];
  return {
    state: oneOf(record.state, ["ready", "off", "not started"] as const, "not started"),
    models: names(record.models),
    ram: { used: whole(ram.used), budget: whole(ram.budget), leased: whole(ram.leased), blocks: whole(ram.blocks), tails: whole(ram.tails) },
    disk: disk && { used: whole(disk.used), budget: count(disk.budget), records: count(disk.records), pending: whole(disk.pending) },
    counts: {
      hits: whole(counts.hits),
      misses: whole(counts.misses),
      hitTokens: whole(counts.hit_tokens),
      askedTokens: whole(counts.asked_tokens),
      evictions: whole(counts.evictions),
      spilled: whole(counts.spilled),
      refused: whole(counts.refused),
    },
    edges: edgesOf(record.edges),
    users: list(record.users, MAX_USERS).flatMap(userOf),
    gone: list(record.gone, 100).flatMap(goneOf),
    leftOut: { edges: whole(out.edges), blocks: whole(out.blocks) },
  };
}

/** In order, each after its parent; one whose parent is none before it hangs at the root. */
function edgesOf(raw: unknown): Edge[] {
  return list(raw, MAX_EDGES).map((one, index) => {
    const edge = maybe(one) ?? {};
    const parent = count(edge.parent);
    const blocks = Math.min(whole(edge.blocks), 1_000_000);
    return {
      id: str(edge.id, 80),
      parent: parent !== null && parent < index ? parent : null,
      root: whole(edge.root),
      at: Math.min(whole(edge.at), 1_000_000),
      blocks,
      tail: Math.min(whole(edge.tail), BLOCK_TOKENS - 1),
      bytes: whole(edge.bytes),
      states: statesOf(str(edge.states, 4000), blocks),
      users: names(edge.users),
      userCount: whole(edge.user_count),
      shares: Math.max(1, whole(edge.shares)),
      head: str(edge.head, 400),
    };
  });
}

/** "r12s3" as runs that cover exactly these blocks. */
export function statesOf(packed: string, blocks: number): (readonly [BlockState, number])[] {
  const runs: [BlockState, number][] = [];
  let left = blocks;
  for (const [, name, digits] of packed.matchAll(/([a-z])(\d{1,7})/g)) {
    const length = Math.min(left, Number(digits));
    if (length > 0) runs.push([oneOf(name, STATES, "r"), length]);
    left -= length;
  }
  if (left > 0) runs.push(["r", left]);
  return runs;
}

function userOf(raw: unknown): User[] {
  const user = maybe(raw);
  return user ? [{ name: str(user.name, 200), shared: whole(user.shared), own: whole(user.own), blocks: whole(user.blocks), stored: whole(user.stored) }] : [];
}

function goneOf(raw: unknown): Gone[] {
  const gone = maybe(raw);
  return gone ? [{ t: str(gone.t, 20), blocks: whole(gone.blocks), stored: whole(gone.stored), users: names(gone.users) }] : [];
}

export const stateAt = (edge: Edge, block: number): BlockState => {
  let at = 0;
  for (const [state, length] of edge.states) {
    at += length;
    if (block < at) return state;
  }
  return "r";
};

export interface Lane {
  readonly edge: Edge;
  readonly index: number;
  /** Lanes up to the one it hangs from; null at a root. */
  readonly up: number | null;
  /** The first of its namespace. */
  readonly first: boolean;
}

/** One lane per edge, each below what it hangs from, so that a line down never crosses another lane's blocks. */
export function lanesOf(edges: readonly Edge[]): Lane[] {
  const kids = new Map<number | null, number[]>();
  edges.forEach(({ parent }, index) => kids.set(parent, [...(kids.get(parent) ?? []), index]));
  const lanes: Lane[] = [];
  const rowOf = new Map<number, number>();
  const put = (index: number) => {
    const edge = edges[index]!;
    const row = lanes.length;
    rowOf.set(index, row);
    const above = edge.parent === null ? null : rowOf.get(edge.parent)!;
    const before = lanes[row - 1]?.edge.root;
    lanes.push({ edge, index, up: above === null ? null : row - above, first: row > 0 && edge.parent === null && before !== edge.root });
  };
  // Without recursion: a chain of many branches may be deep.
  const todo = [...(kids.get(null) ?? [])].sort((a, b) => edges[a]!.root - edges[b]!.root || a - b).reverse();
  for (let next = todo.pop(); next !== undefined; next = todo.pop()) {
    put(next);
    todo.push(...(kids.get(next) ?? []).slice().reverse());
  }
  return lanes;
}

/** Pixels of a block, so that the longest way fits; below 4 the blocks of a run are one bar. */
export function blockWidth(edges: readonly Edge[], room: number): number {
  const longest = Math.max(1, ...edges.map((edge) => edge.at + edge.blocks + (edge.tail ? 1 : 0)));
  return Math.max(0.02, Math.min(13, room / longest));
}

/** Bytes that there would be without sharing, over those there are; null where nothing is shared. */
export function sharing(edges: readonly Edge[]): { factor: number; saved: number } | null {
  const [there, without] = edges.reduce(([a, b], edge) => [a + edge.bytes, b + edge.bytes * edge.shares], [0, 0]);
  return there > 0 && without > there ? { factor: without / there, saved: without - there } : null;
}

/** Tokens of block `block` of an edge, first and last, counted from 0. The tail is the block after the last whole one. */
export function tokensOf(edge: Edge, block: number): readonly [number, number] {
  const from = (edge.at + block) * BLOCK_TOKENS;
  return [from, from + (block >= edge.blocks ? edge.tail : BLOCK_TOKENS) - 1];
}

export const cellsOf = (edge: Edge): number => edge.blocks + (edge.tail ? 1 : 0);

/** The text in the answer to "cache.text". */
export const textOfAnswer = (answer: unknown): string => str((maybe(answer) as Dict | null)?.text, 8000);
export const shareOf = (part: number, all: number): number => (all > 0 ? Math.min(1, part / all) : 0);
