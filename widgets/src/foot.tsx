/** The foot of a run: where its tokens came from, and the few figures a person acts on. */

import { bytes, duration, speed, whole } from "./format";
import { ORIGINS, type RunData, type TokenData } from "./parse";
import { Metrics, Strip, type Part } from "./parts";

const WORDS = { sampled: "sampled", filled: "asserted", echo: "echo", drafted: "drafted", forced: "forced" } as const;

interface Tally {
  upTo: number;
  readonly counts: Record<(typeof ORIGINS)[number], number>;
}
const tallies = new WeakMap<readonly TokenData[], Tally>();

/** Tokens by origin. The array is append-only, so only new tokens are counted. */
export function countOrigins(tokens: readonly TokenData[]): Readonly<Tally["counts"]> {
  const tally = tallies.get(tokens) ?? { upTo: 0, counts: { sampled: 0, filled: 0, echo: 0, drafted: 0, forced: 0 } };
  tallies.set(tokens, tally);
  for (; tally.upTo < tokens.length; tally.upTo++) tally.counts[(tokens[tally.upTo] as TokenData).origin]++;
  return tally.counts;
}

/** Tokens per second after the first token; null before there are two. */
export function decodeSpeed(tokens: readonly TokenData[]): number | null {
  const [first, last] = [tokens[0]?.t, tokens.at(-1)?.t];
  if (tokens.length < 2 || first == null || last == null || last <= first) return null;
  return (tokens.length - 1) / (last - first);
}

/** Where the prompt tokens of these runs came from. */
export function promptParts(runs: readonly RunData[]): readonly Part[] {
  const told = runs.filter(({ usage }) => usage.promptTokens !== null);
  if (told.length === 0) return [];
  const sum = (of: (usage: RunData["usage"]) => number): number => told.reduce((total, { usage }) => total + of(usage), 0);
  const cached = sum((usage) => Math.min(usage.cachedTokens ?? 0, usage.promptTokens!));
  const ssd = Math.min(cached, sum((usage) => usage.ssdTokens ?? 0));
  return [
    { of: "cached", count: cached, label: "cached", ...(ssd > 0 ? { note: ssd === cached ? "from the SSD" : `(${whole(ssd)} from the SSD)` } : {}) },
    { of: "prompt", count: sum((usage) => usage.promptTokens!) - cached, label: "prefilled" },
  ];
}

/** Tokens still to come at most, outlined; only where the run may go on or was cut short. */
function rest(run: RunData, produced: number): number {
  if (run.maxTokens === null || !(run.live || run.status === "stopped")) return 0;
  // A long limit would shrink what is there to nothing: it is outlined up to four times what there is.
  return Math.min(Math.max(0, run.maxTokens - produced), Math.max(24, produced * 4));
}

export function RunFoot({ run }: { run: RunData }) {
  const counts = countOrigins(run.tokens);
  const listed = run.tokens.length;
  const produced = run.usage.completionTokens ?? listed;
  const prompt = promptParts([run]);
  const answer: Part[] = ORIGINS.map((of) => ({ of, count: counts[of], label: WORDS[of] }));
  // An end-of-text token is counted and has no record; without a token table, counts by origin are not known.
  const unlisted = produced - listed;
  if (unlisted > 0 && (listed === 0 || unlisted <= 1)) answer[0] = { of: "sampled", count: counts.sampled + unlisted, label: "sampled" };
  const { usage, timing } = run;
  const perSecond = decodeSpeed(run.tokens);
  return (
    <div class="mlxnb-foot">
      {(prompt.length > 0 || produced > 0) && (
        <div class="mlxnb-strips">
          {prompt.length > 0 && <Strip title="Prompt" parts={prompt} />}
          <Strip title="Answer" parts={answer} rest={rest(run, produced)} />
        </div>
      )}
      <Metrics
        items={[
          ["TTFT", timing.firstToken === null ? null : duration(timing.firstToken)],
          ["speed", perSecond === null ? null : speed(perSecond)],
          ["forwards", usage.forwards === null ? null : usage.forwards.toLocaleString("en")],
          ["KV", usage.kvBytes === null ? null : `${bytes(usage.kvBytes)}${usage.codec ? ` ${usage.codec}` : ""}`],
          ["declined", usage.declined.length === 0 ? null : usage.declined.join(", ")],
          ["seed", run.seed],
          ["finish", run.status === "stopped" ? run.finish : null],
        ]}
      />
    </div>
  );
}
