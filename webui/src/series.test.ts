import { describe, expect, it } from "vitest";
import type { MetricRecord } from "./model";
import { append, bucketLines, line, MAX_POINTS, sampleCount, timeRange } from "./series";

const record = (t: number, loss: number | null = 1): MetricRecord => ({ t, step: t, train: { loss } });

describe("series", () => {
  it("appends only what is newer, so a snapshot and the stream may overlap", () => {
    const first = append([], [record(1), record(2)]);
    expect(append(first, [record(2), record(3)]).map((r) => r.t)).toEqual([1, 2, 3]);
  });
  it("is bounded and keeps the newest", () => {
    const all = append([], Array.from({ length: MAX_POINTS + 3 }, (_, t) => record(t)));
    expect(all.length).toBe(MAX_POINTS);
    expect(all[0]?.t).toBe(3);
  });
  it("counts the samples of the fullest line, gaps left out", () => {
    const lines = [[1, null, null], [null, 2, 3]].map((values) => ({ label: "", colour: "", values }));
    expect(sampleCount(lines)).toBe(2);
    expect(sampleCount([])).toBe(0);
  });
  it("puts a single sample into the middle of a minute", () => {
    expect(timeRange([100], 100, 86500)).toEqual([70, 130]);
    expect(timeRange([100, 101], 100, 101)).toEqual([100, 101]);
    expect(timeRange([], null, null)).toEqual([null, null]);
  });
  it("keeps null as a gap", () => {
    expect(line([record(1, 2), record(2, null)], "loss", "--series-1", (r) => r.train?.loss).values).toEqual([2, null]);
  });
  it("draws one line per bucket, shortest first, with gaps where a record has none", () => {
    const lines = bucketLines([
      { t: 1, step: 1, queue: { buckets: [{ upto: 512, depth: 3 }, { upto: 128, depth: 1 }] } },
      { t: 2, step: 2 },
    ]);
    expect(lines.map((l) => l.label)).toEqual(["≤128", "≤512"]);
    expect(lines[1]?.values).toEqual([3, null]);
  });
});
