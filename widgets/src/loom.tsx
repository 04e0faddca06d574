/** The Loom: a tree of continuations. What is shared is there once; a line is as wide as the samples it carries. */

import { useComputed } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { plural, probability, whole } from "./format";
import type { Host } from "./host";
import { costOf, leastCertain, nodesOf, parseLoom, pathText, pathTo, segmentsBelow, ways, weave, type Loom, type Segment, type Show, type Tree } from "./loom_data";
import { Branches } from "./loom_tree";
import { register } from "./mount";
import { spoken, TokenText, useAct, useCopied, type Act } from "./more";
import { dict, field, str, type AlternativeData } from "./parse";
import { Announce, Bar, Button, Glyph, Grow, Icon, Metrics, ModelChip, Note, Notice, Seg, State } from "./parts";
import { TreeFrame } from "./tree_frame";

/** A merge up to this long is made at once; after a longer one the next waits this many times as long as it took. */
const CHEAP_MS = 12;
const MERGE_SHARE = 5;
const MORE_TOKENS = 64;
const MORE_ROWS = 4;
const MAX_WIDTH = 16;
const MAX_PLACES = 512;
const LISTED = 8;
const FILTERS = [
  ["all", "All"],
  ["kept", "Kept"],
  ["ends", "Ends"],
] as const;
/** Of a long prompt its end, which is what the branches go on from. */
const PROMPT_CHARS = 360;

export function LoomView({ host }: { host: Host }) {
  const loom = useComputed(() => parseLoom(host.record.value)).value;
  const act = useAct(host);
  if (!loom) return <Notice text="This output has no loom data." />;
  return <Body loom={loom} host={host} act={act} />;
}

/** The merged tree of a loom that may be growing: one that takes long to merge is merged less often. */
function useTree(newest: Loom): { loom: Loom; tree: Tree; segments: readonly Segment[] } {
  const [late, setLate] = useState(newest);
  const last = useRef({ cost: 0, at: 0 });
  const loom = last.current.cost < CHEAP_MS ? newest : late;
  useEffect(() => {
    if (loom === newest) return;
    const timer = setTimeout(() => setLate(newest), Math.max(0, last.current.at + MERGE_SHARE * last.current.cost - performance.now()));
    return () => clearTimeout(timer);
  }, [newest, loom]);
  return useMemo(() => {
    const began = performance.now();
    const tree = weave(loom);
    const segments = segmentsBelow(tree.root);
    const at = performance.now();
    last.current = { cost: at - began, at };
    return { loom, tree, segments };
  }, [loom]);
}

