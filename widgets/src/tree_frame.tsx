/** The frame of a view that came with the chunk of trees. */

import type { ComponentChildren } from "preact";

import { StyledFrame } from "./more";
import css from "./trees.css";

export function TreeFrame({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <StyledFrame label={label} css={css}>
      {children}
    </StyledFrame>
  );
}
