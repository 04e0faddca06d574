/** The engine now, in figures: what leads, every row, the memory. */

import { bytes, duration, plural, speed } from "./format";
import { memoryOf, type History, type Snapshot } from "./monitor_data";
import type { Act } from "./more";
import { Button, State } from "./parts";

/** 68.0, 205: never more digits than mean something. */
export const round = (value: number): string => (value >= 100 ? value.toFixed(0) : value.toFixed(1));

/** "324" beside "512 MB"; with its own unit where that differs. */
function sameUnit(used: number, limit: number): string {
  const [figure, unit] = bytes(used).split("\u2009");
  return unit === bytes(limit).split("\u2009")[1] ? figure! : bytes(used);
}

export function Figures({ history, now }: { history: History; now: Snapshot }) {
  const last = history.samples.at(-1);
  const memory = memoryOf(now);
  const oldest = history.waits.filter((wait) => wait.to === null).reduce((most, wait) => Math.max(most, now.t - wait.from), 0);
  const items: [string, string, string, string, number | null][] = [];
  if (last?.tokensPerS != null)
    items.push(["tokens/s", round(last.tokensPerS), "", now.rows ? `${speed(last.tokensPerS / now.rows)} a row` : "", null]);
  items.push(["batch fill", String(now.rows), now.maxRows ? `of ${now.maxRows}` : "rows", "", now.maxRows ? now.rows / now.maxRows : null]);
  if (last?.forwardsPerS != null)
    items.push(["forwards/s", round(last.forwardsPerS), "", last.forwardsPerS > 0 ? `${duration(1 / last.forwardsPerS)} each` : "", null]);
  if (last?.perForward != null) items.push(["tokens per forward", last.perForward.toFixed(1), "", "1.0 if run one by one", null]);
  items.push(["queue", String(now.queue), "waiting", oldest >= 1 ? `oldest ${duration(oldest)}` : "", null]);
  if (memory)
    items.push([
      "memory",
      memory.limit ? sameUnit(memory.used, memory.limit) : bytes(memory.used),
      memory.limit ? `of ${bytes(memory.limit)}` : "",
      "",
      memory.limit ? memory.used / memory.limit : null,
    ]);
  return (
    <dl class="mlxnb-mon-figs" style={`--n: ${items.length}`}>
      {items.map(([name, figure, unit, below, share]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            <b>
              {figure} {unit && <small>{unit}</small>}
            </b>
            {share === null ? (
              below || "\u00a0"
            ) : (
              <span class="mlxnb-meter" aria-hidden="true">
                <span style={`width: ${Math.min(100, 100 * share)}%`} />
              </span>
            )}
          </dd>
        </div>
      ))}
    </dl>
  );
}

export function Rows({ history, now, act, live }: { history: History; now: Snapshot; act: Act; live: boolean }) {
  const most = Math.max(1, ...now.slots!.map((slot) => slot.kv ?? 0));
  const busy = act.busy !== null;
  return (
    <>
      <div class="mlxnb-mon-h">
        <b>Rows</b>
        <span>in slot order; a cell can hold several</span>
      </div>
      <div class="mlxnb-scroll">
        <table class="mlxnb-table mlxnb-nowrap">
          <thead>
            <tr>
              <th scope="col" class="mlxnb-num">slot</th>
              <th scope="col">cell</th>
              <th scope="col">state</th>
              <th scope="col" class="mlxnb-num">tokens</th>
              <th scope="col" class="mlxnb-num">tok/s</th>
              <th scope="col" class="mlxnb-num">K/V</th>
              <th scope="col">
                <span class="mlxnb-sr">share</span>
              </th>
              <th scope="col">codec</th>
              <th scope="col">prompt</th>
              <th scope="col">
                <span class="mlxnb-sr">stop</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {now.slots!.map((slot) => {
              const rate = history.rates.get(slot.id);
              return (
                <tr key={slot.id}>
                  <td class="mlxnb-num">{slot.slot + 1}</td>
                  <td>
                    <b dir="auto">{slot.label}</b>
                  </td>
                  <td>
                    <State tone="live">{slot.phase === "prefill" ? "reading the prompt" : "streaming"}</State>
                  </td>
                  <td class="mlxnb-num">{slot.tokens}</td>
                  <td class="mlxnb-num">{rate === undefined ? "" : round(rate)}</td>
                  <td class="mlxnb-num">{slot.kv === null ? "" : bytes(slot.kv)}</td>
                  <td class="mlxnb-mon-share">
                    {slot.kv !== null && (
                      <span class="mlxnb-meter" aria-hidden="true">
                        <span style={`width: ${(100 * slot.kv) / most}%`} />
                      </span>
                    )}
                  </td>
                  <td>{slot.codec}</td>
                  <td class="mlxnb-2">
                    {slot.prompt === null ? "" : slot.cached ? `${slot.cached} of ${slot.prompt} cached` : plural(slot.prompt, "token")}
                  </td>
                  <td class="mlxnb-num">
                    {live && (
                      <Button
                        kind="quiet"
                        icon="stop"
                        label={`Stop ${slot.label}`}
                        disabled={busy}
                        onClick={() => void act.send("monitor.stop", { id: slot.id })}
                      />
                    )}
                  </td>
                </tr>
              );
            })}
            {now.waiting.map((wait) => (
              <tr key={wait.id}>
                <td class="mlxnb-num mlxnb-2">queue</td>
                <td>
                  <b dir="auto">{wait.label}</b>
                </td>
                <td colSpan={7}>
                  <State tone="quiet" icon="wait">
                    {wait.why || "waiting"}
                  </State>
                </td>
                <td class="mlxnb-num">
                  {live && (
                    <Button
                      kind="quiet"
                      icon="cross"
                      label={`Cancel ${wait.label}`}
                      disabled={busy}
                      onClick={() => void act.send("monitor.stop", { id: wait.id })}
                    />
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

export function Memory({ now }: { now: Snapshot }) {
  const memory = memoryOf(now);
  if (!memory || memory.parts.length === 0) return null;
  const words = memory.parts.map((part) => `${part.name} ${bytes(part.bytes)}`).join(", ");
  return (
    <>
      <div class="mlxnb-mon-h">
        <b>Memory</b>
        <span>
          {bytes(memory.used)}
          {memory.limit && ` of ${bytes(memory.limit)}`}
        </span>
      </div>
      <div class="mlxnb-mon-memory">
        <div class="mlxnb-mon-mem" role="img" aria-label={`Memory: ${words}`}>
          {memory.parts.map((part) => (
            <span key={part.kind} class={`mlxnb-f-${part.kind}`} style={`flex: ${part.bytes} 1 0`} />
          ))}
        </div>
        <ul class="mlxnb-mon-key">
          {memory.parts.map((part) => (
            <li key={part.kind}>
              <i class={`mlxnb-f-${part.kind}`} aria-hidden="true" />
              {part.name} <b>{bytes(part.bytes)}</b>
            </li>
          ))}
        </ul>
      </div>
    </>
  );
}
