/** RunView: one answer and the story of every token. */

import { useComputed, useSignal } from "@preact/signals";

import { Answer } from "./answer";
import { RunFoot } from "./foot";
import { register, viewOf } from "./mount";
import type { Host } from "./host";
import { parseRecord, type RunData } from "./parse";
import { Announce, Bar, Button, Frame, Grow, ModelChip, Note, Notice, Progress, tabPanel, Tabs, usePrefix } from "./parts";
import { RawText } from "./raw";
import { wantedView } from "./read";
import { progressOf, RunState } from "./state";
import { TokenInspector } from "./inspector";

type Tab = "answer" | "tokens" | "raw";
const TABS: readonly (readonly [Tab, string])[] = [["answer", "Answer"], ["tokens", "Tokens"], ["raw", "Raw"]];

function firstTab(view: string): Tab {
  return view === "tokens" || view === "raw" ? view : "answer";
}

/** Puts text on the clipboard, also where the page may not (an insecure origin, a frame without leave). */
async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.cssText = "position:fixed;opacity:0";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function RunView({ host }: { host: Host }) {
  const parsed = useComputed(() => parseRecord(host.record.value)).value;
  if (parsed.kind === "notice") return <Notice text={parsed.message} />;
  const Compare = parsed.kind === "group" && parsed.runs.length > 1 ? viewOf("compare") : undefined;
  // A branch or another try has put a second answer beside the first.
  if (Compare) return <Compare host={host} />;
  const run = parsed.kind === "run" ? parsed.run : parsed.runs[0];
  return run ? <OneRun run={run} host={host} raw={parsed.raw} /> : <Notice text="This output is a group without runs." />;
}

/** One run; index: which of a group it is, for commands. */
export function OneRun({ run, host, raw, index = 0 }: { run: RunData; host: Host; raw: unknown; index?: number }) {
  const prefix = usePrefix();
  const tab = useSignal<Tab>(firstTab(wantedView(host)));
  const said = useSignal("");
  const fault = useSignal("");
  const stopping = useSignal(false);

  const act = (name: string, args: object, done = "") => {
    fault.value = "";
    host.command(name, { run: index, ...args }).then(
      () => {
        said.value = done;
      },
      (error: Error) => {
        fault.value = error.message;
        stopping.value = false;
      },
    );
  };
  const stop = () => {
    stopping.value = true;
    act("stop", {});
  };
  const copy = () => void copyText(run.answer).then(() => (said.value = "copied"));
  const progress = progressOf(run);
  return (
    <Frame label="Answer of a model">
      <Bar>
        <Tabs label="View" prefix={prefix} value={tab.value} options={TABS} onChange={(next) => (tab.value = next)} />
        <Grow />
        {run.model && <ModelChip name={run.model} />}
        <RunState run={run} saved={!host.live} stopping={stopping.value || run.stopping} />
        {run.live && host.live && (
          <Button icon="stop" onClick={stop} disabled={stopping.value}>
            Stop
          </Button>
        )}
        {!run.live && (
          <span class="mlxnb-btns">
            <Button kind="quiet" icon={said.value === "copied" ? "check" : "copy"} label={said.value === "copied" ? "Copied" : "Copy answer"} onClick={copy} />
            {host.live && <Button kind="quiet" icon="redo" label="Run again" onClick={() => act("regenerate", {})} />}
            {host.live && run.tokens.length > 0 && (
              <Button kind="quiet" icon="branch" label="Branch: choose a token to go on from" onClick={() => (tab.value = "tokens")} />
            )}
          </span>
        )}
        {progress !== null && <Progress fraction={progress} label="Progress" />}
      </Bar>
      <Announce live={run.live} said={said.value} />
      {fault.value && (
        <Note tone="err" title="Not done.">
          {fault.value}
        </Note>
      )}
      {tab.value === "answer" && (
        <div {...tabPanel(prefix, "answer")}>
          <Answer text={run.answer} streaming={run.live} empty={run.status === "failed" ? "" : "(no text)"} />
        </div>
      )}
      {tab.value === "tokens" && (
        <div {...tabPanel(prefix, "tokens")}>
          <TokenInspector run={run} onBranch={host.live ? (at, token) => act("branch", { at, token }, "branched") : null} />
        </div>
      )}
      {tab.value === "raw" && (
        <div {...tabPanel(prefix, "raw")}>
          <RawText run={run} record={raw} />
        </div>
      )}
      {tab.value !== "raw" && <Ending run={run} />}
      <RunFoot run={run} />
    </Frame>
  );
}

/** How a run that did not simply finish ended, in words. */
function Ending({ run }: { run: RunData }) {
  if (run.status === "stopped") {
    const kept = run.tokens.length > 0 ? `stopped after ${run.tokens.length.toLocaleString("en")} tokens; all of it is kept` : "stopped before the first token";
    return <div class="mlxnb-cutline">{kept}</div>;
  }
  if (run.finish === "length") {
    return <div class="mlxnb-cutline">cut at the limit{run.maxTokens === null ? "" : ` of ${run.maxTokens.toLocaleString("en")} tokens`}; raise it with --max-tokens</div>;
  }
  if (!run.error) return null;
  return <Note tone="err" title={run.error.message || "Failed."} hint={run.error.hint} />;
}

register("run", RunView);
