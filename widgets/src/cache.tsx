/** The CacheMap: which chats and cells share which blocks of state, where they lie, and what that saved. */

import { useComputed } from "@preact/signals";
import { useState } from "preact/hooks";

import { BLOCK_TOKENS, parseCache, sharing, shareOf, type CacheMap } from "./cache_data";
import { Lanes } from "./cache_lanes";
import { bytes, plural, whole } from "./format";
import type { Host } from "./host";
import { register } from "./mount";
import { useAct } from "./more";
import { Bar, Button, Chip, Grow, Icon, ModelChip, Note, Notice, State, tabPanel, Tabs, usePrefix } from "./parts";
import { TreeFrame } from "./tree_frame";

const TABS = [
  ["tree", "Tree"],
  ["users", "Chats and cells"],
  ["gone", "Evictions"],
] as const;
type Tab = (typeof TABS)[number][0];

export function CacheView({ host }: { host: Host }) {
  const map = useComputed(() => parseCache(host.record.value)).value;
  const [tab, setTab] = useState<Tab>("tree");
  const prefix = usePrefix();
  const act = useAct(host);
  if (!map) return <Notice text="This output has no cache map." />;
  const refresh = () =>
    void host.command("snapshot").then(
      (told) => {
        const record = (told as { record?: unknown } | null)?.record;
        if (parseCache(record)) host.record.value = record;
      },
      () => void act.send("snapshot"), // says why not
    );
  return (
    <TreeFrame label="Cache map">
      <Bar>
        <span class="mlxnb-title">Cache map</span>
        <span class="mlxnb-sep" />
        <Tabs label="Part of the cache map" prefix={prefix} value={tab} options={TABS} onChange={setTab} />
        <Grow />
        {map.models.length === 1 ? <ModelChip name={map.models[0]!} /> : map.models.length > 0 && <Chip text={plural(map.models.length, "model")} />}
        <StateOf map={map} live={host.live} />
        {host.live && <Button kind="quiet" icon="redo" label="Look again" onClick={refresh} />}
      </Bar>
      {act.error && (
        <Note tone="err" title="Not done.">
          {act.error}
        </Note>
      )}
      <div {...tabPanel(prefix, tab)}>
        {map.state !== "ready" || (map.ram.blocks === 0 && map.ram.tails === 0 && map.gone.length === 0) ? (
          <p class="mlxnb-lm-none">{nothing(map)}</p>
        ) : tab === "tree" ? (
          <>
            <Figures map={map} />
            <Lanes map={map} host={host} />
          </>
        ) : tab === "users" ? (
          <Users map={map} />
        ) : (
          <Evictions map={map} live={host.live} />
        )}
      </div>
    </TreeFrame>
  );
}

const nothing = (map: CacheMap): string =>
  map.state === "off"
    ? "The prefix cache is off: every prompt is read as a whole. Set prefix_cache_bytes to keep what was read."
    : map.state === "not started"
      ? "No engine is running. It starts with the first prompt; what it reads is kept here."
      : `No blocks yet. Run a %%mlx cell: what it reads is kept here in blocks of ${BLOCK_TOKENS} tokens, and the next cell that starts the same way skips it.`;

function StateOf({ map, live }: { map: CacheMap; live: boolean }) {
  const { ram } = map;
  const blocks = plural(ram.blocks, "block");
  if (!live)
    return (
      <State tone="quiet" icon="pin">
        saved · {blocks}
      </State>
    );
  if (map.state !== "ready") return <State tone="quiet">{map.state}</State>;
  if (ram.budget > 0 && ram.leased >= 0.95 * ram.budget)
    return (
      <State tone="warn" icon="warn">
        full of leased blocks
      </State>
    );
  return ram.leased > 0 ? <State tone="live">live · {bytes(ram.leased)} in use</State> : <State tone="quiet">{blocks}</State>;
}

