/** The token inspector: choice of metric, legend, the lane of tokens, and the popover with a token's story. */

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";

import { countOrigins } from "./foot";
import { TokenLane } from "./lane";
import { captured, METRIC_NAMES, scaleFor, type Metric, type Scale } from "./layout";
import { ORIGINS, type RunData } from "./parse";
import { Glyph, OWN_KEYS, PROVENANCE, Seg, usePrefix } from "./parts";
import { TokenPopover } from "./popover";

export type BranchAt = (at: number, token: number) => void;

export function TokenInspector({ run, onBranch }: { run: RunData; onBranch: BranchAt | null }) {
  const prefix = usePrefix();
  const picked = useSignal<Metric | null>(null);
  const only = useSignal("");
  const { metrics, reason } = captured(run.tokens);
  const metric = picked.value && metrics.includes(picked.value) ? picked.value : (metrics[0] ?? null);
  const scale = useScale(metric, run);
  const counts = countOrigins(run.tokens);
  const used = ORIGINS.filter((origin) => counts[origin] > 0);
  return (
    <>
      <div class="mlxnb-tools mlxnb-encoding">
        <span>Background</span>
        <span class="mlxnb-encoding-row">
          {metric && <Seg label="Background" value={metric} options={metrics.map((name) => [name, METRIC_NAMES[name]] as const)} onChange={(name) => (picked.value = name)} />}
          {scale && <Ramp scale={scale} />}
          {reason && run.tokens.length > 0 && <span>{reason}</span>}
        </span>
        <span>Underline</span>
        <ul class="mlxnb-legend" aria-label="Origin of tokens; press one to dim the others">
          {used.map((origin) => (
            <li key={origin}>
              <button type="button" title={PROVENANCE[origin].says} aria-pressed={only.value === "" || only.value === origin} onClick={() => (only.value = only.value === origin ? "" : origin)}>
                <Glyph of={origin} />
                <span class={`mlxnb-sample mlxnb-o-${origin}`}>{PROVENANCE[origin].name}</span>
              </button>
            </li>
          ))}
        </ul>
      </div>
      <Lane run={run} scale={scale} only={only.value} prefix={prefix} onBranch={onBranch} />
    </>
  );
}

/** A scale that stays the same object while it means the same, so that the lane repaints only when it must. */
function useScale(metric: Metric | null, run: RunData): Scale | null {
  const kept = useRef<{ key: string; scale: Scale | null }>({ key: "", scale: null });
  // Latency fits its steps to the run: at the first tokens, then whenever there are four times as many, and at the end.
  const stage = metric === "latency" ? `${run.live} ${Math.floor(Math.log2(Math.max(1, run.tokens.length)) / 2)}` : "";
  const key = `${run.id} ${metric} ${stage}`;
  if (kept.current.key !== key) {
    const scale = metric ? scaleFor(metric, run.tokens) : null;
    const same = kept.current.scale && scale && kept.current.scale.metric === scale.metric && kept.current.scale.labels.join() === scale.labels.join();
    kept.current = { key, scale: same ? kept.current.scale : scale };
  }
  return kept.current.scale;
}

export function Ramp({ scale }: { scale: Scale }) {
  return (
    <>
      <span>{scale.unit}</span>
      <span class="mlxnb-ramp" data-metric={scale.ramp} role="img" aria-label={`Background scale, ${scale.unit} ${scale.labels.join(", ")}`}>
        {scale.labels.map((label, step) => (
          <span key={label} class={step > 0 ? `mlxnb-m${step}` : ""}>
            {label}
          </span>
        ))}
      </span>
    </>
  );
}

function Lane(props: { run: RunData; scale: Scale | null; only: string; prefix: string; onBranch: BranchAt | null }) {
  const { run, scale, only, prefix, onBranch } = props;
  const box = useRef<HTMLDivElement>(null);
  const lane = useRef<TokenLane | null>(null);
  const open = useSignal<{ index: number; anchor: HTMLElement } | null>(null);
  const popover = useRef<HTMLDivElement>(null);
  const branch = useRef(onBranch);
  branch.current = onBranch;
  const tokens = useRef(run.tokens);
  tokens.current = run.tokens;
  const popId = `${prefix}-pop`;

  const show = (next: { index: number; anchor: HTMLElement } | null) => {
    open.value = next;
    lane.current?.expanded(next?.index ?? -1, popId);
  };
  useEffect(
    () => () => {
      lane.current?.dispose();
    },
    [],
  );
  useLayoutEffect(() => {
    if (!box.current) return;
    lane.current ??= new TokenLane(box.current, {
      open: (index, anchor) => show({ index, anchor }),
      close: () => show(null),
      choose: (index) => {
        const token = tokens.current[index];
        if (token && branch.current) branch.current(index, token.id);
      },
      enter: () => {
        const first = popover.current?.querySelector<HTMLElement>("button");
        first?.focus();
        return Boolean(first);
      },
    });
    lane.current.update(run.tokens, scale, run.live);
  }, [run.tokens, run.tokens.length, scale, run.live]);

  const now = open.value;
  const token = now ? run.tokens[now.index] : undefined;
  return (
    <div class="mlxnb-body mlxnb-run-body">
      <div class="mlxnb-tokens" ref={box} data-metric={scale?.ramp ?? "unsure"} data-only={only || undefined} {...OWN_KEYS} role="group" aria-label="Tokens of the answer. Arrow keys move from token to token." />
      {run.tokens.length === 0 && <p class="mlxnb-empty">{run.live ? "No tokens yet." : "No tokens."}</p>}
      {run.tokensNote && <p class="mlxnb-empty">{run.tokensNote}</p>}
      {now && token && (
        <TokenPopover
          id={popId}
          boxRef={popover}
          tokens={run.tokens}
          index={now.index}
          anchor={now.anchor}
          onBranch={onBranch}
          onHold={() => lane.current?.hold()}
          onLeave={() => lane.current?.release()}
          onClose={(refocus) => {
            show(null);
            if (refocus) lane.current?.focus(now.index);
          }}
        />
      )}
    </div>
  );
}
