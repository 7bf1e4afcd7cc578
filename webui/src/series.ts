import type { Line } from "./charts/chart";
import type { MetricRecord } from "./model";

// Metric records to chart series. Kept pure so that a test can hold it: gaps stay null, times ascend,
// and a restart (a step that goes back) does not reorder anything.

export const MAX_POINTS = 2000;

export function append(records: MetricRecord[], added: MetricRecord[]): MetricRecord[] {
  const newest = records.at(-1)?.t ?? -Infinity;
  const fresh = added.filter((record) => record.t > newest);
  const all = [...records, ...fresh];
  return all.length > MAX_POINTS ? all.slice(all.length - MAX_POINTS) : all;
}

export function times(records: MetricRecord[]): number[] {
  return records.map((record) => record.t);
}

export function line(records: MetricRecord[], label: string, colour: string, pick: (record: MetricRecord) => number | null | undefined): Line {
  return { label, colour, values: records.map((record) => pick(record) ?? null) };
}

// How many samples the fullest line has: a line through one point is nothing to be seen.
export function sampleCount(lines: Line[]): number {
  return Math.max(0, ...lines.map((line) => line.values.filter((value) => value !== null).length));
}

export const SPARSE = 3;
const ALONE_S = 30;

// The time axis: what the samples span; around a single one half a minute to either side, where a whole day
// would put it on the edge.
export function timeRange(at: ArrayLike<number>, from: number | null, to: number | null): [number | null, number | null] {
  const only = at.length === 1 ? at[0] : undefined;
  return only === undefined ? [from, to] : [only - ALONE_S, only + ALONE_S];
}

const COLOURS = 6;

// One line per length bucket of the hidden-states queue, shortest first.
export function bucketLines(records: MetricRecord[]): Line[] {
  const edges = new Set<number>();
  for (const record of records) for (const bucket of record.queue?.buckets ?? []) edges.add(bucket.upto);
  return [...edges]
    .sort((a, b) => a - b)
    .map((upto, index) => line(records, `≤${upto}`, `--series-${(index % COLOURS) + 1}`, (record) => record.queue?.buckets?.find((bucket) => bucket.upto === upto)?.depth));
}
