/** Parts that compare, chat, monitor, playground and stepper share beyond parts.tsx, and the way they send commands. */

import type { ComponentChildren } from "preact";
import { useCallback, useLayoutEffect, useRef, useState } from "preact/hooks";

import type { Host } from "./host";
import { visibleText } from "./markdown";
import { field, num } from "./parse";
import { Frame, OWN_KEYS } from "./parts";
import { maybe } from "./read";

export { visibleText };

export type MoreIcon = "up" | "down" | "table" | "pause" | "hand" | "send";

export function Mark({ name, title }: { name: MoreIcon; title?: string }) {
  return <i class="mlxnb-i" style={`--i: var(--mlxnb-i-${name})`} aria-hidden="true" title={title} />;
}

export function Switch(props: { on: boolean; label: string; title?: string; disabled?: boolean; children?: string; onChange: () => void }) {
  return (
    <button
      type="button"
      class="mlxnb-switch"
      role="switch"
      aria-checked={props.on}
      aria-label={props.label}
      title={props.title}
      disabled={props.disabled}
      onClick={props.onChange}
    >
      {props.children ?? props.label}
    </button>
  );
}

const SIGNS: Readonly<Record<string, string>> = {
  " ": "␣",
  "\n": "↵",
  "\r": "␍",
  "\t": "⇥",
  "\u00a0": "⍽",
  "\u200b": "zero-width space",
  "\ufeff": "byte order mark",
};

/** A token's text with its outer spaces and its control characters made visible, so that no two tokens look alike. */
export function TokenText({ text }: { text: string }) {
  if (text === "") return <span class="mlxnb-2">(empty)</span>;
  const [, head = "", body = "", tail = ""] = /^(\s*)([\s\S]*?)(\s*)$/.exec(text) ?? [];
  const signs = (part: string) => [...part].map((c) => SIGNS[c] ?? `U+${c.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}`).join("");
  return (
    <>
      {head && <span class="mlxnb-space">{signs(head)}</span>}
      {body && <code dir="auto">{body.replace(/[\u0000-\u001f\u007f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, signs)}</code>}
      {tail && body && <span class="mlxnb-space">{signs(tail)}</span>}
    </>
  );
}

/** The same as words, for labels. */
export const spoken = (text: string): string =>
  text.trim() ? visibleText(text.trim()) : text.includes("\n") ? "newline" : text.includes("\t") ? "tab" : text ? "space" : "empty token";

export interface Act {
  /** The command on its way; null if none. */
  readonly busy: string | null;
  readonly error: string;
  /** True once the kernel took it. A whole record as the answer replaces the one shown. Never rejects. */
  send(name: string, args?: object): Promise<boolean>;
  dismiss(): void;
}

/** One command at a time. What goes wrong becomes a sentence; the state of the view stays as it was. */
export function useAct(host: Host): Act {
  const [busy, setBusy] = useState<string | null>(null);
  const [error, setError] = useState("");
  const sending = useRef(false);
  const send = useCallback(
    async (name: string, args: object = {}): Promise<boolean> => {
      if (sending.current) return false;
      sending.current = true;
      setBusy(name);
      setError("");
      try {
        adopt(host, await host.command(name, args));
        return true;
      } catch (fault) {
        setError(fault instanceof Error && fault.message ? fault.message : "The kernel did not take this.");
        return false;
      } finally {
        sending.current = false;
        setBusy(null);
      }
    },
    [host],
  );
  return { busy, error, send, dismiss: () => setError("") };
}

/** Take an answer that is a newer record of the same kind. `epoch` counts what replaced runs: an older one comes too late. */
export function adopt(host: Host, result: unknown): void {
  const fresh = maybe(result);
  const shown = maybe(host.record.peek());
  if (!fresh || typeof field(fresh, "schema") !== "string" || (shown && field(shown, "schema") !== field(fresh, "schema"))) return;
  const epoch = (of: typeof fresh | null): number => num(of && field(of, "epoch")) ?? 0;
  if (epoch(fresh) >= epoch(shown)) host.record.value = result;
}

/** Put text on the clipboard; false where the page may not. */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** A button that says for a moment that it has copied. */
export function useCopied(): [boolean, (text: string) => void] {
  const [copied, setCopied] = useState(false);
  return [
    copied,
    (text) =>
      void copyText(text).then((done) => {
        setCopied(done);
        if (done) setTimeout(() => setCopied(false), 1500);
      }),
  ];
}

const styled = new WeakMap<Node, Set<string>>();

/** A style sheet that came with a chunk, once per document or shadow root. */
export function giveStyle(box: HTMLElement, css: string): void {
  const root = box.getRootNode();
  const given = styled.get(root) ?? new Set<string>();
  styled.set(root, given);
  if (given.has(css)) return;
  given.add(css);
  const style = box.ownerDocument.createElement("style");
  style.textContent = css;
  (root instanceof ShadowRoot ? root : box.ownerDocument.head).append(style);
}

/** The frame of a view that came with a chunk, and brings the style sheet of that chunk. */
export function StyledFrame({ label, css, children }: { label: string; css: string; children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (box.current) giveStyle(box.current, css);
  }, []);
  return (
    <div ref={box} {...OWN_KEYS}>
      <Frame label={label}>{children}</Frame>
    </div>
  );
}