function Body({ loom: newest, host, act }: { loom: Loom; host: Host; act: Act }) {
  const { loom, tree, segments } = useTree(newest);
  const [chosen, setChosen] = useState("");
  const [show, setShow] = useState<Show>("all");
  const [opening, setOpening] = useState("");
  const [chat, setChat] = useState("");
  const [fault, setFault] = useState("");
  const path = pathTo(segments, chosen);
  const here = path.at(-1) ?? null;
  const can = host.live && act.busy === null && here !== null;
  const open = here && !here.gone && here.mark !== "pruned";
  const forget = () => {
    setChat("");
    setFault("");
    act.dismiss();
  };
  const send = (name: string, args: object = {}): Promise<boolean> => {
    forget();
    return here ? act.send(name, { ...here.last.place, ...args }) : Promise.resolve(false);
  };
  const acts = {
    expand: () => {
      if (!can || !open) return;
      setOpening(opening === here.key ? "" : here.key);
      if (opening !== here.key && here.last.next.length === 0) void send("loom.peek");
    },
    keep: () => can && open && void send("loom.mark", { mark: "kept", on: here.mark !== "kept" }),
    prune: () => can && !here.gone && void send("loom.mark", { mark: "pruned", on: here.mark !== "pruned" }),
    more: (rows: number) => can && open && void send("loom.more", { tokens: MORE_TOKENS, rows }),
    chat: () => {
      if (!can) return;
      forget();
      host.command("loom.chat", here.last.place).then(
        (told) => setChat(str(field(dict(told), "name"), 80)),
        (error: Error) => setFault(error.message),
      );
    },
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey || !can) return;
    const keys: Readonly<Record<string, () => unknown>> = { e: acts.expand, k: acts.keep, x: acts.prune, c: () => acts.more(1) };
    const does = keys[event.key];
    if (!does) return;
    event.preventDefault();
    event.stopPropagation();
    does();
  };
  const writing = loom.runs.some(({ live }) => live);
  const wrong = act.error || fault;
  return (
    <TreeFrame label="Loom">
      <Head loom={loom} tree={tree} count={ways(segments)} host={host} act={act} />
      {wrong && (
        <Note tone="err" title="Not done.">
          {wrong}{" "}
          <Button kind="quiet" onClick={forget}>
            Dismiss
          </Button>
        </Note>
      )}
      <Faults loom={loom} same={!writing && tree.samples > 1 && ways(segments) === 1} />
      <Tools tree={tree} show={show} setShow={setShow} />
      <div onKeyDown={onKey}>
        <Shared loom={loom} tree={tree} />
        {segments.length === 0 ? (
          <p class="mlxnb-lm-none">{writing ? "The first tokens are on their way." : "No token was produced."}</p>
        ) : (
          <Branches segments={segments} total={tree.samples} show={show} path={path} onChoose={setChosen} />
        )}
        {here ? (
          <>
            <div class="mlxnb-lm-act">
              <About path={path} here={here} total={tree.samples} />
              {host.live && <Actions here={here} can={can} acts={acts} expanding={opening === here.key} />}
            </div>
            {opening === here.key && host.live && open && (
              <Expand
                here={here}
                busy={act.busy !== null || loom.growing}
                writing={writing}
                onCancel={() => setOpening("")}
                onExpand={(args) => void send("loom.expand", args).then((done) => done && setOpening(""))}
              />
            )}
            <Read loom={loom} path={path} onChat={host.live ? acts.chat : null} />
            {chat && (
              <Note icon="check">
                The path is in <code class="mlxnb-mono">{chat}</code>. Go on with <code class="mlxnb-mono">{chat}.send("…")</code>
              </Note>
            )}
          </>
        ) : (
          segments.length > 0 && (
            <div class="mlxnb-hint">
              {host.live
                ? "Choose a piece: read its path, go on from it, keep it or prune it."
                : "Choose a piece to read its path. This loom is saved: run its cell again to go on from it."}
            </div>
          )
        )}
      </div>
      <Foot loom={loom} tree={tree} />
      <Announce live={writing} said={chat && `The path is in ${chat}.`} />
    </TreeFrame>
  );
}

function Head({ loom, tree, count, host, act }: { loom: Loom; tree: Tree; count: number; host: Host; act: Act }) {
  const live = loom.runs.filter((run) => run.live);
  const failed = loom.runs.filter(({ status }) => status === "failed").length;
  const stopping = live.length > 0 && live.every((run) => run.stopping);
  const model = loom.model || loom.runs[0]!.model;
  return (
    <Bar>
      <span class="mlxnb-title">Loom</span>
      <span class="mlxnb-2">
        {plural(tree.samples, "sample")}, {plural(count, "path")}
      </span>
      <Grow />
      {model && <ModelChip name={model} />}
      {live.length > 0 && !host.live ? (
        <State tone="quiet" icon="wait">
          saved before the end
        </State>
      ) : live.length > 0 ? (
        <State tone="live">
          {stopping ? "stopping" : "streaming"} · {live.length} of {plural(loom.runs.length, "row")}
        </State>
      ) : loom.growing ? (
        <State tone="live">expanding</State>
      ) : failed ? (
        <State tone="err" icon="warn">
          {failed} failed
        </State>
      ) : (
        <State tone="quiet" icon={host.live ? "check" : "pin"}>
          {host.live ? "at rest" : "saved"}
        </State>
      )}
      {live.length > 0 && host.live && (
        <Button icon="stop" disabled={stopping} onClick={() => void act.send("stop")}>
          Stop
        </Button>
      )}
    </Bar>
  );
}

