/** The tree of blocks: a lane for each run of them, in order, hanging where its text departs. A block is read under the pointer. */

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { blockWidth, cellsOf, lanesOf, type CacheMap, type Edge, type Lane } from "./cache_data";
import { BlockPopover } from "./cache_block";
import { bytes, plural, whole } from "./format";
import type { Host } from "./host";
import { visibleText } from "./more";
import { Button, OWN_KEYS } from "./parts";

/** Room for the words behind a run. */
const WORDS_PX = 74;
/** Narrower blocks have no gaps between them. */
const GAP_FROM_PX = 5;
const HOVER_MS = 200;
/** Shown at first of a large map. */
const LANES = 30;
const KEY = [
  ["mlxnb-cm-s1", "used by 1"],
  ["mlxnb-cm-s2", "2"],
  ["mlxnb-cm-s3", "3"],
  ["mlxnb-cm-s5", "5 or more"],
  ["mlxnb-cm-s2 mlxnb-cm-ssd", "on the SSD too"],
  ["mlxnb-cm-s2 mlxnb-cm-lease", "in use by a running row"],
  ["mlxnb-cm-s2 mlxnb-cm-open", "part-filled"],
] as const;

interface At {
  readonly lane: number;
  readonly block: number;
}

export function Lanes({ map, host }: { map: CacheMap; host: Host }) {
  const box = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState(420);
  const [at, setAt] = useState<At | null>(null);
  const [stop, setStop] = useState(0);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const [every, setEvery] = useState(false);
  const all = useMemo(() => lanesOf(map.edges), [map.edges]);
  const lanes = every || all.length <= LANES + 6 ? all : all.slice(0, LANES);
  const px = blockWidth(map.edges, room - WORDS_PX);
  useLayoutEffect(() => {
    const lane = box.current?.querySelector(".mlxnb-cm-lane");
    if (!lane || typeof ResizeObserver !== "function") return;
    const observer = new ResizeObserver(() => setRoom(Math.max(160, lane.clientWidth)));
    observer.observe(lane);
    return () => observer.disconnect();
  }, [lanes.length > 0]);
  const open = (next: At | null, soon: number) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setAt(next), soon);
  };
  useLayoutEffect(() => () => clearTimeout(timer.current), []);
  const walk = (lane: number, block: number) => {
    const edge = lanes[lane]?.edge;
    if (!edge) return;
    setStop(lane);
    setAt({ lane, block: Math.max(0, Math.min(block, cellsOf(edge) - 1)) });
    box.current?.querySelector<HTMLElement>(`[data-lane="${lane}"]`)?.focus();
  };
  const onKey = (event: KeyboardEvent) => {
    const lane = Number(event.target instanceof HTMLElement ? event.target.dataset.lane : NaN);
    if (Number.isNaN(lane)) return;
    const block = at?.lane === lane ? at.block : 0;
    if (event.key === "ArrowRight") walk(lane, block + 1);
    else if (event.key === "ArrowLeft") walk(lane, block - 1);
    else if (event.key === "ArrowDown") walk(Math.min(lane + 1, lanes.length - 1), 0);
    else if (event.key === "ArrowUp") walk(Math.max(lane - 1, 0), 0);
    else if (event.key === "Escape" && at) setAt(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const edge = at ? lanes[at.lane]?.edge : undefined;
  return (
    <>
      <div class="mlxnb-cm" ref={box} onKeyDown={onKey} onPointerLeave={() => open(null, HOVER_MS)} {...OWN_KEYS}>
        <div class="mlxnb-cm-row mlxnb-cm-head">
          <span>Blocks of 64 tokens, branching where texts part</span>
          <span>Used by</span>
          <span class="mlxnb-num">K/V</span>
        </div>
        {lanes.map((lane, row) => (
          <div key={lane.edge.id || row} class={`mlxnb-cm-row${lane.first ? " mlxnb-cm-root" : ""}`}>
            <Run
              lane={lane}
              row={row}
              px={px}
              open={at?.lane === row ? at.block : null}
              stop={row === Math.min(stop, lanes.length - 1)}
              onAt={(block, soon) => open({ lane: row, block }, soon)}
              onFocus={() => {
                setStop(row);
                if (at?.lane !== row) open({ lane: row, block: 0 }, 0);
              }}
              onBlur={() => open(null, HOVER_MS)}
            />
            <Who edge={lane.edge} />
            <span class="mlxnb-num mlxnb-2">{bytes(lane.edge.bytes)}</span>
          </div>
        ))}
      </div>
      {at && edge && (
        <BlockPopover
          key={`${edge.id}.${at.block}`}
          edge={edge}
          block={at.block}
          host={host}
          anchor={() => box.current?.querySelector<HTMLElement>(`[data-lane="${at.lane}"]`) ?? null}
          offset={(at.block + 0.5) * px}
          onHold={() => clearTimeout(timer.current)}
          onLeave={() => open(null, HOVER_MS)}
          onClose={() => setAt(null)}
        />
      )}
      {lanes.length < all.length && (
        <div class="mlxnb-hint">
          <span class="mlxnb-grow">
            {lanes.length} of {whole(all.length)} runs of blocks are shown.
          </span>
          <Button onClick={() => setEvery(true)}>Show all</Button>
        </div>
      )}
      {map.leftOut.blocks + map.leftOut.edges > 0 && (
        <p class="mlxnb-cm-sum">
          The most recently used are shown. Left out: {map.leftOut.edges > 0 && `${plural(map.leftOut.edges, "branch")}, `.replace("branchs", "branches")}
          {plural(map.leftOut.blocks, "block")}.
        </p>
      )}
      <ul class="mlxnb-cm-key">
        {KEY.map(([classes, says]) => (
          <li key={says}>
            <i class={`mlxnb-cm-blk ${classes}`} aria-hidden="true" />
            {says}
          </li>
        ))}
      </ul>
    </>
  );
}

function Who({ edge }: { edge: Edge }) {
  const more = edge.userCount - edge.users.length;
  const head = visibleText(edge.head.replace(/\s+/g, " ").trim());
  const users = `${visibleText(edge.users.join(", "))}${more > 0 ? ` and ${whole(more)} more` : ""}`;
  return (
    <span class="mlxnb-cm-who" title={[users, head].filter(Boolean).join(" ")} dir="auto">
      {users && <b>{users}</b>} <span class="mlxnb-2">{head}</span>
    </span>
  );
}

const WORDS = { r: "in RAM", s: "in RAM and on the SSD", l: "in RAM, in use", m: "in RAM and on the SSD, in use" } as const;

function Run(props: {
  lane: Lane;
  row: number;
  px: number;
  open: number | null;
  stop: boolean;
  onAt: (block: number, soon: number) => void;
  onFocus: () => void;
  onBlur: () => void;
}) {
  const { lane, row, px, open, stop } = props;
  const { edge, up } = lane;
  const cells = cellsOf(edge);
  const left = edge.at * px;
  const tint = edge.shares >= 5 ? 5 : edge.shares;
  const last = edge.at + cells - 1;
  const states = [...new Set(edge.states.map(([state]) => WORDS[state]))].join("; ");
  const says = `Blocks ${edge.at} to ${last}, ${plural(edge.shares, "user")}${states ? `, ${states}` : ""}${edge.tail ? `, then ${plural(edge.tail, "token")} of a part-filled one` : ""}`;
  const blockAt = (event: PointerEvent) => {
    const from = (event.currentTarget as HTMLElement).getBoundingClientRect().left;
    return Math.max(0, Math.min(cells - 1, Math.floor((event.clientX - from) / px)));
  };
  return (
    <div class="mlxnb-cm-lane">
      {up !== null && <i class="mlxnb-cm-wire" aria-hidden="true" style={`left: ${Math.max(0, left - 8)}px; --up: ${up}`} />}
      <button
        type="button"
        class={`mlxnb-cm-run mlxnb-cm-s${tint}${px >= GAP_FROM_PX ? " mlxnb-cm-gaps" : ""}`}
        style={`left: ${left}px; width: ${Math.max(3, cells * px)}px; --b: ${px}px`}
        aria-label={says}
        aria-expanded={open !== null}
        data-lane={row}
        tabIndex={stop ? 0 : -1}
        onPointerMove={(event) => {
          const block = blockAt(event);
          if (block !== open) props.onAt(block, open === null ? HOVER_MS : 0);
        }}
        onFocus={props.onFocus}
        onBlur={props.onBlur}
      >
        {edge.states.map(([state, length], index) => (
          <span key={index} class={`mlxnb-cm-part${state === "s" || state === "m" ? " mlxnb-cm-ssd" : ""}${state === "l" || state === "m" ? " mlxnb-cm-lease" : ""}`} style={`width: ${length * px}px`} />
        ))}
        {edge.tail > 0 && <span class="mlxnb-cm-part mlxnb-cm-open" style={`width: ${px}px; --full: ${Math.round((100 * edge.tail) / 64)}%`} />}
        {open !== null && <span class="mlxnb-cm-at" style={`left: ${open * px}px; width: ${Math.max(3, px)}px`} />}
      </button>
      <span class="mlxnb-cm-by" style={`left: ${left + Math.max(3, cells * px) + 6}px`}>
        <b>{whole(edge.shares)}</b>
        {edge.shares > 1 && " share"}
      </span>
    </div>
  );
}

