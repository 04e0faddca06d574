/** Many answers of one batch: side by side, as a table, token by token; what they share, where they part, which say the same. */

import { useEffect, useMemo, useState } from "preact/hooks";

import { chunk } from "./chunks";
import { AnswerCard } from "./compare_card";
import { isRewritten, likeness, parseGroup, piecesOf, summaryOf, type Answer, type DiffWords, type Group } from "./compare_data";
import { tableText, type Mark } from "./compare_rows";
import type { Changes, Difference } from "./compare_parts";
import { CompareTable } from "./compare_table";
import { GroupFoot, onePrompt, Pick, Same, Tools } from "./compare_tools";
import { RunFoot } from "./foot";
import { duration, plural } from "./format";
import type { Host } from "./host";
import { TokenInspector } from "./inspector";
import { useAct, useCopied, type Act } from "./more";
import { register } from "./mount";
import { Announce, Bar, Button, Chip, Frame, Grow, ModelChip, Note, Notice, State, tabPanel, Tabs, usePrefix } from "./parts";
import { wantedView } from "./read";

type Tab = "side" | "table" | "tokens";
const TABS: readonly (readonly [Tab, string])[] = [
  ["side", "Side by side"],
  ["table", "Table"],
  ["tokens", "Tokens"],
];
const PAGE = 24;
const DIFF_MS = 200;

export function CompareView({ host }: { host: Host }) {
  const group = parseGroup(host.record.value);
  if ("message" in group) return <Notice text={group.message} />;
  if (!group.answers.length) return <Notice text="This comparison has no answers." />;
  return <Body group={group} host={host} />;
}

/** Answers of a word or two are compared by the vote, not by what changed in them. */
const isProse = (answers: readonly Answer[]): boolean => answers.some(({ run }) => run.answer.trim().split(/\s+/).length > 8);

function Body({ group, host }: { group: Group; host: Host }) {
  const { answers } = group;
  const act = useAct(host);
  const prefix = usePrefix();
  const live = answers.some(({ run }) => run.live);
  const [tab, setTab] = useState<Tab>(wantedView(host) === "tokens" ? "tokens" : "side");
  const [base, setBase] = useState(0);
  const [changes, setChanges] = useState<Changes>(() => (!live && answers.length > 1 && onePrompt(group) && isProse(answers) ? "words" : "off"));
  const [marks, setMarks] = useState<ReadonlyMap<number, Mark>>(new Map());
  const [open, setOpen] = useState(0);
  const [shown, setShown] = useState(PAGE);
  const { differences, failed } = useDifferences(answers, answers[base] ?? answers[0]!, changes !== "off" || tab === "table");
  const mark = (index: number, value: Mark) => setMarks((before) => new Map(before).set(index, before.get(index) === value ? 0 : value));
  const stop = (index: number) => void act.send("stop", { run: index });
  const baseAnswer = answers[base] ?? answers[0]!;
  return (
    <Frame label={`Comparison of ${plural(answers.length, "answer")}`}>
      <Head
        group={group}
        host={host}
        act={act}
        marks={marks}
        tabs={<Tabs label="View" prefix={prefix} value={tab} options={TABS} onChange={setTab} />}
      />
      <Announce live={live} />
      {act.error && (
        <Note tone="err" title="Not done.">
          {act.error}
        </Note>
      )}
      {failed && <Note>Word differences could not be loaded; everything else works.</Note>}
      <div {...tabPanel(prefix, tab)}>
        {tab === "tokens" ? (
          <>
            <div class="mlxnb-tools">
              <span>Answer</span>
              <Pick answers={answers} value={open} onChange={setOpen} label="Answer" />
            </div>
            <TokenInspector
              key={open}
              run={answers[open]!.run}
              onBranch={host.live ? (at, token) => void act.send("branch", { run: open, at, token }) : null}
            />
            <RunFoot run={answers[open]!.run} />
          </>
        ) : (
          <>
            {answers.length > 1 && <Tools answers={answers} base={base} setBase={setBase} changes={changes} setChanges={setChanges} />}
            <Same answers={answers} />
            {tab === "table" ? (
              <CompareTable group={group} base={baseAnswer} differences={differences} changes={changes} marks={marks} mark={mark} />
            ) : (
              <div class="mlxnb-cmp" data-n={Math.min(answers.length, 5)} data-many={answers.length > 12 ? "" : undefined}>
                {answers.slice(0, shown).map((answer) => (
                  <AnswerCard
                    key={answer.index}
                    answer={answer}
                    base={baseAnswer}
                    many={answers.length > 1}
                    difference={differences.get(answer.index) ?? null}
                    {...{ changes, host, stop }}
                    longest={Math.max(...answers.map(({ run }) => run.tokens.length))}
                    mark={marks.get(answer.index) ?? 0}
                    onMark={(value) => mark(answer.index, value)}
                  />
                ))}
              </div>
            )}
            {tab === "side" && shown < answers.length && (
              <div class="mlxnb-hint">
                <span class="mlxnb-grow">
                  {shown} of {answers.length} answers are shown.
                </span>
                <Button onClick={() => setShown(shown + PAGE)}>Show more</Button>
              </div>
            )}
            <GroupFoot group={group} />
          </>
        )}
      </div>
      {group.note && <Note>{group.note}</Note>}
    </Frame>
  );
}

