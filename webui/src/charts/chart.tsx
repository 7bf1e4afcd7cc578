import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { SPARSE, sampleCount, timeRange } from "../series";
import { theme } from "../theme";

export interface Line {
  label: string;
  colour: string; // name of a CSS variable
  values: (number | null)[];
}

interface Props {
  title: string;
  unit: string;
  times: number[];
  lines: Line[];
  format: (value: number | null) => string;
}

const HEIGHT = 150;

function cssVariable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function options(props: Props, width: number): uPlot.Options {
  const isSparse = sampleCount(props.lines) < SPARSE;
  const axis = { stroke: cssVariable("--text-soft"), grid: { stroke: cssVariable("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false },
    scales: { x: { time: true, range: (self, from, to) => timeRange(self.data[0], from, to) as uPlot.Range.MinMax } },
    axes: [
      { ...axis, values: "{HH}:{mm}:{ss}", space: 70 },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => props.format(tick)) },
    ],
    series: [
      {},
      // width 1 keeps uPlot on its fast path; gaps stay gaps
      ...props.lines.map((line) => ({ label: line.label, stroke: cssVariable(line.colour), width: 1, spanGaps: false, points: { show: isSparse, size: 8, fill: cssVariable(line.colour) } })),
    ],
  };
}

// One uPlot instance per chart: data is set per tick, a change of lines, width or theme builds it anew.
export function Chart(props: Props) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const data = [props.times, ...props.lines.map((line) => line.values)] as uPlot.AlignedData;
  const samples = sampleCount(props.lines);
  const shape = `${theme.value}|${samples < SPARSE}|${props.lines.map((line) => line.label + line.colour).join(",")}`;

  useEffect(() => {
    const element = host.current;
    if (!element) return undefined;
    plot.current = new uPlot(options(props, element.clientWidth || 300), data, element);
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    plot.current?.setData(data);
  }, [props.times, props.lines]);

  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{props.title}</span>
        <span class="chart-values">
          {props.lines.map((line) => (
            <span key={line.label} class="chart-value">
              <i style={{ background: `var(${line.colour})` }} aria-hidden="true" />
              {props.lines.length > 1 && <span class="soft">{line.label} </span>}
              {props.format(line.values.at(-1) ?? null)}
            </span>
          ))}
          <span class="soft">{props.unit}</span>
        </span>
      </figcaption>
      <div ref={host} class="plot" role="img" aria-label={`${props.title} over time, newest ${props.lines.map((line) => `${line.label} ${props.format(line.values.at(-1) ?? null)}`).join(", ")}`} />
      {samples < 2 && <p class={samples === 0 ? "chart-empty" : "chart-empty aside"}>{samples === 0 ? "no samples yet" : "one sample so far"}</p>}
    </figure>
  );
}
