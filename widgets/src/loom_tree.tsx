/** The branches of a Loom, left to right. One stop of the Tab key; the arrows walk. */

import { useRef, useState } from "preact/hooks";

import { plural } from "./format";
import { drawn, type Segment, type Show, type Shown } from "./loom_data";
import { spoken, TokenText, visibleText } from "./more";
import { Icon } from "./parts";

/** A piece longer than this shows its beginning and its end; the path below has all of it. */
const HEAD_CHARS = 76;
const TAIL_CHARS = 28;
/** Of the widest line. */
const MOST_PX = 9;
/** Of one row at most, so that a few samples do not look like many. */
const ROW_PX = 2;

interface Props {
  segments: readonly Segment[];
  total: number;
  show: Show;
  path: readonly Segment[];
  onChoose: (key: string) => void;
}

export function Branches({ segments, total, show, path, onChoose }: Props) {
  const [unfolded, setUnfolded] = useState<ReadonlySet<string>>(new Set());
  const box = useRef<HTMLDivElement>(null);
  const all = drawn(segments, show, unfolded);
  const chosen = path.at(-1)?.key ?? "";
  const onPath = new Set(path.map(({ key }) => key));
  const go = (key: string | undefined) => {
    if (key === undefined) return;
    onChoose(key);
    box.current?.querySelector<HTMLElement>(`[data-key="${key}"]`)?.focus();
  };
  const onKey = (event: KeyboardEvent) => {
    const key = event.target instanceof HTMLElement ? event.target.dataset.key : undefined;
    if (key === undefined) return;
    const to = neighbours(all.top, key);
    const steps: Readonly<Record<string, string | undefined>> = { ArrowRight: to.kid, ArrowLeft: to.parent, ArrowDown: to.below, ArrowUp: to.above, Home: all.top[0]?.segment.key };
    if (event.key === "Enter" || event.key === " ") onChoose(key);
    else if (event.key in steps) go(steps[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const unfold = (key: string) => setUnfolded(new Set([...unfolded, key]));
  const first = all.top[0]?.segment.key;
  const most = Math.max(1, ...segments.map((one) => one.first.samples + one.first.rows));
  const stop = chosen && onPath.size && isDrawn(all.top, chosen) ? chosen : first;
  if (all.top.length === 0) return <p class="mlxnb-lm-none">{show === "kept" ? "Nothing is kept yet." : "No path has ended yet."}</p>;
  return (
    <div class="mlxnb-scroll">
      <div class="mlxnb-lm" role="tree" aria-label="Continuations" ref={box} onKeyDown={onKey}>
        <Kids list={all.top} folded={all.folded} foldedRows={all.foldedRows} of="" level={1} {...{ total, most, onPath, chosen, stop, onChoose, unfold }} />
      </div>
    </div>
  );
}

function isDrawn(list: readonly Shown[], key: string): boolean {
  return list.some((one) => one.segment.key === key || isDrawn(one.kids, key));
}

/** Where the arrows lead. Up and down stay at the same distance from the prompt, also across branches. */
export function neighbours(top: readonly Shown[], key: string): { parent?: string; kid?: string; above?: string; below?: string } {
  const levels: string[][] = [];
  let found: { parent?: string; kid?: string; level: number } | null = null;
  const walk = (list: readonly Shown[], level: number, parent: string | undefined) => {
    for (const one of list) {
      (levels[level] ??= []).push(one.segment.key);
      if (one.segment.key === key) found = { parent, kid: one.kids[0]?.segment.key, level };
      walk(one.kids, level + 1, one.segment.key);
    }
  };
  walk(top, 0, undefined);
  const here = found as { parent?: string; kid?: string; level: number } | null;
  if (!here) return {};
  const row = levels[here.level]!;
  const at = row.indexOf(key);
  return { parent: here.parent, kid: here.kid, above: row[at - 1], below: row[at + 1] };
}

interface KidsProps {
  list: readonly Shown[];
  folded: number;
  foldedRows: number;
  of: string;
  level: number;
  total: number;
  /** Rows of the branch that most took. */
  most: number;
  onPath: ReadonlySet<string>;
  chosen: string;
  stop: string | undefined;
  onChoose: (key: string) => void;
  unfold: (key: string) => void;
}

function Kids(props: KidsProps) {
  const { list, folded, foldedRows, of, level, most, onPath, unfold } = props;
  if (!list.length && !folded) return null;
  return (
    <div class="mlxnb-lm-kids" role={level > 1 ? "group" : "none"} aria-label={level > 1 ? "branches" : undefined}>
      {list.map((one) => {
        const { segment } = one;
        const rows = segment.first.samples + segment.first.rows;
        const width = rows ? Math.max(1.5, Math.min(MOST_PX / most, ROW_PX) * rows) : 1;
        const ink = segment.first.p === null ? 60 : 30 + 70 * Math.sqrt(segment.first.p);
        return (
          <div key={segment.key} class={`mlxnb-lm-kid${onPath.has(segment.key) ? " mlxnb-lm-on" : ""}`} role="none" style={`--w: ${width.toFixed(1)}px; --p: ${ink.toFixed(0)}%`}>
            <Piece one={one} {...props} />
            <Kids {...props} list={one.kids} folded={one.folded} foldedRows={one.foldedRows} of={segment.key} level={level + 1} />
          </div>
        );
      })}
      {folded > 0 && (
        <div class="mlxnb-lm-kid mlxnb-lm-fold" role="none" style="--w: 1px; --p: 40%">
          <button type="button" class="mlxnb-btn mlxnb-btn-quiet" onClick={() => unfold(of)}>
            {folded} more{foldedRows > 0 && ` · ${plural(foldedRows, "row")}`}
          </button>
        </div>
      )}
    </div>
  );
}

function Piece({ one, total, level, onPath, chosen, stop, onChoose }: KidsProps & { one: Shown }) {
  const { segment, kids } = one;
  const { first, key, mark, gone } = segment;
  const ghost = !first.samples && !first.rows && !first.live;
  const classes = ["mlxnb-lm-node", onPath.has(key) && "mlxnb-lm-path", key === chosen && "mlxnb-lm-sel", mark === "pruned" && "mlxnb-lm-cut", ghost && "mlxnb-lm-ghost"];
  const shown = shortened(segment.text);
  return (
    <div
      class={classes.filter(Boolean).join(" ")}
      role="treeitem"
      aria-level={level}
      aria-selected={key === chosen}
      aria-expanded={kids.length || one.folded ? true : undefined}
      aria-label={`${spoken(segment.text).slice(0, 200)}, ${metaWords(segment, total)}`}
      title={segment.text.length > shown.length ? segment.text.slice(0, 2000) : undefined}
      tabIndex={key === stop ? 0 : -1}
      data-key={key}
      onClick={() => onChoose(key)}
      style={`--nw: ${widthOf(shown, kids.length > 0)}ch`}
    >
      <span class="mlxnb-lm-text" dir="auto">
        {segment.text.trim() ? shown : <TokenText text={segment.text} />}
        {segment.last.live > 0 && <span class="mlxnb-caret" />}
      </span>
      <Meta segment={segment} total={total} gone={gone} />
    </div>
  );
}

/** Roughly as wide as its text in two lines, so that a branch is read and not unrolled. */
function widthOf(text: string, inner: boolean): number {
  const most = inner ? 28 : 40;
  return Math.max(12, Math.min(most, text.length <= most * 0.75 ? text.length + 1 : Math.ceil(text.length / 2) + 4));
}

/** On one line: where a text breaks its lines shows. */
export function shortened(text: string): string {
  const line = visibleText(text.replace(/\s*\n\s*/g, " ↵ ").trim());
  if (line.length <= HEAD_CHARS + TAIL_CHARS + 8) return line;
  // Whole words, where the text has any.
  return `${line.slice(0, HEAD_CHARS).replace(/(\s)\S{0,14}$/, "$1").trimEnd()} … ${line.slice(-TAIL_CHARS).replace(/^\S{0,14}\s/, "")}`;
}

const point = (p: number): string => (p >= 0.995 ? "1.0" : p < 0.005 ? "<.01" : p.toFixed(2).slice(1));

function metaWords({ first, last, mark }: Segment, total: number): string {
  const taken = first.samples ? `${first.samples} of ${total} samples` : first.rows ? plural(first.rows, "continuation") : "not sampled";
  return [taken, first.p !== null && `probability ${first.p.toFixed(2)}`, mark, last.ends > 0 && "ends here", last.cut > 0 && "cut at the limit", last.live > 0 && "being written"].filter(Boolean).join(", ");
}

function Meta({ segment, total }: { segment: Segment; total: number; gone: boolean }) {
  const { first, last, mark } = segment;
  const hand = first.rows > 0 && !first.samples;
  return (
    <span class="mlxnb-lm-meta" aria-hidden="true">
      {first.samples > 0 ? (
        <span>
          <b>{first.samples}</b>
          {total > 1 && ` of ${total}`}
        </span>
      ) : hand ? (
        <span>
          <b>+{first.rows}</b> continued
        </span>
      ) : null}
      {first.p !== null && <span>p {point(first.p)}</span>}
      {mark && (
        <span>
          <Icon name={mark === "kept" ? "pin" : "cross"} /> {mark}
        </span>
      )}
      {last.live > 0 ? (
        <span class="mlxnb-lm-live">{last.live > 1 ? `${last.live} rows writing` : "writing"}</span>
      ) : last.failed > 0 ? (
        <span>
          <Icon name="warn" /> failed
        </span>
      ) : last.ends > 0 ? (
        <span>
          <Icon name="check" /> ends
        </span>
      ) : last.cut > 0 ? (
        <span>
          <Icon name="limit" /> cut
        </span>
      ) : null}
    </span>
  );
}
