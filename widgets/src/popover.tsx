/** One token's story: what it is, where it came from, how likely it was, and what else could have stood there. */

import type { RefObject } from "preact";
import { useEffect, useLayoutEffect } from "preact/hooks";

import { duration, probability } from "./format";
import type { BranchAt } from "./inspector";
import { entropyOf, labelText, latencyOf, probabilityOf } from "./layout";
import type { AlternativeData, TokenData } from "./parse";
import { Icon, OWN_KEYS, PROVENANCE } from "./parts";

interface Props {
  id: string;
  boxRef: RefObject<HTMLDivElement | null>;
  tokens: readonly TokenData[];
  index: number;
  anchor: HTMLElement;
  onBranch: BranchAt | null;
  onHold: () => void;
  onLeave: () => void;
  onClose: (refocus: boolean) => void;
}

/** The alternatives with the chosen token among them, likeliest first, as they were captured. */
export function alternatives(token: TokenData): readonly (AlternativeData & { readonly chosen: boolean })[] {
  const all = token.top.map((other) => ({ ...other, chosen: other.id === token.id }));
  if (all.length > 0 && !all.some((other) => other.chosen)) {
    all.push({ id: token.id, text: token.text, logprob: token.logprob, masked: null, chosen: true });
  }
  return all;
}

function place(box: HTMLElement, anchor: HTMLElement): void {
  const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const below = at.bottom + 14;
  const fits = below + size.height <= innerHeight - 4 || at.top < size.height + 12;
  box.style.left = `${Math.max(4, Math.min(at.left - 12, innerWidth - size.width - 4))}px`;
  box.style.top = `${fits ? below : at.top - size.height - 6}px`;
}

export function TokenPopover(props: Props) {
  const { id, boxRef, tokens, index, anchor, onBranch, onClose } = props;
  const token = tokens[index] as TokenData;
  useLayoutEffect(() => {
    const box = boxRef.current;
    if (!box) return;
    // The top layer: no output area clips it, and it adds no scroll bar to one.
    if (typeof box.showPopover === "function" && !box.matches(":popover-open")) box.showPopover();
    place(box, anchor);
  }, [anchor, index]);
  useEffect(() => {
    const away = () => onClose(false);
    const scrolled = (event: Event) => {
      if (event.target instanceof Node && boxRef.current?.contains(event.target)) return;
      if (boxRef.current) place(boxRef.current, anchor);
    };
    const pressed = (event: Event) => {
      const path = event.composedPath();
      if (!path.includes(anchor) && !(boxRef.current && path.includes(boxRef.current))) away();
    };
    addEventListener("scroll", scrolled, { capture: true, passive: true });
    addEventListener("pointerdown", pressed, true);
    return () => {
      removeEventListener("scroll", scrolled, true);
      removeEventListener("pointerdown", pressed, true);
    };
  }, [anchor]);
  const others = alternatives(token);
  return (
    <div
      id={id}
      class="mlxnb-pop mlxnb-pop-fixed"
      ref={boxRef}
      popover="manual"
      {...OWN_KEYS}
      role="dialog"
      aria-label={`Token ${labelText(token.text)}`}
      onPointerEnter={props.onHold}
      onPointerLeave={props.onLeave}
      onKeyDown={(event) => {
        const keys: Readonly<Record<string, number>> = { ArrowDown: 1, ArrowUp: -1 };
        const step = keys[event.key];
        if (event.key === "Escape") onClose(true);
        else if (step) moveFocus(event.currentTarget, step);
        else return;
        event.preventDefault();
        event.stopPropagation();
      }}
    >
      <div class="mlxnb-pop-head">
        <b class="mlxnb-mono">
          <TokenName text={token.text} />
        </b>
        <span class="mlxnb-2 mlxnb-grow">
          token {token.id} · {PROVENANCE[token.origin].name}
          {token.byHand ? " · chosen by hand" : ""}
        </span>
      </div>
      <Facts tokens={tokens} index={index} />
      {others.length > 0 && (
        <ul class="mlxnb-alts">
          {others.map((other) => (
            <li key={other.id}>
              <Alternative other={other} most={Math.max(...others.map(p))} onBranch={onBranch && (() => onBranch(index, other.id))} />
            </li>
          ))}
        </ul>
      )}
      <div class="mlxnb-pop-foot">
        <span class="mlxnb-grow">{footText(token, others)}</span>
        {onBranch && (
          <span class="mlxnb-nowrap">
            <kbd class="mlxnb-kbd">↵</kbd> branch here
          </span>
        )}
      </div>
    </div>
  );
}

