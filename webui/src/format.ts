// Numbers and times as people read them. Unknown stays unknown: null becomes an en dash, never 0.

export const UNKNOWN = "–";

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function integer(value: number | null | undefined): string {
  return value == null ? UNKNOWN : grouped.format(value);
}

export function decimal(value: number | null | undefined, digits = 2): string {
  return value == null ? UNKNOWN : value.toFixed(digits);
}

export function percent(ratio: number | null | undefined): string {
  return ratio == null ? UNKNOWN : `${Math.round(ratio * 100)} %`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value: number | null | undefined): string {
  if (value == null) return UNKNOWN;
  let scaled = value;
  let unit = 0;
  while (scaled >= 1024 && unit < BYTE_UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? scaled : scaled.toFixed(scaled < 10 ? 1 : 0)} ${BYTE_UNITS[unit]}`;
}

// "45s", "12m 5s", "2h 15m", "3d 4h"
export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return UNKNOWN;
  const whole = Math.max(0, Math.floor(seconds));
  const days = Math.floor(whole / 86400);
  const hours = Math.floor((whole % 86400) / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  if (days > 0) return `${days}d ${hours}h`;
  if (hours > 0) return `${hours}h ${minutes}m`;
  if (minutes > 0) return `${minutes}m ${whole % 60}s`;
  return `${whole}s`;
}

export function ago(iso: string | null | undefined, nowMs: number): string {
  if (!iso) return UNKNOWN;
  const seconds = (nowMs - Date.parse(iso)) / 1000;
  return seconds < 2 ? "just now" : `${duration(seconds)} ago`;
}

export function utc(iso: string | null | undefined): string {
  return iso ? new Date(iso).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "";
}

// Log text is shown as text: terminal escapes and other control characters never reach the page.
// eslint-disable-next-line no-control-regex
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;

export function plainText(line: string): string {
  const afterReturn = line.slice(line.lastIndexOf("\r", line.length - 2) + 1);
  return afterReturn.replace(ESCAPES, "").replace(/\r/g, "");
}
