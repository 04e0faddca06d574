/** One block: its text, read by the kernel only now, and the facts about it. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { cellsOf, stateAt, textOfAnswer, tokensOf, type BlockState, type Edge } from "./cache_data";
import { bytes, whole } from "./format";
import type { Host } from "./host";
import { visibleText } from "./more";

const LIES: Readonly<Record<BlockState, string>> = { r: "RAM", s: "RAM and SSD", l: "RAM", m: "RAM and SSD" };

interface Props {
  edge: Edge;
  block: number;
  host: Host;
  anchor: () => HTMLElement | null;
  /** Pixels from the anchor's left edge to the middle of the block. */
  offset: number;
  onHold: () => void;
  onLeave: () => void;
  onClose: () => void;
}

export function BlockPopover(props: Props) {
  const { edge, block, host, anchor, offset, onClose } = props;
  const box = useRef<HTMLDivElement>(null);
  const [text, setText] = useState<string | null>(null);
  const [fault, setFault] = useState("");
  const part = block >= edge.blocks;
  useEffect(() => {
    if (!host.live) return;
    let here = true;
    host.command("cache.text", { edge: edge.id, block }).then(
      (told) => here && setText(textOfAnswer(told)),
      (error: Error) => here && setFault(error.message),
    );
    return () => {
      here = false;
    };
  }, [edge.id, block]);
  const place = () => {
    const [pop, at] = [box.current, anchor()?.getBoundingClientRect()];
    if (!pop || !at) return;
    const size = pop.getBoundingClientRect();
    const below = at.bottom + 10;
    const fits = below + size.height <= innerHeight - 4 || at.top < size.height + 12;
    pop.style.left = `${Math.max(4, Math.min(at.left + offset - 24, innerWidth - size.width - 4))}px`;
    pop.style.top = `${fits ? below : at.top - size.height - 8}px`;
  };
  useLayoutEffect(() => {
    const pop = box.current;
    // The top layer: no output area clips it.
    if (pop && typeof pop.showPopover === "function" && !pop.matches(":popover-open")) pop.showPopover();
    place();
  }, [text, fault]);
  useEffect(() => {
    const away = (event: Event) => {
      if (!(event.target instanceof Node && box.current?.contains(event.target))) onClose();
    };
    addEventListener("scroll", away, { capture: true, passive: true });
    return () => removeEventListener("scroll", away, true);
  }, []);
  const [from, to] = tokensOf(edge, block);
  const shown = text ?? (block === 0 ? edge.head : "");
  const leased = !part && "lm".includes(stateAt(edge, block));
  return (
    <div
      class="mlxnb-pop mlxnb-pop-fixed mlxnb-cm-pop"
      ref={box}
      popover="manual"
      role="dialog"
      aria-label={`Block ${edge.at + block}`}
      onPointerEnter={props.onHold}
      onPointerLeave={props.onLeave}
    >
      <div class="mlxnb-pop-head">
        <b>Block {whole(edge.at + block)}</b>
        <span class="mlxnb-2 mlxnb-grow">
          tokens {whole(from)} to {whole(to)}
          {part && ", part-filled"}
        </span>
      </div>
      <div class="mlxnb-cm-text" dir="auto">
        {fault ? (
          <span class="mlxnb-2">{fault}</span>
        ) : shown ? (
          <>
            {visibleText(shown)}
            {text === null && "…"}
          </>
        ) : (
          <span class="mlxnb-2">{host.live ? (text === null ? "reading…" : "The model of this block is not loaded: its text cannot be read.") : "The text of a block is read by its kernel. Run the cell again."}</span>
        )}
      </div>
      <dl class="mlxnb-facts">
        <div>
          <dt>used by</dt>
          <dd>{whole(edge.shares)}</dd>
        </div>
        <div>
          <dt>lies in</dt>
          <dd>{part ? "RAM" : LIES[stateAt(edge, block)]}</dd>
        </div>
        <div>
          <dt>about</dt>
          <dd>{bytes(edge.bytes / Math.max(1, cellsOf(edge)))}</dd>
        </div>
      </dl>
      <div class="mlxnb-pop-foot">
        <span class="mlxnb-grow">
          {edge.users.join(" · ") || "Nobody put a name to it"}
          {leased && ". A running row uses it: it stays"}
        </span>
      </div>
    </div>
  );
}
