/** What stands above and below the answers of a comparison: what they are compared with, which say the same, what they took. */

import { votesOf, type Answer, type Group } from "./compare_data";
import type { Changes } from "./compare_parts";
import { countOrigins, promptParts } from "./foot";
import { duration, plural, speed } from "./format";
import { ORIGINS } from "./parse";
import { Metrics, Seg, Strip } from "./parts";

/** Whether all answers have one prompt: only then do differences between them say something about the model. */
export const onePrompt = ({ answers }: Group): boolean => answers.every(({ run }) => run.promptText === answers[0]!.run.promptText);

/** One of the answers: letters while there is room for them, a list after that. */
export function Pick({
  answers,
  value,
  onChange,
  label,
}: {
  answers: readonly Answer[];
  value: number;
  onChange: (index: number) => void;
  label: string;
}) {
  if (answers.length <= 8)
    return (
      <Seg
        label={label}
        value={String(value)}
        options={answers.map(({ index, letter }) => [String(index), letter] as const)}
        onChange={(index) => onChange(Number(index))}
      />
    );
  return (
    <select class="mlxnb-select" aria-label={label} value={value} onChange={(event) => onChange(Number(event.currentTarget.value))}>
      {answers.map((answer) => (
        <option key={answer.index} value={answer.index}>
          {answer.letter} · {answer.label}
        </option>
      ))}
    </select>
  );
}

export function Tools(props: {
  answers: readonly Answer[];
  base: number;
  setBase: (index: number) => void;
  changes: Changes;
  setChanges: (changes: Changes) => void;
}) {
  return (
    <div class="mlxnb-tools">
      <span class="mlxnb-field">
        Compare with <Pick answers={props.answers} value={props.base} onChange={props.setBase} label="Base of the comparison" />
      </span>
      <span class="mlxnb-field">
        Changes
        <Seg
          label="Changes"
          value={props.changes}
          options={[
            ["off", "Off"],
            ["words", "Words"],
            ["only", "Only changes"],
          ]}
          onChange={props.setChanges}
        />
      </span>
      {props.changes !== "off" && (
        <span class="mlxnb-nowrap">
          <ins class="mlxnb-add">added</ins> &nbsp;<del class="mlxnb-del">left out</del>
        </span>
      )}
    </div>
  );
}

/** Complete answers that say the same, where any do: the vote of the samples. */
export function Same({ answers }: { answers: readonly Answer[] }) {
  const votes = votesOf(answers);
  const most = votes[0]?.members.length ?? 0;
  if (answers.length < 3 || most < 2) return null;
  const total = votes.reduce((sum, vote) => sum + vote.members.length, 0);
  return (
    <div class="mlxnb-cmp-votes" role="group" aria-label="Answers that say the same">
      <div class="mlxnb-cmp-votes-head">
        <b>{votes.length === 1 ? "All say the same" : `${most} of ${total} say the same`}</b>
        <span title="Letter case, spaces and a final stop make no difference">
          {plural(votes.length, "different answer")}; letter case, spaces and a final stop left aside
        </span>
      </div>
      <ol>
        {votes.slice(0, 6).map((vote) => (
          <li key={vote.members[0]}>
            <span class="mlxnb-num">
              <b>{vote.members.length}</b>
            </span>
            <span class="mlxnb-meter" aria-hidden="true">
              <span style={`width: ${(100 * vote.members.length) / total}%`} />
            </span>
            <span class="mlxnb-cmp-vote-text" dir="auto" title={vote.text}>
              {vote.text}
            </span>
            <span class="mlxnb-2 mlxnb-nowrap">
              {vote.members
                .slice(0, 12)
                .map((index) => answers[index]!.letter)
                .join(" ")}
              {vote.members.length > 12 && " …"}
            </span>
          </li>
        ))}
      </ol>
      {votes.length > 6 && <span class="mlxnb-2">and {plural(votes.length - 6, "more")}</span>}
    </div>
  );
}

export function GroupFoot({ group }: { group: Group }) {
  const runs = group.answers.map(({ run }) => run);
  const counts = runs.map((run) => countOrigins(run.tokens));
  const total = runs.reduce((sum, run) => sum + run.tokens.length, 0);
  // Samples share one reading of their prompt, and each of them reports it.
  const prompt = promptParts(onePrompt(group) ? runs.filter(({ usage }) => usage.promptTokens !== null).slice(0, 1) : runs);
  const firsts = runs.flatMap((run) => run.timing.firstToken ?? []);
  const ends = runs.flatMap((run) => run.timing.ended ?? []);
  const span = ends.length === runs.length && firsts.length ? Math.max(...ends) - Math.min(...firsts) : 0;
  if (!total) return null;
  return (
    <div class="mlxnb-foot">
      <div class="mlxnb-strips">
        {prompt.length > 0 && <Strip title={onePrompt(group) ? "Prompt" : "Prompts"} parts={prompt} />}
        <Strip title="Answers" parts={ORIGINS.map((of) => ({ of, count: counts.reduce((sum, one) => sum + one[of], 0), label: of }))} />
      </div>
      <Metrics
        items={[
          ["TTFT", firsts.length ? duration(Math.min(...firsts)) : null],
          [`all ${runs.length} rows`, span > 0 ? speed(total / span) : null],
        ]}
      />
    </div>
  );
}
