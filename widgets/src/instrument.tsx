/** The frame of a view that came with the chunk of instruments: it brings their style sheet. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

import css from "./instruments.css";
import { giveStyle } from "./more";
import { Frame, OWN_KEYS } from "./parts";

export function Instrument({ label, children }: { label: string; children: ComponentChildren }) {
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
