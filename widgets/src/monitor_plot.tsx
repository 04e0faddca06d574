/** One plot of the monitor over time. The chart library is fetched on first use; without it the figures beside it stay. */

import { useEffect, useRef, useState } from "preact/hooks";
import type uPlotType from "uplot";

import { chunk } from "./chunks";
import { giveStyle } from "./more";

export interface PlotData {
  /** Seconds relative to now, ascending, all <= 0. */
  readonly t: readonly number[];
  readonly y: readonly (number | null)[];
}

/** A colour token as the canvas needs it. `light-dark()` resolves only on an element, so one is asked. */
function colour(box: HTMLElement, name: string): string {
  const probe = box.ownerDocument.createElement("span");
  probe.style.color = `var(${name})`;
  box.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export function Plot(props: {
  data: PlotData;
  window: number;
  top: number;
  height: number;
  stepped: boolean;
  label: string;
  group: string;
  onHover: (index: number | null) => void;
}) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlotType | null>(null);
  const scale = useRef(props);
  scale.current = props;
  const [failed, setFailed] = useState(false);

  useEffect(() => {
    const el = box.current;
    if (!el) return;
    let over = false;
    let watch: ResizeObserver | null = null;
    chunk("chart").then(
      ({ uPlot, css }) => {
        if (over) return;
        giveStyle(el, css);
        const { height, stepped } = scale.current;
        const path = stepped ? uPlot.paths.stepped!({ align: 1 }) : uPlot.paths.linear!();
        const made = new uPlot(
          {
            width: Math.max(60, el.clientWidth),
            height,
            pxAlign: 0,
            legend: { show: false },
            padding: [3, 0, 0, 0],
            cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 }, sync: { key: props.group } },
            scales: { x: { time: false, range: () => [-scale.current.window, 0] }, y: { range: () => [0, scale.current.top * 1.08] } },
            axes: [{ show: false }, { show: false }],
            series: [
              {},
              {
                stroke: () => colour(el, "--mlxnb-seq-5"),
                fill: () => colour(el, "--mlxnb-plot-fill"),
                width: 1.5,
                points: { show: false },
                paths: path,
                spanGaps: false,
              },
            ],
            hooks: { setCursor: [(u: uPlotType) => scale.current.onHover(u.cursor.idx ?? null)] },
          },
          [[...scale.current.data.t], [...scale.current.data.y]] as uPlotType.AlignedData,
          el,
        );
        plot.current = made;
        watch = new ResizeObserver(() => made.setSize({ width: Math.max(60, el.clientWidth), height }));
        watch.observe(el);
      },
      () => setFailed(true),
    );
    return () => {
      over = true;
      watch?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);

  useEffect(() => {
    plot.current?.setData([[...props.data.t], [...props.data.y]] as uPlotType.AlignedData);
  }, [props.data, props.window, props.top]);

  return (
    <div class="mlxnb-mon-plot" ref={box} style={`height: ${props.height}px`} role="img" aria-label={props.label}>
      {failed && <span class="mlxnb-2">The chart could not be loaded.</span>}
    </div>
  );
}
