import { describe, expect, it } from "vitest";
import { LogBuffer, MAX_LINES } from "./log";

const encode = (text: string) => new TextEncoder().encode(text);

describe("log buffer", () => {
  it("joins lines and characters that were cut between two pieces", () => {
    const all = encode("first é line\nsecond\n");
    for (let cut = 0; cut <= all.length; cut += 1) {
      const log = new LogBuffer(100);
      log.add(all.slice(0, cut), 100);
      log.add(all.slice(cut), 100 + cut);
      expect(log.lines).toEqual(["first é line", "second"]);
      expect(log.nextOffset).toBe(100 + all.length);
    }
  });
  it("refuses a piece that is not the next one", () => {
    const log = new LogBuffer(0);
    log.add(encode("a\n"), 0);
    expect(() => log.add(encode("a\n"), 0)).toThrow("expected 2");
  });
  it("keeps the newest lines and counts what it dropped", () => {
    const log = new LogBuffer(0);
    log.add(encode("x\n".repeat(MAX_LINES + 5)), 0);
    expect(log.lines.length).toBe(MAX_LINES);
    expect(log.dropped).toBe(5);
  });
  it("shows the unfinished last line and shortens a huge one", () => {
    const log = new LogBuffer(0);
    log.add(encode("50%\r75%"), 0);
    expect(log.tail).toBe("75%");
    const huge = new LogBuffer(0);
    huge.add(encode("y".repeat(1_000_000) + "\n"), 0);
    expect(huge.lines[0]?.length).toBeLessThan(4_100);
  });
});