function Figures({ map }: { map: CacheMap }) {
  const { ram, disk, counts } = map;
  const shared = sharing(map.edges);
  const part = (share: number, label: string) => (
    <span class="mlxnb-meter" role="img" aria-label={`${Math.round(100 * share)} % ${label}`}>
      <span style={`width: ${(100 * share).toFixed(1)}%`} />
    </span>
  );
  const hit = shareOf(counts.hitTokens, counts.askedTokens);
  return (
    <dl class="mlxnb-cm-figs">
      <div>
        <dd>
          <b>{bytes(ram.used)}</b> of {bytes(ram.budget)} RAM
        </dd>
        <dt>
          {plural(ram.blocks, "block")}
          {ram.tails > 0 && `, ${plural(ram.tails, "part-filled one")}`}
        </dt>
        {part(shareOf(ram.used, ram.budget), "of the RAM budget")}
      </div>
      {disk && (
        <div>
          <dd>
            <b>{bytes(disk.used)}</b> {disk.budget !== null && `of ${bytes(disk.budget)} `}SSD
          </dd>
          <dt>
            {plural(disk.records ?? 0, "block")}
            {disk.pending > 0 && `, ${bytes(disk.pending)} on their way`}
          </dt>
          {disk.budget !== null && part(shareOf(disk.used, disk.budget), "of the SSD budget")}
        </div>
      )}
      <div>
        <dd>
          <b>{Math.round(100 * hit)} %</b> from the cache
        </dd>
        <dt>
          {whole(counts.hitTokens)} of {whole(counts.askedTokens)} prompt tokens
        </dt>
        {part(hit, "of the prompt tokens came from the cache")}
      </div>
      <div>
        <dd>
          {shared ? (
            <>
              <b>{shared.factor.toFixed(1)}×</b> by sharing
            </>
          ) : (
            <>
              <b>{whole(counts.evictions)}</b> evicted
            </>
          )}
        </dd>
        <dt>{shared ? `${bytes(shared.saved)} not kept twice` : `${whole(counts.hits)} hits, ${whole(counts.misses)} misses`}</dt>
      </div>
    </dl>
  );
}

function Users({ map }: { map: CacheMap }) {
  if (map.users.length === 0) return <p class="mlxnb-lm-none">No chat or cell has put its name to a block.</p>;
  return (
    <div class="mlxnb-scroll">
      <table class="mlxnb-table">
        <thead>
          <tr>
            <th scope="col">Chat or cell</th>
            <th scope="col" class="mlxnb-num">
              Shared
            </th>
            <th scope="col" class="mlxnb-num">
              Only here
            </th>
            <th scope="col" class="mlxnb-num">
              Blocks
            </th>
            <th scope="col">On the SSD too</th>
          </tr>
        </thead>
        <tbody>
          {map.users.map((user) => (
            <tr key={user.name}>
              <td>
                <b dir="auto">{user.name}</b>
              </td>
              <td class="mlxnb-num">{bytes(user.shared)}</td>
              <td class="mlxnb-num">{bytes(user.own)}</td>
              <td class="mlxnb-num">{whole(user.blocks)}</td>
              <td class="mlxnb-2">{user.stored === 0 ? "none" : user.stored >= user.blocks ? "all" : plural(user.stored, "block")}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <Note icon="pin">“Only here” is what nobody else uses. What leaves the RAM is read from the SSD if it is there, and computed anew if not: never lost, only slower.</Note>
    </div>
  );
}

function Evictions({ map, live }: { map: CacheMap; live: boolean }) {
  const { counts, ram } = map;
  return (
    <>
      <p class="mlxnb-cm-sum">
        <b>{plural(counts.evictions, "block")}</b> left the RAM since the engine started, the least recently used ones first
        {counts.spilled > 0 && (
          <>
            ; <b>{whole(counts.spilled)}</b> were written to the SSD
          </>
        )}
        {counts.refused > 0 && (
          <>
            ; <b>{whole(counts.refused)}</b> found no room
          </>
        )}
        .
      </p>
      {map.gone.length > 0 ? (
        <div class="mlxnb-scroll">
          <table class="mlxnb-table">
            <thead>
              <tr>
                <th scope="col">Time</th>
                <th scope="col">Blocks</th>
                <th scope="col">Whose</th>
                <th scope="col">When needed again</th>
              </tr>
            </thead>
            <tbody>
              {map.gone.map((gone, index) => (
                <tr key={`${gone.t}${map.gone.length - index}`}>
                  <td class="mlxnb-2">{gone.t}</td>
                  <td>
                    <Icon name={gone.stored ? "moved" : "cross"} /> {plural(gone.blocks, "block")} left
                  </td>
                  <td dir="auto">{gone.users.join(", ") || "unnamed"}</td>
                  <td>{gone.stored >= gone.blocks ? "read from the SSD" : gone.stored > 0 ? `${whole(gone.stored)} read from the SSD, the rest computed` : "computed anew"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <p class="mlxnb-lm-none">{live ? "Nothing has left since this map was opened." : "Nothing had left since this map was opened."}</p>
      )}
      {ram.budget > 0 && ram.leased >= 0.95 * ram.budget && (
        <Note tone="warn" title="Nothing is left to evict.">
          Running rows hold {bytes(ram.leased)} of {bytes(ram.budget)}. What is read now is not kept until one of them ends.
        </Note>
      )}
    </>
  );
}

register("cache", CacheView);
