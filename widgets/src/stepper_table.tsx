/** The rivals of one token as a table: a column per rule in the engine's order, what a rule dropped struck out where it fell. */

import { useRef } from "preact/hooks";

import { plural, probability, whole } from "./format";
import { Mark, spoken, Switch, TokenText, type Act } from "./more";
import { num, type Dict } from "./parse";
import { Icon } from "./parts";
import {
  cellOf,
  fate,
  restAt,
  scoreAt,
  STAGE_TITLES,
  SWITCHES,
  toggled,
  type Candidate,
  type Stage,
  type StageName,
  type Step,
} from "./stepper_data";

export type Show = "probability" | "score";
export const DROP_WORDS: Readonly<Record<string, string>> = { top_p: "top-p", min_p: "min-p", xtc: "XTC", top_k: "top-k" };

/** Values a rule had before it was switched off, for switching it on again. Per page: a convenience, no state of the run. */
export const remembered = new Map<StageName, Dict>();

export function StageTable({
  step,
  settings,
  show,
  keep,
  act,
  can,
}: {
  step: Step;
  settings: Dict;
  show: Show;
  keep: boolean;
  act: Act;
  can: boolean;
}) {
  const shown = step.candidates.filter((candidate) => keep || candidate.kept || candidate.id === step.chosen);
  const rest = step.stages.map((_, index) => restAt(step, index));
  const body = useRef<HTMLTableSectionElement>(null);
  const onKey = (event: KeyboardEvent) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    const picks = [...(body.current?.querySelectorAll<HTMLButtonElement>(".mlxnb-stp-pick:not([disabled])") ?? [])];
    const now = picks.indexOf(document.activeElement as HTMLButtonElement);
    const root = body.current?.getRootNode();
    const at = now >= 0 ? now : picks.indexOf((root instanceof ShadowRoot ? root.activeElement : null) as HTMLButtonElement);
    picks[Math.min(picks.length - 1, Math.max(0, at + move))]?.focus();
    event.preventDefault();
    event.stopPropagation();
  };
  const top = Math.max(...shown.flatMap((candidate) => step.stages.map((_, index) => cellOf(step, candidate, index).value ?? 0)), 1e-9);
  const toggle = (stage: StageName) => {
    const before = Object.fromEntries(
      Object.keys(SWITCHES[stage]?.off ?? {}).flatMap((name) => (settings[name] == null ? [] : [[name, settings[name]]])),
    );
    remembered.set(stage, before);
    void act.send("stepper.set", { settings: toggled(settings, stage, {}) });
  };
  return (
    <div class="mlxnb-scroll">
      <table class="mlxnb-stp" style={`min-width: ${136 + 98 * step.stages.length}px; max-width: ${136 + 260 * step.stages.length}px`}>
        <caption class="mlxnb-sr">Rivals for token {step.position + 1}, likeliest first, after each rule of the engine in its order</caption>
        <thead>
          <tr>
            <th scope="col" class="mlxnb-stp-tokcol">
              <b>Token</b>
              <small>
                {shown.length} best{step.vocab ? ` of ${whole(step.vocab)}` : ""}
              </small>
              <small>␣ is a space</small>
            </th>
            {step.stages.map((stage, index) => (
              <StageHead key={stage.name} stage={stage} first={index === 0} show={show} can={can} toggle={toggle} />
            ))}
          </tr>
        </thead>
        <tbody ref={body} onKeyDown={onKey}>
          {shown.map((candidate) => (
            <Row key={candidate.id} candidate={candidate} step={step} settings={settings} show={show} top={top} can={can} act={act} />
          ))}
          {rest.some(({ count }) => count !== 0) && (
            <tr class="mlxnb-stp-rest">
              <td>{rest[0]!.count === null ? "the others" : `${whole(rest[0]!.count)} more`}</td>
              {rest.map(({ count, mass }, index) => (
                <td key={index}>
                  {count === 0 ? "none left" : mass === null || show === "score" ? (count === null ? "" : `${whole(count)} left`) : probability(mass)}
                </td>
              ))}
            </tr>
          )}
        </tbody>
      </table>
    </div>
  );
}

