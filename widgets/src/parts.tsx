/** The small parts every view is made of. Text goes in as text; class names come from styles.css. */

import type { ComponentChildren, TargetedKeyboardEvent } from "preact";
import { useRef } from "preact/hooks";

export type IconName =
  | "stop" | "copy" | "branch" | "redo" | "undo" | "more" | "check" | "cross" | "mask" | "warn" | "wait" | "play" | "pin" | "edit"
  | "tool" | "moved" | "link" | "limit";

/** Every class of provenance a strip, legend or lane can name: the five origins of produced tokens and the two of prompts. */
export type Provenance = "cached" | "prompt" | "sampled" | "filled" | "echo" | "drafted" | "forced";

export const PROVENANCE: Readonly<Record<Provenance, { readonly name: string; readonly says: string }>> = {
  cached: { name: "cached prompt", says: "taken from the cache, not computed" },
  prompt: { name: "prompt", says: "prefilled now" },
  sampled: { name: "sampled", says: "the model's own draw" },
  filled: { name: "asserted fill", says: "determined by the template, appended without sampling" },
  echo: { name: "echo", says: "copied from earlier text, verified by the sampler" },
  drafted: { name: "draft", says: "guessed by a drafter, accepted by the sampler" },
  forced: { name: "forced", says: "the only token the grammar allowed" },
};

export function Icon({ name }: { name: IconName }) {
  return <i class="mlxnb-i" style={`--i: var(--mlxnb-i-${name})`} aria-hidden="true" />;
}

export function Glyph({ of }: { of: Provenance }) {
  return <i class={`mlxnb-g mlxnb-o-${of}`} aria-hidden="true" />;
}

/** For an element that has keys of its own: JupyterLab's shortcuts come first otherwise, and an arrow would leave the cell. */
export const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" } as const;

/** The frame of a view. */
export function Frame({ label, children }: { label: string; children: ComponentChildren }) {
  // MathJax of the page reads no formula in here: what a model wrote is shown as it is.
  return (
    <section class="mlxnb mathjax_ignore tex2jax_ignore" aria-label={label}>
      {children}
    </section>
  );
}

/** All there is to say where nothing can be drawn. */
export function Notice({ text }: { text: string }) {
  return (
    <Frame label="mlxnb output">
      <div class="mlxnb-note" role="note">
        <Icon name="warn" />
        <span class="mlxnb-grow">{text}</span>
      </div>
    </Frame>
  );
}

export function Bar({ children }: { children: ComponentChildren }) {
  return <div class="mlxnb-bar">{children}</div>;
}

export const Grow = () => <span class="mlxnb-grow" />;

/** Tabs with arrow keys. `prefix` makes ids unique: panels are `${prefix}-panel-${value}`, see tabPanel(). */
export function Tabs<T extends string>(props: {
  label: string;
  prefix: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}) {
  const { label, prefix, value, options, onChange } = props;
  const box = useRef<HTMLDivElement>(null);
  const onKey = (event: TargetedKeyboardEvent<HTMLDivElement>) => {
    const now = options.findIndex(([name]) => name === value);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = event.key === "Home" ? 0 : event.key === "End" ? options.length - 1 : step ? (now + step + options.length) % options.length : -1;
    const target = options[next];
    if (!target) return;
    event.preventDefault();
    event.stopPropagation();
    onChange(target[0]);
    box.current?.querySelectorAll("button")[next]?.focus();
  };
  return (
    <div class="mlxnb-tabs" role="tablist" aria-label={label} ref={box} onKeyDown={onKey} {...OWN_KEYS}>
      {options.map(([name, text]) => (
        <button
          key={name}
          type="button"
          role="tab"
          id={`${prefix}-tab-${name}`}
          aria-controls={`${prefix}-panel-${name}`}
          aria-selected={name === value}
          tabIndex={name === value ? 0 : -1}
          data-label={text}
          onClick={() => onChange(name)}
        >
          {text}
        </button>
      ))}
    </div>
  );
}

/** What a tab's panel needs to be one. */
export const tabPanel = (prefix: string, name: string) =>
  ({ role: "tabpanel", id: `${prefix}-panel-${name}`, "aria-labelledby": `${prefix}-tab-${name}` }) as const;

/** A row of choices of which one is in force. */
export function Seg<T extends string>(props: { label: string; value: T; options: readonly (readonly [T, string])[]; onChange: (value: T) => void }) {
  return (
    <span class="mlxnb-seg" role="group" aria-label={props.label}>
      {props.options.map(([name, text]) => (
        <button key={name} type="button" aria-pressed={name === props.value} onClick={() => props.onChange(name)}>
          {text}
        </button>
      ))}
    </span>
  );
}

