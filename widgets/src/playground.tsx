/** A prompt with sliders: change one, and the run answers again in the shared batch. Says what a change costs before it runs. */

import { useEffect, useRef, useState } from "preact/hooks";

import { Answer } from "./answer";
import { RunFoot } from "./foot";
import { duration, plural, whole } from "./format";
import type { Host } from "./host";
import { Instrument } from "./instrument";
import { register } from "./mount";
import { TokenInspector } from "./inspector";
import { Switch, useAct, useCopied, type Act } from "./more";
import { Announce, Bar, Button, Grow, ModelChip, Note, Notice, Progress, State, tabPanel, Tabs, usePrefix } from "./parts";
import {
  changedNames,
  costOf,
  DEBOUNCE_MS,
  figure,
  chosenSettings,
  KNOBS,
  MAX_TOKENS,
  parsePlayground,
  typed,
  type Asked,
  type Knob,
  type Playground,
  type Settings,
} from "./playground_data";
import { progressOf, RunState } from "./state";

type Tab = "answer" | "tokens";

export function PlaygroundView({ host }: { host: Host }) {
  const data = parsePlayground(host.record.value);
  return data ? <Body data={data} host={host} /> : <Notice text="This output has no playground." />;
}

function Body({ data, host }: { data: Playground; host: Host }) {
  const act = useAct(host);
  const prefix = usePrefix();
  const [tab, setTab] = useState<Tab>("answer");
  const [now, setNow] = useState<Asked>({ prompt: data.prompt, settings: data.settings });
  const [auto, setAuto] = useState(true);
  const asked = useRef<Asked | null>(data.run ? now : null);
  const changed = changedNames(asked.current, now);
  const ready = host.live && now.prompt.trim() !== "" && act.busy === null;
  const go = () => {
    if (!ready) return;
    const sent = now;
    const before = asked.current;
    asked.current = sent;
    void act.send("playground.run", { prompt: sent.prompt, settings: chosenSettings(sent.settings, data.settings, before?.settings) }).then((done) => {
      if (!done) asked.current = before;
    });
  };
  const touched = useRef(false);
  const inForce = JSON.stringify(data.settings);
  useEffect(() => {
    // Until somebody moves a slider, the sliders follow the kernel: it knows what the model prefers once that is loaded.
    if (touched.current) return;
    setNow((before) => ({ ...before, settings: data.settings }));
    if (asked.current) asked.current = { ...asked.current, settings: data.settings };
  }, [inForce]);
  useEffect(() => {
    if (!auto || !touched.current || !ready || act.error || changed.length === 0) return;
    const timer = setTimeout(go, DEBOUNCE_MS);
    return () => clearTimeout(timer);
  }, [now, auto, ready, act.error]);
  const change = (part: Partial<Asked>) => {
    touched.current = true;
    act.dismiss();
    setNow((before) => ({ ...before, ...part }));
  };
  const { run } = data;
  const progress = run && progressOf(run);
  return (
    <Instrument label="Playground">
      <Bar>
        <span class="mlxnb-title">Playground</span>
        <span class="mlxnb-sep" />
        <Tabs
          label="View"
          prefix={prefix}
          value={tab}
          options={[
            ["answer", "Answer"],
            ["tokens", "Tokens"],
          ]}
          onChange={setTab}
        />
        <Grow />
        {data.model && <ModelChip name={data.model} />}
        {run ? <RunState run={run} saved={!host.live} /> : <State tone="quiet">{host.live ? "ready" : "saved"}</State>}
        {run?.live && host.live && (
          <Button icon="stop" onClick={() => void act.send("stop", { run: 0 })}>
            Stop
          </Button>
        )}
        <Button icon="play" kind="primary" disabled={!ready} onClick={go}>
          Run
        </Button>
        {progress !== null && <Progress fraction={progress} label="Progress" />}
      </Bar>
      <Announce live={run?.live ?? false} />
      <div class="mlxnb-pg">
        <div class="mlxnb-pg-main">
          <textarea
            class="mlxnb-area mlxnb-pg-prompt"
            aria-label={data.mode === "text" ? "Text to go on from" : "Prompt"}
            dir="auto"
            rows={Math.min(14, Math.max(3, now.prompt.split("\n").length + 1))}
            disabled={!host.live}
            placeholder={data.mode === "text" ? "Text that the model goes on from" : "What to ask the model"}
            value={now.prompt}
            onInput={(event) => change({ prompt: event.currentTarget.value })}
            onKeyDown={(event) => {
              event.stopPropagation();
              if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
            }}
          />
          {host.live ? (
            <CostLine data={data} now={now} changed={changed} act={act} auto={auto} />
          ) : (
            <p class="mlxnb-pg-cost">This playground is saved: run its cell again to change it.</p>
          )}
          <div {...tabPanel(prefix, tab)} class="mlxnb-pg-run">
            {!run ? (
              <div class="mlxnb-answer mlxnb-empty">
                {host.live ? "The answer appears here. Write a prompt, or move a slider." : "Nothing was run."}
              </div>
            ) : tab === "tokens" ? (
              <TokenInspector run={run} onBranch={null} />
            ) : run.answer || run.status === "running" || run.status === "done" ? (
              <Answer text={run.answer} streaming={run.live} />
            ) : (
              <div class="mlxnb-answer mlxnb-empty">…</div>
            )}
            {run?.error && <Note tone="err" title={run.error.message} hint={run.error.hint} />}
          </div>
        </div>
        <Knobs settings={now.settings} live={host.live} auto={auto} setAuto={setAuto} change={(settings) => change({ settings })} />
      </div>
      {data.error && <Note tone="err">{data.error}</Note>}
      {act.error && (
        <Note tone="err" title="Not run.">
          {act.error} Your text and sliders are as you left them.
        </Note>
      )}
      {run && <RunFoot run={run} />}
    </Instrument>
  );
}