function StageHead({
  stage,
  first,
  show,
  can,
  toggle,
}: {
  stage: Stage;
  first: boolean;
  show: Show;
  can: boolean;
  toggle: (stage: StageName) => void;
}) {
  const title = STAGE_TITLES[stage.name];
  const score = { model: "logit", penalties: "logit after rules", temperature: "log p ÷ T" }[stage.name as string] ?? "log p";
  return (
    <th scope="col">
      <b>{first ? title : `→ ${title}`}</b>
      <small class="mlxnb-mono" title={stage.rule}>
        {(show === "score" ? score : stage.rule) || " "}
      </small>
      <small>{stage.left === null ? " " : `${whole(stage.left)} left`}</small>
      {SWITCHES[stage.name] ? (
        <Switch
          on
          label={`${title} on`}
          disabled={!can}
          title={`Turn ${title} off and look at the same token again`}
          onChange={() => toggle(stage.name)}
        >
          on
        </Switch>
      ) : (
        <small class="mlxnb-stp-tick">tick = before</small>
      )}
    </th>
  );
}

function Row(props: { candidate: Candidate; step: Step; settings: Dict; show: Show; top: number; can: boolean; act: Act }) {
  const { candidate, step, show, top, can, act } = props;
  const drawn = candidate.id === step.chosen;
  const gone = candidate.droppedBy;
  const word = spoken(candidate.text);
  const title = drawn ? `${word}: drawn. Choose it` : gone ? `${word}: dropped by ${DROP_WORDS[gone]}. Choose it anyway` : `Choose ${word} by hand`;
  return (
    <tr class={[drawn && "mlxnb-stp-drawn", gone && "mlxnb-stp-gone"].filter(Boolean).join(" ")}>
      <td>
        <button
          type="button"
          class="mlxnb-stp-pick"
          title={title}
          aria-label={title}
          disabled={!can}
          onClick={() => void act.send("stepper.choose", { id: candidate.id })}
        >
          {drawn ? (
            <Icon name="play" />
          ) : gone ? (
            <Icon name="mask" />
          ) : (
            <span class="mlxnb-stp-hand">
              <Mark name="hand" />
            </span>
          )}
          <span class="mlxnb-stp-tok">
            <TokenText text={candidate.text} />
          </span>
        </button>
      </td>
      {step.stages.map((stage, index) => (
        <Figure
          key={stage.name}
          cell={cellOf(step, candidate, index)}
          stage={stage}
          last={index === step.stages.length - 1}
          {...{ candidate, show, top }}
          temp={num(props.settings.temp) ?? 0}
        />
      ))}
    </tr>
  );
}

function Figure(props: {
  cell: ReturnType<typeof cellOf>;
  stage: Stage;
  candidate: Candidate;
  show: Show;
  top: number;
  last: boolean;
  temp: number;
}) {
  const { cell, stage, candidate, show, top } = props;
  if (fate(candidate, stage.name) === "gone")
    return (
      <td>
        <span class="mlxnb-sr">dropped before</span>
      </td>
    );
  const score = scoreAt(candidate, stage, props.temp);
  const text = show === "score" ? (score === null ? "–" : score.toFixed(2)) : cell.value === null ? "–" : probability(cell.value);
  const width = cell.value === null ? 0 : (100 * cell.value) / top;
  if (cell.state === "out") {
    return (
      <td class="mlxnb-stp-cut">
        <span class="mlxnb-stp-v">
          <s>{text}</s>
          <small>
            <Icon name="mask" /> out
          </small>
        </span>
        <span class="mlxnb-stp-bar" aria-hidden="true">
          <i style={`width: ${width}%`} />
        </span>
      </td>
    );
  }
  const delta = cell.value !== null && cell.before !== null ? cell.value - cell.before : 0;
  const seen = stage.name === "penalties" && candidate.seen > 0;
  return (
    <td>
      <span class="mlxnb-stp-v">
        {props.last ? <b>{text}</b> : <span>{text}</span>}
        {seen ? (
          <small title={`Seen ${plural(candidate.seen, "time")} in the tokens the rule looks at`}>
            <Mark name="down" />
            seen
          </small>
        ) : (
          show === "probability" &&
          Math.abs(delta) >= 0.03 && (
            <small title={`before ${probability(cell.before!)}`}>
              <Mark name={delta > 0 ? "up" : "down"} />
              {probability(Math.abs(delta))}
            </small>
          )
        )}
      </span>
      <span class="mlxnb-stp-bar" aria-hidden="true">
        <i style={`width: ${width}%`} />
        {cell.before !== null && Math.abs(delta) > 0.004 && <u style={`left: ${(100 * cell.before) / top}%`} />}
      </span>
    </td>
  );
}
