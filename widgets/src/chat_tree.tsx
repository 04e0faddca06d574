/** All turns of a conversation as a tree: filled leads to the head, hollow stands aside, dashed is stale. One can be picked to go on from, or to fork. */

import { useState } from "preact/hooks";

import type { Chat, Row } from "./chat_data";
import { plural } from "./format";
import { Button, OWN_KEYS, State } from "./parts";

const LANE = 16;
const HEIGHT = 28;
const x = (lane: number): number => 10 + LANE * lane;

export function TreePanel(props: {
  chat: Chat;
  live: boolean;
  blocked: boolean;
  send: (what: "go" | "fork", name: string, args: object) => void;
}) {
  const { chat, live, blocked, send } = props;
  const [wanted, setPicked] = useState<string | null>(null);
  const picked = chat.tree.find((row) => row.id === wanted) ?? chat.tree.find((row) => row.head) ?? null;
  const system = chat.turns.find((turn) => turn.role === "system")?.text ?? "";
  const wide = Math.max(0, ...chat.tree.map((row) => row.lines.length));
  const hung = new Set(chat.tree.map((row) => row.parent));
  return (
    <>
      <ol class="mlxnb-ch-tree" aria-label="Tree of turns" {...OWN_KEYS}>
        <li>
          <Lines row={null} wide={wide} below={chat.tree.length > 0} />
          <span class="mlxnb-ch-words" dir="auto">
            <b>{system ? "System" : "Start"}</b> {system}
          </span>
        </li>
        {chat.tree.map((row, index) => (
          <li key={row.id} class={row === picked && live ? "mlxnb-ch-here" : undefined}>
            <Lines row={row} wide={wide} below={hung.has(index)} />
            <button type="button" class="mlxnb-ch-words" dir="auto" aria-pressed={live ? row === picked : undefined} disabled={!live} onClick={() => setPicked(row.id)}>
              <b>{row.id}</b> {row.text}
            </button>
            <span class="mlxnb-2 mlxnb-ch-facts">{[row.cell, row.tokens > 0 && plural(row.tokens, "token")].filter(Boolean).join(" · ")}</span>
            <span class="mlxnb-ch-mark">
              {row.stale && (
                <State tone="warn" icon="wait">
                  stale
                </State>
              )}
              {row.head && (
                <State tone="quiet" icon="pin">
                  head
                </State>
              )}
            </span>
          </li>
        ))}
      </ol>
      {live && picked && (
        <div class="mlxnb-ch-pick">
          <span class="mlxnb-grow" dir="auto">
            {picked.stale ? (
              <>
                <b>{picked.id}</b> is stale; a fork keeps it with the answers that it follows.
              </>
            ) : (
              <>
                The next message goes after <b>{picked.id}</b>, here or in a fork.
              </>
            )}
          </span>
          {!picked.stale && !picked.head && (
            <Button icon="pin" disabled={blocked} onClick={() => send("go", "chat.go", { turn: picked.id, exact: true })}>
              Set as head
            </Button>
          )}
          <Button icon="branch" disabled={blocked} onClick={() => send("fork", "chat.fork", { turn: picked.id })}>
            {picked.stale ? "Keep as a fork" : "Fork"}
          </Button>
        </div>
      )}
    </>
  );
}

/** The lines beside a row and its dot; null is the start. below: whether something hangs on it. */
function Lines({ row, wide, below }: { row: Row | null; wide: number; below: boolean }) {
  const lines = row?.lines ?? [];
  const own = lines.length;
  const middle = HEIGHT / 2;
  const strokes = lines.flatMap((on, lane) => (on ? [`M${x(lane)} 0V${HEIGHT}`] : []));
  if (row?.branch && own > 0) {
    if (!lines[own - 1]) strokes.push(`M${x(own - 1)} 0V2`);
    strokes.push(`M${x(own - 1)} 2C${x(own - 1)} ${middle - 2} ${x(own) - 12} ${middle} ${x(own) - 4} ${middle}`);
  } else if (row) strokes.push(`M${x(own)} 0V${middle - 4}`);
  if (below) strokes.push(`M${x(own)} ${middle + 4}V${HEIGHT}`);
  const filled = !row || (row.onPath && !row.stale);
  return (
    <svg class="mlxnb-ch-lines" width={x(wide) + 10} height={HEIGHT} viewBox={`0 0 ${x(wide) + 10} ${HEIGHT}`} aria-hidden="true">
      <path d={strokes.join("")} />
      <circle cx={x(own)} cy={middle} r={4} class={filled ? "mlxnb-ch-full" : undefined} stroke-dasharray={row?.stale ? "2 1.6" : undefined} />
    </svg>
  );
}
