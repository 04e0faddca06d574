/** What cards and table of a comparison share: the pieces of a text that changed, and a reader's vote. */

import { onlyChanges, type Piece } from "./compare_data";
import type { Mark } from "./compare_rows";
import { Icon } from "./parts";

export type Changes = "off" | "words" | "only";
export interface Difference {
  readonly pieces: readonly Piece[] | null;
  readonly like: number | null;
  readonly rewritten: boolean;
}

/** Text is compared as text: Markdown of two answers cannot be laid over each other. */
export function Pieces({ pieces, changes, rewritten }: { pieces: readonly Piece[]; changes: Changes; rewritten: boolean }) {
  const cut = changes === "only" ? onlyChanges([...pieces]) : pieces;
  const shown = rewritten ? cut.filter(({ kind }) => kind !== "del") : cut;
  // Only where space says something is it kept as it is: kept space would be marked at the ends of lines.
  const exact = shown.some(({ text }) => /\n[ \t]|[^\S\n]{2}/.test(text));
  return (
    <div class={`mlxnb-cmp-text${exact ? " mlxnb-cmp-exact" : ""}`} dir="auto">
      {shown.map(({ kind, text }, index) =>
        kind === "same" ? (
          <span key={index}>{text}</span>
        ) : (
          <Changed key={index} kind={kind} text={text} apart={kind === "del" && shown[index + 1]?.kind === "add"} />
        ),
      )}
    </div>
  );
}

/** The space around a change is not marked, or lines would seem to hold more than they do. apart: what was left out stands off what was added. */
function Changed({ kind, text, apart }: { kind: "add" | "del"; text: string; apart: boolean }) {
  const [, head, body, tail] = /^(\s*)([\s\S]*?)(\s*)$/.exec(text) ?? [];
  return (
    <>
      {head}
      {kind === "add" ? <ins class="mlxnb-add">{body}</ins> : <del class="mlxnb-del">{body}</del>}
      {tail || (apart && " ")}
    </>
  );
}

export function Vote({ letter, value, onChange }: { letter: string; value: Mark; onChange: (value: Mark) => void }) {
  return (
    <span class="mlxnb-vote" role="group" aria-label={`Your vote on ${letter}`}>
      {(
        [
          [1, "Good"],
          [-1, "Bad"],
        ] as const
      ).map(([mark, word]) => (
        <button
          key={mark}
          type="button"
          class={`mlxnb-btn mlxnb-btn-quiet${value === mark ? "" : " mlxnb-btn-icon"}`}
          aria-pressed={value === mark}
          aria-label={word}
          title={word}
          onClick={() => onChange(mark)}
        >
          {value === mark ? (
            <>
              <Icon name={mark === 1 ? "check" : "cross"} />
              {word}
            </>
          ) : (
            <i class="mlxnb-i" style={`--i: var(--mlxnb-i-${mark === 1 ? "up" : "down"})`} aria-hidden="true" />
          )}
        </button>
      ))}
    </span>
  );
}
