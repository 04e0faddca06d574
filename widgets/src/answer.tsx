/** A Markdown text as a Preact component: `<Answer text streaming />`. */

import { useLayoutEffect, useRef } from "preact/hooks";

import { MarkdownView } from "./markdown";

export function Answer({ text, streaming, empty = "(no text)" }: { text: string; streaming: boolean; empty?: string }) {
  const box = useRef<HTMLDivElement>(null);
  const view = useRef<MarkdownView | null>(null);
  useLayoutEffect(() => {
    if (!box.current) return;
    view.current ??= new MarkdownView(box.current);
    view.current.update(text, streaming);
  }, [text, streaming]);
  return (
    <div class="mlxnb-answer">
      <div ref={box} class="mlxnb-answer-text" />
      {!text && !streaming && <p class="mlxnb-empty">{empty}</p>}
    </div>
  );
}
