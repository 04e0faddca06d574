/** The raw tab: the text exactly as the model produced it, and the record without its token table. */

import { visibleText } from "./markdown";
import { MAX_TEXT, type RunData } from "./parse";

/** JSON of a record with long parts named instead of written out. Anything that JSON cannot say gives "". */
export function recordText(record: unknown): string {
  const replace = (key: string, value: unknown): unknown => {
    if (key === "tokens" && Array.isArray(value)) return `${value.length} tokens`;
    if (key === "text" && typeof value === "string" && value.length > 200) return `${value.slice(0, 200)}…`;
    if (Array.isArray(value) && value.length > 100) return [...value.slice(0, 100), `… ${value.length - 100} more`];
    return value;
  };
  try {
    return visibleText((JSON.stringify(record, replace, 2) ?? "").slice(0, MAX_TEXT / 4));
  } catch {
    return "";
  }
}

export function RawText({ run, record }: { run: RunData; record: unknown }) {
  return (
    <>
      <pre class="mlxnb-raw" tabIndex={0} aria-label="Text as produced" dir="auto">
        {visibleText(run.answer)}
      </pre>
      {!run.live && (
        <details class="mlxnb-record">
          <summary>Record without its tokens</summary>
          <pre class="mlxnb-raw" tabIndex={0}>
            {recordText(record)}
          </pre>
        </details>
      )}
    </>
  );
}
