import { describe, expect, it } from "vitest";
import { ago, bytes, decimal, duration, integer, percent, plainText, UNKNOWN, utc } from "./format";

describe("numbers", () => {
  it("shows unknown as a dash and never as zero", () => {
    for (const show of [integer, decimal, percent, bytes, duration]) {
      expect(show(null)).toBe(UNKNOWN);
      expect(show(undefined)).toBe(UNKNOWN);
      expect(show(0)).not.toBe(UNKNOWN);
    }
  });
  it("groups and carries units", () => {
    expect(integer(1234567.4)).toBe("1,234,567");
    expect(percent(0.973)).toBe("97 %");
    expect(bytes(536870912)).toBe("512 MiB");
    expect(bytes(1536)).toBe("1.5 KiB");
  });
});

describe("times", () => {
  it("uses two units at most", () => {
    expect(duration(8100)).toBe("2h 15m");
    expect(duration(65)).toBe("1m 5s");
    expect(duration(273600)).toBe("3d 4h");
  });
  it("is relative, with the absolute time beside it", () => {
    expect(ago("2026-01-01T00:00:00Z", Date.parse("2026-01-01T00:00:30Z"))).toBe("30s ago");
    expect(utc("2026-01-01T00:00:00Z")).toBe("2026-01-01 00:00:00 UTC");
  });
});

describe("log text", () => {
  it("drops colours, title escapes and control characters", () => {
    expect(plainText("\x1b[31mred\x1b[0m \x1b]0;title\x07text\x00")).toBe("red text");
  });
  it("shows what a progress bar shows last", () => {
    expect(plainText("10%\r50%\r100%")).toBe("100%");
    expect(plainText("whole line\r")).toBe("whole line");
  });
});
