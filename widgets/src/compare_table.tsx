/** The answers of a comparison as a table: every column sorts. */

import { useState } from "preact/hooks";

import { meanP, tokensOf, type Answer, type Group } from "./compare_data";
import { Pieces, Vote, type Changes, type Difference } from "./compare_parts";
import { columnsOf, sorted, type Column, type Mark as Voted } from "./compare_rows";
import { duration, probability } from "./format";
import { Mark } from "./more";
import { RunState } from "./state";

const CUT = 600;

export function CompareTable(props: {
  group: Group;
  base: Answer;
  differences: ReadonlyMap<number, Difference>;
  changes: Changes;
  marks: ReadonlyMap<number, Voted>;
  mark: (index: number, value: Voted) => void;
}) {
  const { group, base, differences, changes, marks } = props;
  const [order, setOrder] = useState<{ name: string; down: boolean }>({ name: "", down: false });
  const likes = new Map([...differences].map(([index, { like }]) => [index, like ?? 0]));
  likes.set(base.index, 1);
  const columns = columnsOf(group, differences.size ? base.letter : null);
  const sort = (name: string) =>
    setOrder((before) => (before.name === name ? (before.down ? { name: "", down: false } : { name, down: true }) : { name, down: false }));
  return (
    <div class="mlxnb-scroll">
      <table class="mlxnb-table mlxnb-cmp-table">
        <thead>
          <tr>
            <th scope="col">
              <span class="mlxnb-sr">Letter</span>
            </th>
            {columns.map((column) => {
              const on = order.name === column.name;
              return (
                <th
                  key={column.name}
                  scope="col"
                  class={column.numeric ? "mlxnb-num" : ""}
                  aria-sort={on ? (order.down ? "descending" : "ascending") : "none"}
                >
                  <button type="button" class="mlxnb-sort" title={`Sort by ${column.title}`} onClick={() => sort(column.name)}>
                    {column.title}
                    {on && <Mark name={order.down ? "down" : "up"} />}
                  </button>
                </th>
              );
            })}
          </tr>
        </thead>
        <tbody>
          {sorted(group.answers, order.name, order.down, likes, marks).map((answer) => (
            <tr key={answer.index}>
              <td>
                <span class={`mlxnb-cmp-key${answer.index === base.index && differences.size ? " mlxnb-cmp-key-base" : ""}`}>{answer.letter}</span>
              </td>
              {columns.map((column) => (
                <td
                  key={column.name}
                  class={column.name === "text" ? "mlxnb-cmp-cell" : column.numeric ? "mlxnb-num" : ""}
                  dir={column.name === "text" ? "auto" : undefined}
                >
                  <Value
                    {...{ answer, column, base, changes }}
                    difference={differences.get(answer.index) ?? null}
                    vote={marks.get(answer.index) ?? 0}
                    onVote={(value) => props.mark(answer.index, value)}
                  />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Value(props: {
  answer: Answer;
  column: Column;
  base: Answer;
  changes: Changes;
  difference: Difference | null;
  vote: Voted;
  onVote: (value: Voted) => void;
}) {
  const { answer, column, base, difference } = props;
  const { run } = answer;
  if (column.name.startsWith("label:")) return <>{answer.labels.get(column.name.slice(6)) ?? ""}</>;
  switch (column.name) {
    case "text": {
      if (!run.answer) return <span class="mlxnb-2">{run.error?.message ?? (run.live ? "…" : "(no text)")}</span>;
      // In a table only what is new is shown: left-out words would fill the cell.
      if (props.changes !== "off" && difference?.pieces) return <Pieces pieces={difference.pieces} changes={props.changes} rewritten />;
      return <>{run.answer.length > CUT ? `${run.answer.slice(0, CUT)}…` : run.answer}</>;
    }
    case "like":
      return <>{answer.index === base.index ? "base" : difference?.like == null ? "" : `${Math.round(100 * difference.like)}%`}</>;
    case "tokens":
      return <>{tokensOf(run)}</>;
    case "p": {
      const p = meanP(run);
      return <>{p === null ? "" : probability(p)}</>;
    }
    case "seconds":
      return <>{run.timing.ended === null ? <RunState run={run} /> : duration(run.timing.ended)}</>;
    default:
      return run.live || !run.answer ? null : <Vote letter={answer.letter} value={props.vote} onChange={props.onVote} />;
  }
}