const p = (other: AlternativeData): number => (other.logprob === null ? 0 : Math.exp(Math.min(0, other.logprob)));

function footText(token: TokenData, others: readonly AlternativeData[]): string {
  const masked = others.find((other) => other.masked !== null);
  if (masked) return `Struck out: ${masked.masked}`;
  const says = PROVENANCE[token.origin].says;
  return says.charAt(0).toUpperCase() + says.slice(1);
}

function moveFocus(box: HTMLElement, step: number): void {
  const buttons = [...box.querySelectorAll<HTMLElement>("button")];
  const active = (box.getRootNode() as Document | ShadowRoot).activeElement;
  const now = buttons.indexOf(active as HTMLElement);
  buttons[(now + step + buttons.length) % buttons.length]?.focus();
}

/** A token's text in one line. The space before a word is a part of the token, so it is shown. */
function TokenName({ text }: { text: string }) {
  const label = labelText(text);
  return label.startsWith(" ") ? (
    <>
      <span class="mlxnb-space">␣</span>
      {label.slice(1)}
    </>
  ) : (
    label
  );
}

function Facts({ tokens, index }: { tokens: readonly TokenData[]; index: number }) {
  const token = tokens[index] as TokenData;
  const [likely, bits, time] = [probabilityOf(token), entropyOf(token), latencyOf(tokens, index)];
  const facts: readonly (readonly [string, string | null])[] = [
    ["p", likely === null ? null : probability(likely)],
    ["rank", token.rank === null ? null : String(token.rank + 1)],
    ["entropy", bits === null ? null : `≥ ${bits.toFixed(2)}\u2009bit`],
    ["time", time === null ? (token.t === null ? null : `${duration(token.t)} in`) : duration(time)],
  ];
  return (
    <dl class="mlxnb-facts">
      {facts.map(([label, figure]) =>
        figure === null ? null : (
          <div key={label}>
            <dt>{label}</dt>
            <dd>{figure}</dd>
          </div>
        ),
      )}
    </dl>
  );
}

function Alternative({ other, most, onBranch }: { other: AlternativeData & { chosen: boolean }; most: number; onBranch: (() => void) | null }) {
  const share = most > 0 ? (100 * p(other)) / most : 0;
  const inner = (
    <>
      {other.masked !== null ? <Icon name="mask" /> : other.chosen ? <Icon name="check" /> : <span />}
      <code>
        <span>
          <TokenName text={other.text} />
        </span>
      </code>
      <span class="mlxnb-pbar">
        <span style={`width: ${share.toFixed(0)}%`} />
      </span>
      <span class="mlxnb-num">{probability(p(other))}</span>
    </>
  );
  const classes = `mlxnb-alt${other.masked !== null ? " mlxnb-alt-masked" : ""}${other.chosen ? " mlxnb-alt-chosen" : ""}`;
  const words = `${labelText(other.text)}, probability ${p(other).toFixed(3)}`;
  if (!onBranch || other.masked !== null) {
    return (
      <div class={classes} title={other.masked ?? (other.chosen ? "chosen" : undefined)}>
        {inner}
      </div>
    );
  }
  return (
    <button type="button" class={classes} aria-label={`Branch with ${words}${other.chosen ? ", chosen" : ""}`} title="Branch: go on from here with this token" onClick={onBranch}>
      {inner}
    </button>
  );
}