function Tools({ tree, show, setShow }: { tree: Tree; show: Show; setShow: (show: Show) => void }) {
  const { shares } = tree;
  return (
    <div class="mlxnb-tools">
      {tree.samples > 1 && (
        <span>
          <b>3 of {tree.samples}</b> samples
        </span>
      )}
      {shares && (
        <span>
          <b>p .55</b> by the model
        </span>
      )}
      <span>
        <i class="mlxnb-lm-key" aria-hidden="true" /> width = samples{shares && ", ink = probability"}
      </span>
      <Grow />
      <Seg label="Show" value={show} options={FILTERS} onChange={setShow} />
    </div>
  );
}

/** What no branch can show: rows that failed, samples that cannot differ, alternatives that were not saved. */
function Faults({ loom, same }: { loom: Loom; same: boolean }) {
  const failed = loom.runs.find(({ error }) => error !== null);
  const note = loom.runs.find(({ tokensNote, text }) => tokensNote && text)?.tokensNote;
  return (
    <>
      {failed?.error && <Note tone="err" title={failed.error.message} hint={failed.error.hint} />}
      {loom.temp === 0 && same && (
        <Note icon="limit">At temperature 0 every sample is the same. Expand a piece to see what else could have come, or raise the temperature.</Note>
      )}
      {note && <Note icon="limit">{note}</Note>}
      {loom.note && <Note icon="limit">{loom.note}</Note>}
    </>
  );
}

function Shared({ loom, tree }: { loom: Loom; tree: Tree }) {
  const { promptTokens, cachedTokens } = loom.runs[0]!.usage;
  const text = loom.prompt.trim();
  return (
    <div class="mlxnb-lm-shared">
      <p dir="auto" title={text.length > PROMPT_CHARS ? text.slice(0, 4000) : undefined}>
        {text.length > PROMPT_CHARS ? `… ${text.slice(-PROMPT_CHARS)}` : text || "(empty prompt)"}
      </p>
      <p class="mlxnb-lm-meta">
        <Glyph of={cachedTokens ? "cached" : "prompt"} />
        <span>
          shared by {tree.samples > 1 ? `all ${tree.samples}` : "all rows"}
          {promptTokens !== null && ` · ${plural(promptTokens, "token")}, ${cachedTokens ? `${whole(cachedTokens)} from the cache` : "read once"}`}
        </span>
      </p>
    </div>
  );
}

function About({ path, here, total }: { path: readonly Segment[]; here: Segment; total: number }) {
  const nodes = nodesOf(path);
  const least = leastCertain(nodes);
  const { samples, rows } = here.first;
  const known = nodes.every(({ p }) => p !== null);
  const odds = known ? nodes.reduce((product, { p }) => product * p!, 1) : null;
  return (
    <span class="mlxnb-grow">
      <b>{samples ? (total > 1 ? `${samples} of ${total}` : "The answer") : rows ? `${plural(rows, "continuation")}` : "Not sampled"}</b>
      <span class="mlxnb-2">
        {" "}
        {plural(nodes.length, "token")} deep
        {least?.p != null && (
          <>
            {" "}
            · least certain at <span class="mlxnb-lm-word"><TokenText text={least.text} /></span> p {probability(least.p)}
          </>
        )}
        {odds !== null && nodes.length > 1 && odds >= 0.0005 && ` · whole path p ${probability(odds)}`}
      </span>
    </span>
  );
}

type Acts = { expand: () => void; keep: () => unknown; prune: () => unknown; more: (rows: number) => unknown };

