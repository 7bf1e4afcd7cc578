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

const COLOURS = 6;

// One line per length bucket of the hidden-states queue, shortest first.
export function bucketLines(records: MetricRecord[]): Line[] {
  const edges = new Set<number>();
  for (const record of records) for (const bucket of record.queue?.buckets ?? []) edges.add(bucket.upto);
  return [...edges]
    .sort((a, b) => a - b)
    .map((upto, index) => line(records, `≤${upto}`, `--series-${(index % COLOURS) + 1}`, (record) => record.queue?.buckets?.find((bucket) => bucket.upto === upto)?.depth));
}
