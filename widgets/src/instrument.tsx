/** The frame of a view that came with the chunk of instruments. */

import type { ComponentChildren } from "preact";

import css from "./instruments.css";
import { StyledFrame } from "./more";

export function Instrument({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <StyledFrame label={label} css={css}>
      {children}
    </StyledFrame>
  );
}