function Actions({ here, can, acts, expanding }: { here: Segment; can: boolean; acts: Acts; expanding: boolean }) {
  if (here.gone) return null;
  const cut = here.mark === "pruned";
  const kept = here.mark === "kept";
  return (
    <span class="mlxnb-btns">
      {!cut && (
        <>
          <button type="button" class="mlxnb-btn" title="The likeliest next tokens as branches (e)" aria-expanded={expanding} disabled={!can} onClick={acts.expand}>
            <Icon name="branch" />
            Expand…
          </button>
          <Button icon="pin" disabled={!can} label={kept ? "Take the mark away (k)" : "Mark this path (k)"} onClick={acts.keep}>
            {kept ? "Unkeep" : "Keep"}
          </Button>
        </>
      )}
      <Button icon={cut ? "undo" : "cross"} disabled={!can} label={cut ? "Bring it back (x)" : "Hide it, and stop the rows that write here (x)"} onClick={acts.prune}>
        {cut ? "Bring back" : "Prune"}
      </Button>
      {!cut && (
        <>
          <Button icon="play" disabled={!can} label={`${MORE_ROWS} samples from here, at most ${MORE_TOKENS} tokens each`} onClick={() => acts.more(MORE_ROWS)}>
            Sample {MORE_ROWS}
          </Button>
          <Button icon="play" kind="primary" disabled={!can} label={`One row, at most ${MORE_TOKENS} tokens more (c)`} onClick={() => acts.more(1)}>
            Continue {MORE_TOKENS}
          </Button>
        </>
      )}
    </span>
  );
}

/** The next tokens as the model ranks them; ticked ones become branches. What it costs is said before. */
function Expand(props: {
  here: Segment;
  busy: boolean;
  writing: boolean;
  onCancel: () => void;
  onExpand: (args: { width: number; depth: number; ids: number[] }) => void;
}) {
  const { here, busy, writing, onCancel, onExpand } = props;
  const next = here.last.next.slice(0, LISTED);
  const [width, setWidth] = useState(3);
  const [depth, setDepth] = useState(1);
  const [ticks, setTicks] = useState<ReadonlySet<number> | null>(null);
  const ticked = ticks ?? new Set(next.slice(0, width).map(({ id }) => id));
  const tick = (id: number) => {
    const fresh = new Set(ticked);
    if (!fresh.delete(id)) fresh.add(id);
    setTicks(fresh);
  };
  const cost = costOf(ticked.size, width, depth, true);
  const over = cost.places > MAX_PLACES;
  return (
    <div class="mlxnb-lm-open">
      <div class="mlxnb-lm-next">
        <p>
          <b>Next token</b> <span class="mlxnb-2">ticked ones become branches</span>
        </p>
        {next.length === 0 ? (
          <p class="mlxnb-2">{busy || writing ? "One step of one row tells what could come next…" : "The engine has not told what could come next."}</p>
        ) : (
          <ul>
            {next.map((one) => (
              <Tick key={one.id} one={one} most={chance(next[0]!)} on={ticked.has(one.id)} taken={here.last.kid(one.id)?.samples ?? 0} onChange={() => tick(one.id)} />
            ))}
          </ul>
        )}
      </div>
      <div class="mlxnb-lm-cost">
        <Count label="Width" value={width} most={MAX_WIDTH} onChange={(value) => (setWidth(value), setTicks(null))} />
        <Count label="Depth" value={depth} most={8} onChange={setDepth} />
        <p class="mlxnb-2">
          {ticked.size === 0
            ? "Nothing is ticked."
            : over
            ? `${whole(cost.places)} places; the limit is ${MAX_PLACES}.`
            : `${plural(cost.places, "place")}, ${cost.rows ? `${plural(cost.rows, "step")} of one token in ${plural(depth - 1, "batch")}`.replace(/batchs$/, "batches") : "nothing to compute"}. No token of the path is read again.`}
        </p>
        <span class="mlxnb-btns">
          <Button icon="branch" kind="primary" disabled={busy || over || ticked.size === 0} onClick={() => onExpand({ width, depth, ids: [...ticked] })}>
            Expand
          </Button>
          <Button onClick={onCancel}>Cancel</Button>
        </span>
      </div>
    </div>
  );
}

