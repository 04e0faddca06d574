/** How a run is going: one word, one number, and a fraction while something with an end is under way. */

import { bytes, duration, plural, whole } from "./format";
import type { RunData } from "./parse";
import { State } from "./parts";

const PHASES: Readonly<Record<string, string>> = {
  "look up": "looking up",
  wait: "waiting for another kernel to fetch",
  download: "downloading",
  unpack: "unpacking",
  hash: "checking",
  "loading weights": "loading",
};

/** Seconds since submit as far as the record knows. */
export function elapsed(run: RunData): number | null {
  return run.timing.ended ?? run.tokens.at(-1)?.t ?? run.phases.reduce<number | null>((most, p) => Math.max(most ?? 0, p.until), null);
}

function lastPhase(run: RunData, kind: string) {
  return run.phases.findLast((phase) => phase.kind === kind);
}

function left(done: number, total: number, spent: number): string {
  return spent >= 0.5 && done > 0 && done < total ? ` · ${duration((spent * (total - done)) / done)} left` : "";
}

/** 0 to 1 while loading or reading the prompt; null otherwise. */
export function progressOf(run: RunData): number | null {
  const phase = run.status === "loading" ? lastPhase(run, "load") : run.status === "prefill" ? lastPhase(run, "prefill") : undefined;
  return phase?.total ? (phase.done ?? 0) / phase.total : null;
}

/** How a run that was not stopped ended, in a word. "stop" is the name of a finish reason and would read like the button. */
export function endWord(run: RunData): string {
  return run.finish === "stop" ? "complete" : run.finish || "done";
}

/** What the state says, without its colour. */
export function stateWords(run: RunData): string {
  const time = elapsed(run);
  const took = time === null ? "" : ` · ${duration(time)}`;
  switch (run.status) {
    case "waiting":
      return `waiting${took}`;
    case "loading": {
      const phase = lastPhase(run, "load");
      const word = PHASES[phase?.phase ?? ""] ?? "loading";
      if (!phase || phase.done === null) return word;
      const amount = phase.total ? `${bytes(phase.done)} of ${bytes(phase.total)}` : bytes(phase.done);
      return phase.done || phase.total ? `${word} · ${amount}${left(phase.done, phase.total ?? 0, phase.until - phase.t)}` : word;
    }
    case "prefill": {
      const phase = lastPhase(run, "prefill");
      return phase?.total ? `reading the prompt · ${whole(phase.done ?? 0)} of ${whole(phase.total)}` : "reading the prompt";
    }
    case "running":
      return run.tokens.length === 0 ? `starting${took}` : `streaming · ${plural(run.tokens.length, "token")}${took}`;
    case "stopped":
      return `stopped${took}`;
    case "failed":
      return `failed${run.error?.kind ? ` · ${run.error.kind}` : ""}`;
    default:
      return run.finish === "length" ? `length · ${plural(run.usage.completionTokens ?? run.tokens.length, "token")}` : `${endWord(run)}${took}`;
  }
}

export function RunState({ run, saved = false, stopping = false }: { run: RunData; saved?: boolean; stopping?: boolean }) {
  const words = stateWords(run);
  if (run.live && saved) {
    return (
      <State tone="quiet" icon="wait">
        saved before the end
      </State>
    );
  }
  if (run.live && stopping) {
    return (
      <State tone="warn" icon="stop">
        stopping
      </State>
    );
  }
  if (run.status === "waiting") {
    return (
      <State tone="quiet" icon="wait">
        {words}
      </State>
    );
  }
  if (run.live) return <State tone="live">{words}</State>;
  if (run.status === "stopped") {
    return (
      <State tone="warn" icon="stop">
        {words}
      </State>
    );
  }
  if (run.status === "failed") {
    return (
      <State tone="err" icon="warn">
        {words}
      </State>
    );
  }
  return (
    <State tone="quiet" icon={run.finish === "length" ? "limit" : "check"}>
      {words}
    </State>
  );
}
