import { describe, expect, it } from "vitest";
import type { MetricRecord } from "./model";
import { append, bucketLines, line, MAX_POINTS } from "./series";

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
