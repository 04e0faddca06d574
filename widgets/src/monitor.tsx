/** The engine at work: who runs in which slot, how full the batch is, how fast it goes, where the memory is. */

import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { effect } from "@preact/signals";

import { bytes, duration, plural } from "./format";
import type { Host } from "./host";
import { Instrument } from "./instrument";
import { register } from "./mount";
import { advance, columnsOf, EMPTY, lanesOf, memoryOf, parseStatus, withPast, type History, type Snapshot } from "./monitor_data";
import { Lanes } from "./monitor_lanes";
import { Plot } from "./monitor_plot";
import { Figures, Memory, round, Rows } from "./monitor_rows";
import { Mark, useAct } from "./more";
import { Bar, Button, Chip, Grow, Icon, ModelChip, Note, Seg, State, usePrefix } from "./parts";

const WINDOWS = [
  ["60", "1 min"],
  ["600", "10 min"],
  ["3600", "1 h"],
] as const;
type Window = (typeof WINDOWS)[number][0];
const NEARLY_FULL = 0.95;

export function MonitorView({ host }: { host: Host }) {
  const [history, setHistory] = useState<History>(EMPTY);
  const [window, setWindow] = useState<Window>("60");
  const [held, setHeld] = useState<History | null>(null);
  const act = useAct(host);
  // Every snapshot counts, also those that come between two frames: state is folded here and not while drawing.
  useLayoutEffect(
    () =>
      effect(() => {
        const snapshot = parseStatus(host.record.value, performance.now() / 1000);
        if (snapshot) setHistory((before) => advance(before, snapshot));
      }),
    [host],
  );
  // What was before this view was there, as after a reload of the page: the kernel keeps it.
  useEffect(() => {
    if (!host.live) return;
    host.command("history").then(
      (past) => setHistory((now) => withPast(now, past)),
      () => undefined,
    );
  }, [host]);
  const shown = held ?? history;
  const now = shown.last;
  if (!now) {
    return (
      <Instrument label="Engine monitor">
        <Bar>
          <span class="mlxnb-title">Engine</span>
          <span class="mlxnb-sep" />
          <State tone="quiet" icon="wait">
            waiting for the first news
          </State>
        </Bar>
      </Instrument>
    );
  }
  const seconds = Number(window);
  const drawn =
    now.rows > 0 ||
    now.queue > 0 ||
    shown.spans.some((span) => span.to === null || span.to > now.t - seconds) ||
    shown.samples.some((one) => (one.forwardsPerS ?? 0) > 0);
  return (
    <Instrument label="Engine monitor">
      <Bar>
        <span class="mlxnb-title">Engine</span>
        <span class="mlxnb-sep" />
        <EngineState now={now} history={shown} live={host.live} />
        <Grow />
        {now.models.length === 1 ? <ModelChip name={now.models[0]!} /> : now.models.length > 0 && <Chip text={plural(now.models.length, "model")} />}
        {drawn && <Seg label="Time shown" value={window} options={WINDOWS} onChange={setWindow} />}
        {drawn && host.live && (
          <button type="button" class="mlxnb-btn" aria-pressed={held !== null} onClick={() => setHeld(held ? null : history)}>
            {held ? <Icon name="play" /> : <Mark name="pause" />}
            {held ? "Go on" : "Pause view"}
          </button>
        )}
        {!drawn && host.live && now.models.length > 0 && now.state === "ready" && (
          <Button disabled={act.busy !== null} onClick={() => void act.send("unload")}>
            {now.models.length === 1 ? "Unload model" : "Unload models"}
          </Button>
        )}
      </Bar>
      {act.error && (
        <Note tone="err" title="Not done.">
          {act.error}
        </Note>
      )}
      {now.error && (
        <Note tone="err" title="The engine has stopped." hint="The next prompt starts a fresh one.">
          {now.error}
        </Note>
      )}
      {now.loading.map((one) => (
        <Loading key={one.name} {...one} />
      ))}
      {drawn && <Figures history={shown} now={now} />}
      {drawn && <Timeline history={shown} now={now} window={seconds} />}
      {drawn && now.slots && (now.slots.length > 0 || now.waiting.length > 0) && (
        <Rows history={shown} now={now} act={act} live={host.live && held === null} />
      )}
      <Memory now={now} />
    </Instrument>
  );
}

