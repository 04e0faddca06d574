/** One token at a time, and what each rule of the engine does to its rivals. Left to right is the order of work. */

import { useState } from "preact/hooks";

import { whole, duration } from "./format";
import type { Host } from "./host";
import { Instrument } from "./instrument";
import { register } from "./mount";
import { Mark, spoken, Switch, useAct, type Act } from "./more";
import { num, type Dict } from "./parse";
import { Bar, Button, Glyph, Grow, ModelChip, Note, Notice, OWN_KEYS, Seg, State } from "./parts";
import { DrawTable } from "./stepper_draw";
import { atWork, isOn, parseStepper, STAGE_TITLES, STAGES, SWITCHES, toggled, type Past, type StageName, type Stepper } from "./stepper_data";
import { Steps, TextSoFar } from "./stepper_past";
import { remembered, StageTable, type Show } from "./stepper_table";

const AHEAD = 10;

export function StepperView({ host }: { host: Host }) {
  const act = useAct(host);
  const stepper = parseStepper(host.record.value);
  if (!stepper) return <Notice text="This output has no stepper data." />;
  return <Body stepper={stepper} act={act} live={host.live} />;
}

function Body({ stepper, act, live }: { stepper: Stepper; act: Act; live: boolean }) {
  const [show, setShow] = useState<Show>("probability");
  const [keep, setKeep] = useState(true);
  const step = stepper.step && atWork(stepper.step, stepper.settings);
  const can = live && act.busy === null;
  const made = stepper.past.filter((token) => token.how !== "prompt");
  const undo = () => can && made.length > 0 && void act.send("stepper.undo", { count: 1 });
  const onKey = (event: KeyboardEvent) => {
    if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Backspace") undo();
    else if (event.key === "ArrowRight" && step && can) void act.send("stepper.step", { count: 1 });
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <Instrument label="Stepper">
      <div class="mlxnb-stp-view" onKeyDown={onKey} {...OWN_KEYS}>
        <Head stepper={stepper} act={act} can={can} undo={undo} made={made.length} />
        <Words stepper={stepper} act={act} />
        {(stepper.past.length > 0 || step) && <TextSoFar past={stepper.past} next={step ? step.position + 1 : null} />}
        {step && (
          <>
            <Tools
              past={stepper.past}
              show={show}
              setShow={setShow}
              keep={keep}
              setKeep={setKeep}
              settings={stepper.settings}
              dropped={step.candidates.some(({ kept }) => !kept)}
              can={can}
              act={act}
            />
            <StageTable step={step} settings={stepper.settings} show={show} keep={keep} act={act} can={can} />
            <DrawTable step={step} temp={num(stepper.settings.temp) ?? 0} seed={String(stepper.settings.seed ?? "")} />
            <Hint live={live} />
          </>
        )}
        {made.length > 0 && <Steps past={stepper.past} act={act} can={can} />}
      </div>
    </Instrument>
  );
}

function Head({ stepper, act, can, undo, made }: { stepper: Stepper; act: Act; can: boolean; undo: () => void; made: number }) {
  const { step } = stepper;
  const chosen = step?.candidates.find((candidate) => candidate.id === step.chosen);
  return (
    <Bar>
      <span class="mlxnb-title">Stepper</span>
      <span class="mlxnb-sep" />
      <StateOf stepper={stepper} busy={act.busy !== null} />
      <Grow />
      {stepper.model && <ModelChip name={stepper.model} />}
      <Button icon="undo" onClick={undo} disabled={!can || made === 0}>
        Undo <kbd class="mlxnb-kbd">⌫</kbd>
      </Button>
      {step && (
        <>
          <Button icon="play" disabled={!can} onClick={() => void act.send("stepper.step", { count: AHEAD })}>
            Step {AHEAD}
          </Button>
          <Button icon="play" kind="primary" disabled={!can} onClick={() => void act.send("stepper.step", { count: 1 })}>
            {chosen ? (
              <>
                Step: <span class="mlxnb-stp-word">{spoken(chosen.text)}</span>
              </>
            ) : (
              "Step"
            )}
          </Button>
        </>
      )}
    </Bar>
  );
}

