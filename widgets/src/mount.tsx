/** One way to put a view on a page, the same for live widgets, saved outputs and the gallery. */

import { h, render, type ComponentType } from "preact";
import { useErrorBoundary } from "preact/hooks";

import { chunk, type ChunkName } from "./chunks";
import type { Host } from "./host";
import { Notice } from "./parts";
import { adopt } from "./style";
import { followTheme } from "./theme";

export type ViewKind = "run" | "compare" | "chat" | "monitor" | "playground" | "stepper" | "loom" | "cache";
export type View = ComponentType<{ host: Host }>;

const views = new Map<string, View>();
/** Kinds that come with a chunk, and which. */
const ON_DEMAND: ReadonlyMap<string, ChunkName> = new Map<ViewKind, ChunkName>([
  ["monitor", "instruments"],
  ["playground", "instruments"],
  ["stepper", "instruments"],
  ["loom", "trees"],
  ["cache", "trees"],
]);

/** A view module calls this once, at import. */
export function register(kind: ViewKind, view: View): void {
  views.set(kind, view);
}

/** A view by its kind, for one that draws another; undefined if it is not loaded. */
export function viewOf(kind: ViewKind): View | undefined {
  return views.get(kind);
}

export function kinds(): readonly string[] {
  return [...views.keys()];
}

/** Draws a view into `el` and returns what takes it away again. An unknown kind or a view that throws becomes a notice. */
export function mount(el: HTMLElement, kind: string, host: Host): () => void {
  let here = true;
  const draw = () => {
    const view = views.get(kind);
    const missing = `There is no view "${String(kind).slice(0, 40)}" in this version of mlxnb.`;
    if (here) render(view ? <Guard view={view} host={host} /> : <Notice text={missing} />, el);
  };
  el.classList.add("mlxnb-root");
  const releaseStyle = adopt(el);
  const releaseTheme = followTheme(el, host.setting.theme);
  const needed = ON_DEMAND.get(kind);
  if (views.has(kind) || !needed) draw();
  else chunk(needed).then(draw, () => here && render(<Notice text="This view could not be loaded. Run the cell again." />, el));
  return () => {
    here = false;
    render(null, el);
    releaseTheme();
    releaseStyle();
  };
}

function Guard({ view, host }: { view: View; host: Host }) {
  const [error] = useErrorBoundary((fault: unknown) => console.error("mlxnb: a view failed", fault));
  if (error) return <Notice text="This output cannot be shown: the view met data it does not understand." />;
  return h(view, { host });
}