/** What the next run takes and what will stay the same, before it runs. */
function CostLine({ data, now, changed, act, auto }: { data: Playground; now: Asked; changed: readonly string[]; act: Act; auto: boolean }) {
  const cost = costOf(data.run, changed, now.settings);
  const reading = cost.promptTokens === null ? "reads the prompt" : `reads ${plural(cost.promptTokens, "prompt token")}${cost.cached ? ", the others are in the cache" : " again"}`;
  const time = cost.seconds === null ? "" : `, about ${duration(cost.seconds)} at the pace of the last run`;
  if (!now.prompt.trim()) return <p class="mlxnb-pg-cost">Nothing runs before there is a prompt.</p>;
  const lead = act.busy === "playground.run" ? "Starting…" : changed.length === 0 ? "Up to date." : auto ? "Next:" : "Changed; Run to see it:";
  return (
    <p class="mlxnb-pg-cost">
      <b>{lead}</b>{" "}
      {changed.length > 0
        ? `${reading}, then at most ${plural(cost.maxTokens, "forward")}${time}. ${cost.reason}`
        : "Each change runs again in the shared batch; other cells go on."}
    </p>
  );
}

function Knobs(props: { settings: Settings; live: boolean; auto: boolean; setAuto: (auto: boolean) => void; change: (settings: Settings) => void }) {
  const { settings, live, change } = props;
  const [copied, copy] = useCopied();
  const set = (name: keyof Settings, value: number) => change({ ...settings, [name]: value });
  const greedy = settings.temp === 0;
  const options = `--temp ${settings.temp} --top-p ${settings.top_p} --min-p ${settings.min_p} --top-k ${settings.top_k} --repetition-penalty ${settings.repetition_penalty} --max-tokens ${settings.max_tokens} --seed ${settings.seed}`;
  return (
    <div class="mlxnb-pg-knobs" role="group" aria-label="Sampling, in the order of the engine">
      <p class="mlxnb-pg-order">Rules, in the order of the engine</p>
      {KNOBS.map((knob) => (
        <Slider
          key={knob.name}
          knob={knob}
          value={settings[knob.name]}
          disabled={!live}
          idle={greedy && !["temp", "repetition_penalty"].includes(knob.name)}
          set={(value) => set(knob.name, value)}
        />
      ))}
      <div class="mlxnb-pg-row">
        <label>
          max tokens <Field name="max_tokens" value={settings.max_tokens} disabled={!live} set={set} title={`1 to ${whole(MAX_TOKENS)}`} />
        </label>
      </div>
      <div class="mlxnb-pg-row">
        <label>
          seed <Field name="seed" value={settings.seed} disabled={!live} set={set} title="Same seed, same draws" />
        </label>
        <Button kind="quiet" icon="redo" label="Another seed" disabled={!live} onClick={() => set("seed", Math.floor(Math.random() * 1_000_000))} />
      </div>
      <div class="mlxnb-pg-row">
        <Switch on={props.auto} label="Run on every change" disabled={!live} onChange={() => props.setAuto(!props.auto)} />
        <Grow />
        <Button kind="quiet" icon={copied ? "check" : "copy"} label={copied ? "Copied" : "Copy as options of %%mlx"} onClick={() => copy(options)} />
      </div>
    </div>
  );
}

function Slider({ knob, value, disabled, idle, set }: { knob: Knob; value: number; disabled: boolean; idle: boolean; set: (value: number) => void }) {
  const text = figure(knob, value);
  return (
    <div class={`mlxnb-pg-knob${idle ? " mlxnb-pg-idle" : ""}`}>
      <label>
        <span>{knob.title}</span>
        <Field name={knob.name} value={value} disabled={disabled} set={(_, next) => set(next)} title={knob.says} />
      </label>
      <input
        type="range"
        min={knob.min}
        max={knob.max}
        step={knob.step}
        value={Math.min(knob.max, value)}
        disabled={disabled}
        aria-label={knob.title}
        aria-valuetext={text}
        title={knob.says}
        onInput={(event) => set(Number(event.currentTarget.value))}
        onKeyDown={(event) => event.stopPropagation()}
      />
      <small>{idle ? "no effect while greedy" : value === knob.neutral ? `${text}: ${knob.says}` : knob.says}</small>
    </div>
  );
}

/** A figure one can type; what is no such figure stays in the box, marked, and changes nothing. */
function Field({
  name,
  value,
  disabled,
  set,
  title,
}: {
  name: keyof Settings;
  value: number;
  disabled: boolean;
  set: (name: keyof Settings, value: number) => void;
  title: string;
}) {
  const [draft, setDraft] = useState<string | null>(null);
  const bad = draft !== null && typed(name, draft) === null;
  return (
    <input
      class="mlxnb-input mlxnb-num"
      type="text"
      inputMode="decimal"
      value={draft ?? String(value)}
      disabled={disabled}
      aria-invalid={bad}
      title={title}
      aria-label={`${name.replaceAll("_", " ")}, exact`}
      onInput={(event) => {
        const text = event.currentTarget.value;
        setDraft(text);
        const next = typed(name, text);
        if (next !== null) set(name, next);
      }}
      onKeyDown={(event) => event.stopPropagation()}
      onBlur={() => setDraft(null)}
    />
  );
}

register("playground", PlaygroundView);
