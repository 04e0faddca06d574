/** The slots over time: a bar per row, a thin line behind the bars where the last row moved into a freed slot. */

import { bytes, duration } from "./format";
import { placed, type History, type Lane, type Snapshot, type Span } from "./monitor_data";
import { Mark } from "./more";
import { Icon } from "./parts";

const LANE_PX = 27;
const LABEL_FROM_PERCENT = 5;
/** More bars than this are not stops of the Tab key: the table below says the same in fewer. */
const MAX_STOPS = 32;
const WORDS: Readonly<Record<Span["how"], string>> = {
  running: "running",
  moved: "moved on",
  done: "done",
  stopped: "stopped",
  failed: "failed",
  ended: "ended",
};

export function Lanes({ history, lanes, now, window }: { history: History; lanes: readonly Lane[]; now: Snapshot; window: number }) {
  if (lanes.length === 0) {
    return now.slots === null ? <p class="mlxnb-mon-untold">This engine does not tell its rows one by one.</p> : null;
  }
  const since = now.t - window;
  const stops = lanes.reduce((sum, lane) => sum + lane.spans.length, 0) <= MAX_STOPS;
  const waits = history.waits.filter((wait) => wait.to === null || wait.to > since);
  return (
    <>
      <ul class="mlxnb-mon-legend">
        <li>
          <i class="mlxnb-mon-k-read mlxnb-o-prompt" aria-hidden="true" />
          reading the prompt
        </li>
        <li>
          <i class="mlxnb-mon-k-run" aria-hidden="true" />
          running
        </li>
        <li>
          <i class="mlxnb-mon-k-end" aria-hidden="true" />
          ended: <Icon name="check" /> done, <Icon name="stop" /> stopped
        </li>
        <li>
          <i class="mlxnb-mon-k-wait" aria-hidden="true" />
          waiting
        </li>
        <li>
          <i class="mlxnb-mon-k-move" aria-hidden="true" />
          <Mark name="up" /> the last row moves into a freed slot
        </li>
      </ul>
      {lanes.map((lane) => (
        <div key={lane.slot} class="mlxnb-mon-line">
          <div class="mlxnb-mon-l">slot {lane.slot + 1}</div>
          <div class={`mlxnb-mon-lane${lane.slot === 0 ? " mlxnb-mon-first" : ""}`}>
            {history.moves
              .filter((move) => move.to === lane.slot && move.t > since && move.from > move.to)
              .map((move) => (
                <b
                  key={`${move.id}${move.t}`}
                  class="mlxnb-mon-move"
                  title={`${move.label} moved from slot ${move.from + 1} to slot ${move.to + 1}`}
                  style={`left: ${placed(move.t, move.t, now.t, window).left}%; height: ${(move.from - move.to) * LANE_PX}px`}
                />
              ))}
            {lane.spans.map((span) => (
              <Bar key={`${span.id}${span.from}`} span={span} now={now} window={window} stop={stops} />
            ))}
          </div>
          <div class="mlxnb-mon-r">
            {lane.slotNow ? (
              <>
                {lane.slotNow.kv !== null && <b>{bytes(lane.slotNow.kv)}</b>} {lane.slotNow.codec}
              </>
            ) : (
              "free"
            )}
          </div>
        </div>
      ))}
      {waits.length > 0 && (
        <div class="mlxnb-mon-line">
          <div class="mlxnb-mon-l">queue</div>
          <div class="mlxnb-mon-lane">
            {waits.map((wait) => {
              const { left, width } = placed(wait.from, wait.to, now.t, window);
              return (
                <span
                  key={`${wait.id}${wait.from}`}
                  class="mlxnb-mon-wait"
                  title={`${wait.label}: waiting`}
                  style={`left: ${left}%; width: ${width}%`}
                />
              );
            })}
            <WaitNames waits={waits.filter((wait) => wait.to === null)} now={now} window={window} />
          </div>
          <div class="mlxnb-mon-r">
            {now.waiting.length ? (
              <>
                <b>{now.waiting.length}</b> waiting
              </>
            ) : (
              "empty"
            )}
          </div>
        </div>
      )}
    </>
  );
}

function WaitNames({ waits, now, window }: { waits: History["waits"]; now: Snapshot; window: number }) {
  if (!waits.length) return null;
  const { left } = placed(Math.min(...waits.map((wait) => wait.from)), null, now.t, window);
  if (100 - left < LABEL_FROM_PERCENT) return null;
  return (
    <em class="mlxnb-mon-names" style={`left: ${left}%`}>
      {waits.map((wait) => wait.label).join(" ")}
    </em>
  );
}

function Bar({ span, now, window, stop }: { span: Span; now: Snapshot; window: number; stop: boolean }) {
  const { left, width } = placed(span.from, span.to, now.t, window);
  const end = span.to ?? now.t;
  const shownFrom = Math.max(span.from, now.t - window);
  const read = end > shownFrom ? Math.max(0, Math.min(1, (span.promptUntil - shownFrom) / (end - shownFrom))) : 0;
  const words = `${span.label}: ${WORDS[span.how]}, ${duration(end - span.from)} in slot ${span.slot + 1}`;
  const classes = [span.to === null && "mlxnb-mon-run", span.how === "moved" && "mlxnb-mon-cont", span.movedIn && "mlxnb-mon-in"]
    .filter(Boolean)
    .join(" ");
  return (
    <span
      class={`mlxnb-mon-bar ${classes}`}
      style={`left: ${left}%; width: ${width}%`}
      tabIndex={stop ? 0 : undefined}
      role="img"
      aria-label={words}
      title={words}
    >
      {read > 0 && <i class="mlxnb-o-prompt" style={`width: ${100 * read}%`} />}
      {span.movedIn && width > LABEL_FROM_PERCENT && <Mark name="up" />}
      <em dir="auto">{width * (1 - read) > LABEL_FROM_PERCENT ? span.label : ""}</em>
      {width > LABEL_FROM_PERCENT && (span.how === "done" || span.how === "stopped" || span.how === "failed") && (
        <Icon name={span.how === "done" ? "check" : span.how === "stopped" ? "stop" : "warn"} />
      )}
    </span>
  );
}