function Head({
  group,
  host,
  act,
  marks,
  tabs,
}: {
  group: Group;
  host: Host;
  act: Act;
  marks: ReadonlyMap<number, Mark>;
  tabs: preact.ComponentChildren;
}) {
  const [copied, copy] = useCopied();
  const sum = summaryOf(group.answers);
  const live = sum.ended < sum.total;
  const models = [...new Set(group.answers.map(({ run }) => run.model).filter(Boolean))];
  const parts = [
    `${sum.ended} of ${sum.total}`,
    sum.running && `${sum.running} running`,
    sum.waiting && `${sum.waiting} waiting`,
    sum.stopped && `${sum.stopped} stopped`,
    sum.failed && `${sum.failed} failed`,
  ];
  const words = parts.filter(Boolean).join(" · ") + (!live && sum.seconds !== null ? ` · ${duration(sum.seconds)}` : "");
  return (
    <Bar>
      {tabs}
      <Grow />
      {models.length === 1 ? <ModelChip name={models[0]!} /> : models.length > 0 && <Chip text={`${models.length} models`} />}
      {live && !host.live ? (
        <State tone="quiet" icon="wait">
          saved before the end
        </State>
      ) : live ? (
        <State tone="live">{words}</State>
      ) : sum.failed ? (
        <State tone="err" icon="warn">
          {words}
        </State>
      ) : sum.stopped ? (
        <State tone="warn" icon="stop">
          {words}
        </State>
      ) : (
        <State tone="quiet" icon="check">
          {words}
        </State>
      )}
      {live && host.live && (
        <Button icon="stop" disabled={act.busy !== null} onClick={() => void act.send("stop")}>
          Stop all
        </Button>
      )}
      {!live && (
        <span class="mlxnb-btns">
          <Button
            kind="quiet"
            icon={copied ? "check" : "copy"}
            label={copied ? "Copied" : "Copy all as a table"}
            onClick={() => copy(tableText(group, marks))}
          />
          {host.live && (
            <Button kind="quiet" icon="redo" label="Run all again" disabled={act.busy !== null} onClick={() => void act.send("regenerate")} />
          )}
        </span>
      )}
    </Bar>
  );
}

/** Loads the diff once it is wanted and compares each complete or growing answer with the base. */
function useDifferences(
  answers: readonly Answer[],
  base: Answer,
  wanted: boolean,
): { differences: ReadonlyMap<number, Difference>; failed: boolean } {
  const [diff, setDiff] = useState<DiffWords | null>(null);
  const [failed, setFailed] = useState(false);
  const many = answers.length > 1;
  useEffect(() => {
    if (!wanted || !many || diff || failed) return;
    chunk("diff").then(
      (lib) => setDiff(() => (one: string, two: string) => lib.diffWordsWithSpace(one, two, { timeout: DIFF_MS })),
      () => setFailed(true),
    );
  }, [wanted, many]);
  const texts = answers.map(({ run }) => (run.live ? "" : run.answer));
  const differences = useMemo(() => {
    if (!diff || !wanted) return new Map<number, Difference>();
    return new Map(
      answers.flatMap(({ index, run }): [number, Difference][] => {
        if (index === base.index || run.live || !run.answer) return [];
        const pieces = piecesOf(diff, base.run.answer, run.answer);
        return [[index, { pieces, like: pieces && likeness(pieces), rewritten: !pieces || isRewritten(pieces) }]];
      }),
    );
    // Depends on the texts themselves, so that a growing sibling does not compare the finished ones again
  }, [diff, wanted, base.index, base.run.live, texts.join("\u0000")]);
  return { differences, failed };
}

register("compare", CompareView);
