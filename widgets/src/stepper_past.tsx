/** What the Stepper has made so far: as text, and step by step with a way back. */

import { plural, probability } from "./format";
import { TokenText, type Act } from "./more";
import { Button } from "./parts";
import type { Past } from "./stepper_data";
import { DROP_WORDS } from "./stepper_table";

const HOW: Readonly<Record<Past["how"], { css: string; says: string }>> = {
  prompt: { css: "mlxnb-o-prompt", says: "prompt" },
  drawn: { css: "mlxnb-o-sampled", says: "drawn" },
  hand: { css: "mlxnb-o-hand", says: "chosen by hand" },
};

export function TextSoFar({ past, next }: { past: readonly Past[]; next: number | null }) {
  const runs: Past[][] = [];
  for (const token of past) {
    const last = runs.at(-1);
    if (last?.[0]?.how === token.how) last.push(token);
    else runs.push([token]);
  }
  return (
    <div class="mlxnb-stp-text">
      <div class="mlxnb-tokens" dir="auto">
        {runs.map((run, at) => {
          const { css, says } = HOW[run[0]!.how];
          return (
            <span key={at} class={`mlxnb-run ${css}`} role="group" aria-label={`${says}, ${plural(run.length, "token")}`}>
              <i class={`mlxnb-g ${css}`} aria-hidden="true" />
              {run.map((token, i) => (
                <span key={i} class="mlxnb-tok">
                  {token.text}
                </span>
              ))}
            </span>
          );
        })}{" "}
        {next !== null && <span class="mlxnb-stp-next">token {next}</span>}
      </div>
    </div>
  );
}

export function Steps({ past, act, can }: { past: readonly Past[]; act: Act; can: boolean }) {
  const made = past.flatMap((token, at) => (token.how === "prompt" ? [] : [{ token, at }]));
  return (
    <details class="mlxnb-stp-steps">
      <summary>Steps so far: {made.length}</summary>
      <table class="mlxnb-table">
        <thead>
          <tr>
            <th scope="col" class="mlxnb-num">#</th>
            <th scope="col">token</th>
            <th scope="col">how</th>
            <th scope="col" class="mlxnb-num">chance</th>
            <th scope="col" class="mlxnb-num">rank</th>
            <th scope="col">note</th>
            <th scope="col">
              <span class="mlxnb-sr">go back</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {made.map(({ token, at }) => (
            <tr key={at}>
              <td class="mlxnb-num">{at + 1}</td>
              <td class="mlxnb-mono">
                <TokenText text={token.text} />
              </td>
              <td>
                <i class={`mlxnb-g ${HOW[token.how].css}`} aria-hidden="true" /> {token.how === "hand" ? "by hand" : "drawn"}
              </td>
              <td class="mlxnb-num">{token.probability === null ? "" : probability(token.probability)}</td>
              <td class="mlxnb-num">{token.rank === null ? "" : token.rank + 1}</td>
              <td class="mlxnb-2">{token.droppedBy ? `dropped by ${DROP_WORDS[token.droppedBy]}, chosen anyway` : ""}</td>
              <td class="mlxnb-num">
                {at < past.length - 1 && (
                  <Button kind="quiet" icon="undo" disabled={!can} onClick={() => void act.send("stepper.undo", { count: past.length - 1 - at })}>
                    Back to here
                  </Button>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <div class="mlxnb-hint">
        <span class="mlxnb-grow">Going on as a run keeps these tokens and draws the rest with the same seed.</span>
        <Button icon="branch" disabled={!can} onClick={() => void act.send("stepper.run")}>
          Go on as a run
        </Button>
      </div>
    </details>
  );
}