const chance = (one: AlternativeData): number => (one.logprob === null ? 0 : Math.exp(one.logprob));

function Tick({ one, most, on, taken, onChange }: { one: AlternativeData; most: number; on: boolean; taken: number; onChange: () => void }) {
  const p = chance(one);
  return (
    <li>
      <label class="mlxnb-lm-tick">
        <input type="checkbox" checked={on} aria-label={`${spoken(one.text)}, probability ${p.toFixed(3)}`} onChange={onChange} />
        <span class="mlxnb-lm-box">{on && <Icon name="check" />}</span>
        <span class="mlxnb-lm-word" title={one.text}>
          <TokenText text={one.text} />
        </span>
        <span class="mlxnb-pbar" aria-hidden="true">
          <span style={`width: ${most > 0 ? ((100 * p) / most).toFixed(0) : 0}%`} />
        </span>
        <span class="mlxnb-num">{probability(p)}</span>
        <span class="mlxnb-2">{taken > 0 && plural(taken, "sample")}</span>
      </label>
    </li>
  );
}

function Count({ label, value, most, onChange }: { label: string; value: number; most: number; onChange: (value: number) => void }) {
  return (
    <label class="mlxnb-lm-count">
      {label}
      <input
        class="mlxnb-input"
        type="number"
        min={1}
        max={most}
        value={value}
        onInput={(event) => {
          const given = Math.round(Number(event.currentTarget.value));
          if (given >= 1 && given <= most) onChange(given);
        }}
      />
    </label>
  );
}

/** The path as one text. */
function Read({ loom, path, onChat }: { loom: Loom; path: readonly Segment[]; onChat: (() => void) | null }) {
  const [copied, copy] = useCopied();
  const raw = loom.runs[0]!.messages.length === 0;
  const text = loom.runs[0]!.prefill + pathText(path);
  const before = raw ? loom.prompt.slice(-PROMPT_CHARS) : "";
  return (
    <div class="mlxnb-lm-read">
      <p class="mlxnb-grow" dir="auto">
        {before && <span class="mlxnb-2">{before}</span>}
        {raw ? text : text.trimStart()}
      </p>
      <span class="mlxnb-btns">
        <Button icon={copied ? "check" : "copy"} onClick={() => copy(text)}>
          {copied ? "Copied" : "Copy text"}
        </Button>
        {onChat && (
          <Button icon="link" label="Put the prompt and this path into a conversation" onClick={onChat}>
            To a chat
          </Button>
        )}
      </span>
    </div>
  );
}

function Foot({ loom, tree }: { loom: Loom; tree: Tree }) {
  const seeds = loom.runs.filter((_, index) => loom.rows[index]!.kind === "sample").flatMap(({ seed }) => seed ?? []);
  const [first, last] = [Number(seeds[0]), Number(seeds.at(-1))];
  const row = Number.isSafeInteger(last) && last - first === seeds.length - 1;
  const sum = (of: (run: Loom["runs"][number]) => number | null): number => loom.runs.reduce((total, run) => total + (of(run) ?? 0), 0);
  const cached = sum(({ usage }) => usage.cachedTokens);
  const read = sum(({ usage }) => usage.promptTokens);
  return (
    <div class="mlxnb-foot">
      <Metrics
        items={[
          ["tokens sampled", whole(tree.sampled)],
          ["shown once", whole(tree.size)],
          ["prompt tokens", read ? `${whole(read)}${cached ? `, ${whole(cached)} from the cache` : ""}` : null],
          ["continued", loom.rows.some(({ kind }) => kind === "more") ? plural(loom.rows.filter(({ kind }) => kind === "more").length, "row") : null],
          ["seed", seeds.length > 1 ? (row ? `${seeds[0]} to ${seeds.at(-1)}` : "drawn for each sample") : (seeds[0] ?? null)],
        ]}
      />
    </div>
  );
}

register("loom", LoomView);