function EngineState({ now, history, live }: { now: Snapshot; history: History; live: boolean }) {
  const memory = memoryOf(now);
  const share = memory?.limit ? memory.used / memory.limit : 0;
  const rows = `${now.rows} running · ${now.queue} waiting`;
  if (now.state === "dead")
    return (
      <State tone="err" icon="warn">
        stopped by an error
      </State>
    );
  if (now.state === "closed")
    return (
      <State tone="quiet" icon="stop">
        closed
      </State>
    );
  if (now.state === "not started")
    return (
      <State tone="quiet" icon="wait">
        not started; the first prompt starts it
      </State>
    );
  if (!live)
    return (
      <State tone="quiet" icon="pin">
        saved · {rows}
      </State>
    );
  if (share >= NEARLY_FULL)
    return (
      <State tone="warn" icon="warn">
        memory {Math.round(100 * share)}% · {rows}
      </State>
    );
  if (now.loading.length > 0) return <State tone="live">loading</State>;
  if (now.rows || now.queue) return <State tone="live">{rows}</State>;
  const idle = history.idleSince === null ? 0 : now.t - history.idleSince;
  return (
    <State tone="quiet" icon="check">
      {idle >= 1 ? `idle for ${duration(idle)}` : "idle"}
      {now.models.length === 0 && " · no model loaded"}
    </State>
  );
}

function Loading({ name, phase, done, total }: { name: string; phase: string; done: number; total: number }) {
  const share = total > 0 ? Math.min(1, done / total) : 0;
  return (
    <div class="mlxnb-mon-load">
      <span dir="auto">{name}</span>
      <span class="mlxnb-2">
        {phase}
        {total > 0 && ` · ${bytes(done)} of ${bytes(total)}`}
      </span>
      <span class="mlxnb-meter" role="progressbar" aria-label={`${phase} ${name}`} aria-valuenow={Math.round(100 * share)}>
        <span style={`width: ${100 * share}%`} />
      </span>
    </div>
  );
}

function Timeline({ history, now, window }: { history: History; now: Snapshot; window: number }) {
  const group = usePrefix();
  const [hover, setHover] = useState<number | null>(null);
  const columns = columnsOf(history, window);
  const most = (values: readonly (number | null)[], least: number): number => values.reduce<number>((top, value) => Math.max(top, value ?? 0), least);
  const at = hover !== null && hover < columns.t.length ? hover : null;
  const read = (values: readonly (number | null)[]): number | null => values[at ?? values.length - 1] ?? null;
  const when = at === null ? "now" : `−${Math.abs(columns.t[at]!).toFixed(0)} s`;
  const plots = [
    {
      name: "batch fill",
      y: columns.rows,
      top: now.maxRows ?? most(columns.rows, 1),
      height: 46,
      stepped: true,
      text: (value: number) => `${value}${now.maxRows ? ` of ${now.maxRows}` : ""}`,
    },
    { name: "tokens/s", y: columns.tokens, top: most(columns.tokens, 1), height: 58, stepped: false, text: round },
    {
      name: "tok/forward",
      y: columns.perForward,
      top: most(columns.perForward, 1),
      height: 40,
      stepped: true,
      text: (value: number) => value.toFixed(1),
    },
  ].filter(({ y }) => y.some((value) => value !== null));
  return (
    <div class="mlxnb-mon-time">
      <Lanes history={history} lanes={lanesOf(history, window)} now={now} window={window} />
      {plots.map(({ name, y, top, height, stepped, text }) => {
        const value = read(y);
        return (
          <div key={name} class="mlxnb-mon-line">
            <div class="mlxnb-mon-l">{name}</div>
            <Plot
              data={{ t: columns.t, y }}
              {...{ window, top, height, stepped, group }}
              label={`${name} over the last ${duration(window)}, ${value === null ? "unknown" : `${text(value)} ${when}`}`}
              onHover={setHover}
            />
            <div class="mlxnb-mon-r">
              <b>{value === null ? "–" : text(value)}</b> {when}
            </div>
          </div>
        );
      })}
      <div class="mlxnb-mon-line" aria-hidden="true">
        <div />
        <div class="mlxnb-mon-axis">
          {[6, 5, 4, 3, 2, 1, 0].map((part) => (
            <span key={part}>{part === 0 ? "now" : tick((window * part) / 6, part === 6)}</span>
          ))}
        </div>
        <div />
      </div>
    </div>
  );
}

const tick = (seconds: number, first: boolean): string =>
  seconds >= 120 ? `−${Math.round(seconds / 60)}${first ? " min" : ""}` : `−${Math.round(seconds)}${first ? " s" : ""}`;

register("monitor", MonitorView);
