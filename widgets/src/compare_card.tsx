/** One answer of a comparison: its name, its text or what changed in it, and its figures. */

import { Answer as AnswerText } from "./answer";
import { leavesAt, meanP, type Answer } from "./compare_data";
import { Pieces, Vote, type Changes, type Difference } from "./compare_parts";
import type { Mark } from "./compare_rows";
import { countOrigins } from "./foot";
import { duration, plural, probability } from "./format";
import type { Host } from "./host";
import { useCopied } from "./more";
import { ORIGINS } from "./parse";
import { Button, Glyph, Note } from "./parts";
import { endWord, RunState } from "./state";

export function AnswerCard(props: {
  answer: Answer;
  base: Answer;
  many: boolean;
  difference: Difference | null;
  changes: Changes;
  host: Host;
  longest: number;
  mark: Mark;
  onMark: (value: Mark) => void;
  stop: (index: number) => void;
}) {
  const { answer, base, difference, changes, host } = props;
  const { run, letter } = answer;
  const [copied, copy] = useCopied();
  const isBase = props.many && answer.index === base.index;
  const compared = changes !== "off" && difference && !isBase;
  return (
    <article class={`mlxnb-cmp-card${isBase && changes !== "off" ? " mlxnb-cmp-base" : ""}`} aria-label={`Answer ${letter}, ${answer.label}`}>
      <header class="mlxnb-cmp-head">
        <span class="mlxnb-cmp-key">{letter}</span>
        <b class="mlxnb-cmp-name" title={answer.label} dir="auto">
          {answer.label}
        </b>
        {compared && difference.like !== null && !difference.rewritten && (
          <span class="mlxnb-2 mlxnb-nowrap" title={`Words in common with ${base.letter}`}>
            {Math.round(100 * difference.like)}% of {base.letter}
          </span>
        )}
        {compared && difference.rewritten && (
          <span
            class="mlxnb-chip"
            title={`Too different from ${base.letter} to show left-out words${difference.like === null ? "" : `: ${Math.round(100 * difference.like)}% in common`}`}
          >
            rewritten
          </span>
        )}
        {isBase && changes !== "off" && <span class="mlxnb-chip">base</span>}
        <span class="mlxnb-grow" />
        {run.status !== "done" && <RunState run={run} saved={!host.live} />}
        {run.live && host.live && <Button kind="quiet" icon="stop" label={`Stop only ${letter}`} onClick={() => props.stop(answer.index)} />}
        {!run.live && run.answer && (
          <>
            <Vote letter={letter} value={props.mark} onChange={props.onMark} />
            <Button
              kind="quiet"
              icon={copied ? "check" : "copy"}
              label={copied ? "Copied" : `Copy answer ${letter}`}
              onClick={() => copy(run.answer)}
            />
          </>
        )}
      </header>
      {compared && difference.pieces && answer.run.answer !== base.run.answer ? (
        <Pieces pieces={difference.pieces} changes={changes} rewritten={difference.rewritten} />
      ) : run.answer || run.status === "running" || run.status === "done" ? (
        <AnswerText text={run.answer} streaming={run.live} />
      ) : (
        !run.error && (
          <div class="mlxnb-answer mlxnb-empty">
            {run.live ? "Starts as soon as it gets its place in the batch." : "Stopped before its first token."}
          </div>
        )
      )}
      {run.error && <Note tone="err" title={run.error.message} hint={run.error.hint} />}
      <CardFoot {...{ answer, base, compared: Boolean(compared) }} longest={props.longest} />
    </article>
  );
}

function CardFoot({ answer, base, compared, longest }: { answer: Answer; base: Answer; compared: boolean; longest: number }) {
  const { run } = answer;
  if (!run.tokens.length) return null;
  const counts = countOrigins(run.tokens);
  const parts = ORIGINS.filter((of) => counts[of] > 0);
  const p = meanP(run);
  const leaves = compared ? leavesAt(base, answer) : null;
  return (
    <footer class="mlxnb-cmp-foot">
      <div class="mlxnb-strip" role="img" aria-label={`${run.tokens.length} of ${longest} tokens in the longest`}>
        {parts.map((of) => (
          <span key={of} class={`mlxnb-o-${of}`} style={`flex: ${counts[of]} 1 0`} />
        ))}
        <span style={`flex: ${longest - run.tokens.length} 1 0; background: none; min-width: 0`} />
      </div>
      {parts.map((of) => (
        <span key={of}>
          <Glyph of={of} /> {of} <b>{counts[of]}</b>
        </span>
      ))}
      {run.timing.ended !== null && (
        <span>
          {run.status === "done" ? endWord(run) : run.status} · <b>{duration(run.timing.ended)}</b>
        </span>
      )}
      {p !== null && (
        <span title="Geometric mean of the probabilities of its tokens">
          mean p <b>{probability(p)}</b>
        </span>
      )}
      {leaves !== null && (
        <span title={`The first ${plural(leaves - 1, "token")} are the same`}>
          leaves {base.letter} at token <b>{leaves}</b>
        </span>
      )}
    </footer>
  );
}