function StateOf({ stepper, busy }: { stepper: Stepper; busy: boolean }) {
  const { status, step, finish } = stepper;
  if (status === "failed")
    return (
      <State tone="err" icon="warn">
        failed
      </State>
    );
  if (status === "done")
    return (
      <State tone="quiet" icon="check">
        {finish === "length" ? "at its length" : "the model ended here"}
      </State>
    );
  if (status === "waiting")
    return (
      <State tone="quiet" icon="wait">
        waiting for the engine
      </State>
    );
  if (status === "loading") return <State tone="live">loading the model</State>;
  if (busy || status === "working") return <State tone="live">one forward…</State>;
  return (
    <span class="mlxnb-state">
      <Mark name="hand" /> your turn{step?.seconds != null && ` · ${duration(step.seconds)}`}
    </span>
  );
}

function Tools(props: {
  past: readonly Past[];
  show: Show;
  setShow: (show: Show) => void;
  keep: boolean;
  setKeep: (keep: boolean) => void;
  settings: Dict;
  dropped: boolean;
  can: boolean;
  act: Act;
}) {
  const count = (how: Past["how"]) => props.past.filter((token) => token.how === how).length;
  const off = STAGES.filter((stage) => SWITCHES[stage] && !isOn(props.settings, stage));
  const greedy = !isOn(props.settings, "temperature");
  const idle = (stage: StageName) => greedy && stage !== "temperature" && stage !== "penalties";
  return (
    <div class="mlxnb-tools">
      <div class="mlxnb-counts">
        {count("prompt") > 0 && (
          <span>
            <Glyph of="prompt" />
            prompt <b>{whole(count("prompt"))}</b>
          </span>
        )}
        <span>
          <Glyph of="sampled" />
          drawn <b>{whole(count("drawn"))}</b>
        </span>
        <span>
          <i class="mlxnb-g mlxnb-o-hand" aria-hidden="true" />
          by hand <b>{whole(count("hand"))}</b>
        </span>
      </div>
      {off.length > 0 && (
        <span class="mlxnb-stp-off">
          Off:
          {off.map((stage) => (
            <Switch
              key={stage}
              on={false}
              label={`Turn ${STAGE_TITLES[stage]} on`}
              disabled={!props.can || idle(stage)}
              title={idle(stage) ? "Temperature 0 takes the likeliest: no filter applies" : `Turn ${STAGE_TITLES[stage]} on`}
              onChange={() => void props.act.send("stepper.set", { settings: toggled(props.settings, stage, remembered.get(stage) ?? {}) })}
            >
              {STAGE_TITLES[stage]}
            </Switch>
          ))}
        </span>
      )}
      <Grow />
      <Seg
        label="Show"
        value={props.show}
        options={[
          ["probability", "Probability"],
          ["score", "Score"],
        ]}
        onChange={props.setShow}
      />
      {props.dropped && (
        <Switch on={props.keep} label="Show dropped" title="Keep in view what the rules drop" onChange={() => props.setKeep(!props.keep)} />
      )}
    </div>
  );
}

function Hint({ live }: { live: boolean }) {
  return (
    <div class="mlxnb-note">
      <Mark name="hand" />
      <span class="mlxnb-grow">
        {live ? (
          <>
            Click a token to choose it by hand, or press <kbd class="mlxnb-kbd">↑</kbd> <kbd class="mlxnb-kbd">↓</kbd> <kbd class="mlxnb-kbd">↵</kbd>;{" "}
            <kbd class="mlxnb-kbd">→</kbd> takes the drawn one. Dropped tokens can be chosen too: the rules bind the draw, not you.
          </>
        ) : (
          "This stepper is saved: run its cell again to go on from here."
        )}
      </span>
    </div>
  );
}

/** What went wrong, at the top, where the buttons are. */
function Words({ stepper, act }: { stepper: Stepper; act: Act }) {
  return (
    <>
      {stepper.error && <Note tone="err" title={stepper.error.message} hint={stepper.error.hint} />}
      {act.error && (
        <Note tone="err" title="Not done.">
          {act.error}{" "}
          <Button kind="quiet" onClick={act.dismiss}>
            Dismiss
          </Button>
        </Note>
      )}
    </>
  );
}

register("stepper", StepperView);
