/** The draw of one step: score over T plus noise, the largest sum wins. */

import { probability, plural } from "./format";
import { TokenText } from "./more";
import { Icon } from "./parts";
import type { Candidate, Step } from "./stepper_data";

const SHOWN = 8;
const signed = (value: number): string => `${value < 0 ? "−" : "+"} ${Math.abs(value).toFixed(2)}`;
const minus = (value: number): string => value.toFixed(2).replace("-", "−");

export interface Draw {
  candidate: Candidate;
  score: number;
  noise: number;
  sum: number;
}

/** What took part in the draw, largest sum first. Empty for greedy, which draws nothing. */
export function drawOf(step: Step, temp: number): Draw[] {
  if (!(temp > 0)) return [];
  const drawn = step.candidates.flatMap((candidate) => {
    if (!candidate.kept || candidate.noise === null) return [];
    const score = candidate.logprob / temp;
    return [{ candidate, score, noise: candidate.noise, sum: score + candidate.noise }];
  });
  return drawn.sort((a, b) => b.sum - a.sum);
}

/** Positions in [0, 1] of score and sum on one axis for all rows. */
export function drawAxis(draws: Draw[]): (value: number) => number {
  const all = draws.flatMap((draw) => [draw.score, draw.sum]);
  const low = Math.min(...all);
  const high = Math.max(...all);
  const span = high - low || 1;
  return (value) => 0.06 + 0.94 * ((value - low) / span);
}

export function DrawTable({ step, temp, seed }: { step: Step; temp: number; seed: string }) {
  if (!(temp > 0)) {
    return (
      <div class="mlxnb-draw">
        <b>No draw</b> <span class="mlxnb-2">temperature 0 takes the likeliest token after the penalties; ties go to the lowest id</span>
      </div>
    );
  }
  const draws = drawOf(step, temp);
  if (!draws.length) return null;
  const shown = draws.slice(0, SHOWN);
  const at = drawAxis(shown);
  const left = step.stages.at(-1)?.left ?? draws.length;
  return (
    <div class="mlxnb-draw">
      <b>Draw</b>{" "}
      <span class="mlxnb-2">
        each token left gets noise from the key of this position; the largest sum wins, so a token is drawn as often as its chance says
      </span>
      <div class="mlxnb-scroll">
        <table class="mlxnb-draw-table">
          <thead>
            <tr>
              <th scope="col">token</th>
              <th scope="col" class="mlxnb-num">chance</th>
              <th scope="col" class="mlxnb-num">log p ÷ T</th>
              <th scope="col" class="mlxnb-num">noise</th>
              <th scope="col" class="mlxnb-num">sum</th>
              <th scope="col">
                <span class="mlxnb-draw-key">
                  <i aria-hidden="true" />
                  score <u aria-hidden="true" />
                  noise, hollow if negative
                </span>
              </th>
              <th scope="col" aria-label="Result" />
            </tr>
          </thead>
          <tbody>
            {shown.map((draw, index) => {
              const [a, b] = [at(draw.score) * 100, at(draw.sum) * 100];
              const hit = draw.candidate.id === step.chosen;
              return (
                <tr key={draw.candidate.id} class={hit ? "mlxnb-draw-hit" : ""}>
                  <td class="mlxnb-mono">
                    <TokenText text={draw.candidate.text} />
                  </td>
                  <td class="mlxnb-num">{draw.candidate.after === null ? "" : probability(draw.candidate.after)}</td>
                  <td class="mlxnb-num">{minus(draw.score)}</td>
                  <td class="mlxnb-num">{signed(draw.noise)}</td>
                  <td class="mlxnb-num">
                    <b>{minus(draw.sum)}</b>
                  </td>
                  <td>
                    <span class="mlxnb-draw-bar" aria-hidden="true">
                      <i style={`width: ${Math.min(a, b)}%`} />
                      <u class={draw.noise < 0 ? "mlxnb-draw-minus" : ""} style={`left: ${Math.min(a, b)}%; width: ${Math.abs(b - a)}%`} />
                    </span>
                  </td>
                  <td class="mlxnb-2">
                    {hit && (
                      <>
                        <Icon name="check" /> {index === 0 ? "largest: drawn" : "drawn"}
                      </>
                    )}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p class="mlxnb-2">
        {left > shown.length && `${plural(left - shown.length, "other token")} took part, none with a larger sum. `}
        {step.coin !== null && `The coin of XTC came up ${probability(step.coin)}. `}
        Key: {seed && `seed ${seed}, `}token {step.position + 1}. Same seed, same token, whatever else is in the batch.
      </p>
    </div>
  );
}