export function Button(props: {
  onClick: () => void;
  icon?: IconName;
  /** With `quiet` and no children: an icon alone, whose label is also its tooltip. */
  label?: string;
  kind?: "plain" | "primary" | "quiet";
  disabled?: boolean;
  children?: ComponentChildren;
}) {
  const { kind = "plain", icon, label, children } = props;
  const classes = ["mlxnb-btn", kind !== "plain" && `mlxnb-btn-${kind}`, !children && "mlxnb-btn-icon"].filter(Boolean).join(" ");
  return (
    <button type="button" class={classes} aria-label={label} title={label} disabled={props.disabled} onClick={props.onClick}>
      {icon && <Icon name={icon} />}
      {children}
    </button>
  );
}

export type Tone = "live" | "ok" | "warn" | "err" | "quiet";

/** One word and one number on how it is going. */
export function State({ tone, icon, children }: { tone: Tone; icon?: IconName; children: ComponentChildren }) {
  return (
    <span class={`mlxnb-state${tone === "quiet" ? "" : ` mlxnb-${tone}`}`}>
      {icon && <Icon name={icon} />}
      <span>{children}</span>
    </span>
  );
}

export function Chip({ text }: { text: string }) {
  return (
    <span class="mlxnb-chip" title={text} dir="auto">
      {text}
    </span>
  );
}

/** A model without its organisation or folder, which the whole name has. */
export const shortModel = (name: string): string => name.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) || name;

export function ModelChip({ name }: { name: string }) {
  return (
    <span class="mlxnb-chip" title={name} dir="auto">
      {shortModel(name)}
    </span>
  );
}

/** What a screen reader says and nobody sees: not every token, but the end that a person waits for, and what they did. */
export function Announce({ live, said = "" }: { live: boolean; said?: string }) {
  const seen = useRef(live);
  seen.current ||= live;
  // An output that was over when it came has nothing to say.
  const ended = seen.current && !live;
  return (
    <span class="mlxnb-sr" role="status">
      {live ? "" : said || (ended ? "The answer has ended." : "")}
    </span>
  );
}

/** A line that says what went wrong or why something is absent. */
export function Note({ tone, icon = "warn", title, children, hint }: { tone?: "warn" | "err"; icon?: IconName; title?: string; children?: ComponentChildren; hint?: string }) {
  return (
    <div class="mlxnb-note" role={tone === "err" ? "alert" : "note"}>
      <span class={tone ? `mlxnb-${tone}` : "mlxnb-2"}>
        <Icon name={icon} />
      </span>
      <div class="mlxnb-grow">
        {title && <b>{title} </b>}
        {children}
        {hint && <div class="mlxnb-note-hint">{hint}</div>}
      </div>
    </div>
  );
}

/** A thin line at the foot of the bar. fraction: 0 to 1. */
export function Progress({ fraction, label }: { fraction: number; label: string }) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, fraction)));
  return (
    <div class="mlxnb-progress" role="progressbar" aria-label={label} aria-valuenow={percent} aria-valuemin={0} aria-valuemax={100}>
      <span style={`width: ${percent}%`} />
    </div>
  );
}

export interface Part {
  readonly of: Provenance;
  readonly count: number;
  readonly label: string;
  /** What is known of some of them, behind the count. */
  readonly note?: string;
}

/** One strip: areas in proportion to counts, and every count written out. rest: what is still to come, outlined. */
export function Strip({ title, parts, rest = 0 }: { title: string; parts: readonly Part[]; rest?: number }) {
  const shown = parts.filter((part) => part.count > 0);
  const total = shown.reduce((sum, part) => sum + part.count, 0);
  const words = shown.map((part) => `${part.count} ${part.label}${part.note ? ` ${part.note}` : ""}`).join(", ");
  return (
    <div>
      <div class="mlxnb-strip" role="img" aria-label={`${title}: ${words || "none"}`}>
        {shown.map((part) => (
          <span key={part.of} class={`mlxnb-o-${part.of}`} style={`flex: ${part.count} 1 0`} />
        ))}
        {rest > 0 && <span class="mlxnb-todo" style={`flex: ${rest} 1 0`} />}
        {total === 0 && rest === 0 && <span class="mlxnb-todo" style="flex: 1 1 0" />}
      </div>
      <div class="mlxnb-counts">
        <span>
          <b>
            {title} {total.toLocaleString("en")}
          </b>
        </span>
        {shown.map((part) => (
          <span key={part.of}>
            <Glyph of={part.of} />
            {part.label} <b>{part.count.toLocaleString("en")}</b>
            {part.note && ` ${part.note}`}
          </span>
        ))}
      </div>
    </div>
  );
}

/** Label and figure pairs in a row; a figure that is null is absent. */
export function Metrics({ items }: { items: readonly (readonly [string, string | null])[] }) {
  const known = items.filter((item): item is readonly [string, string] => item[1] !== null);
  if (known.length === 0) return null;
  return (
    <dl class="mlxnb-metrics">
      {known.map(([label, figure]) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd>{figure}</dd>
        </div>
      ))}
    </dl>
  );
}

let ids = 0;

/** An id for the parts of one view on this page. */
export function usePrefix(): string {
  const ref = useRef<string | null>(null);
  ref.current ??= `mlxnb-${++ids}`;
  return ref.current;
}
