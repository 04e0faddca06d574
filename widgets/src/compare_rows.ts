/** A comparison as rows and columns: what a column holds, in what order the rows stand, and the text that a spreadsheet takes. Pure. */

import { meanP, tokensOf, type Answer, type Group } from "./compare_data";

export type Mark = 1 | -1 | 0;
export interface Column {
  name: string;
  title: string;
  numeric: boolean;
}

export function columnsOf(group: Group, baseLetter: string | null): Column[] {
  const numeric = (name: string): boolean => group.answers.every((answer) => isNumeric(answer.labels.get(name) ?? ""));
  const labels = group.names.map((name) => ({ name: `label:${name}`, title: name, numeric: numeric(name) }));
  const like = baseLetter ? [{ name: "like", title: `like ${baseLetter}`, numeric: true }] : [];
  const p = group.answers.some(({ run }) => meanP(run) !== null) ? [{ name: "p", title: "mean p", numeric: true }] : [];
  return [
    ...labels,
    { name: "text", title: "answer", numeric: false },
    ...like,
    { name: "tokens", title: "tokens", numeric: true },
    ...p,
    { name: "seconds", title: "time", numeric: true },
    { name: "mark", title: "vote", numeric: false },
  ];
}

const isNumeric = (text: string): boolean => text !== "" && Number.isFinite(Number(text));

/** What a column sorts by. `like` and `mark` belong to the reader, not to the answer. */
export function valueOf(answer: Answer, column: string, like: number | null, mark: Mark): string | number {
  if (column.startsWith("label:")) {
    const text = answer.labels.get(column.slice(6)) ?? "";
    return isNumeric(text) ? Number(text) : text;
  }
  switch (column) {
    case "text":
      return answer.run.answer;
    case "like":
      return like ?? -1;
    case "tokens":
      return tokensOf(answer.run);
    case "p":
      return meanP(answer.run) ?? -1;
    case "seconds":
      return answer.run.timing.ended ?? Number.MAX_VALUE;
    case "mark":
      return mark;
    default:
      return answer.index;
  }
}

/** A stable order of the answers by a column; numbers before words. */
export function sorted(
  answers: readonly Answer[],
  column: string,
  down: boolean,
  likes: ReadonlyMap<number, number>,
  marks: ReadonlyMap<number, Mark>,
): Answer[] {
  const value = (answer: Answer) => valueOf(answer, column, likes.get(answer.index) ?? null, marks.get(answer.index) ?? 0);
  const compare = (a: Answer, b: Answer): number => {
    const [x, y] = [value(a), value(b)];
    if (typeof x === "number" && typeof y === "number") return x - y;
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    return String(x).localeCompare(String(y));
  };
  return [...answers].sort((a, b) => (down ? -1 : 1) * compare(a, b) || a.index - b.index);
}

const MARK_NAMES = new Map<Mark, string>([
  [1, "good"],
  [-1, "bad"],
]);

/** Tab-separated values with a header, as spreadsheets and `pandas.read_clipboard` take them: quoted only where needed. */
export function tableText(group: Group, marks: ReadonlyMap<number, Mark>): string {
  const head = ["answer", ...group.names, "text", "finish_reason", "completion_tokens", "seed", "seconds", "mean_p", "vote"];
  const lines = group.answers.map(({ index, letter, labels, run }) => [
    letter,
    ...group.names.map((name) => labels.get(name) ?? ""),
    run.answer,
    run.finish ?? run.status,
    String(tokensOf(run)),
    run.seed ?? "",
    run.timing.ended?.toFixed(3) ?? "",
    meanP(run)?.toFixed(4) ?? "",
    MARK_NAMES.get(marks.get(index) ?? 0) ?? "",
  ]);
  return [head, ...lines].map((line) => line.map(quoted).join("\t")).join("\n");
}

/** A cell that a spreadsheet would run as a formula is led by an apostrophe: model text is not trusted. */
function quoted(text: string): string {
  const safe = /^[=+@\t\r]|^-(?![\d.])/.test(text) ? `'${text}` : text;
  return /["\t\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
