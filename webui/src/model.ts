// Shapes of the public API that the page uses (docs/reference/api.md).

export interface Page<T> {
  items: T[];
  next_cursor: string | null;
}

export interface Condition {
  type: string;
  status: "true" | "false" | "unknown";
  reason: string;
  message: string;
  since: string;
}

export interface Status {
  phase?: string | null;
  phase_since?: number | null;
  step?: number | null;
  total_steps?: number | null;
  message?: string | null;
}

export interface Attempt {
  id: string;
  number: number;
  state: string;
  reason: string | null;
  message: string;
  trigger: string;
  log_path: string;
  exit_code: number | null;
  exit_signal: number | null;
  last_lines: string[];
  launch_error: { message?: string; reason?: string } | null;
  preflight?: { status: string; reason: string }[] | null;
  status: Status | null;
  last_checkpoint: { step: number; path: string; saved_at: number | string } | null;
  release: string | null;
  environment: string | null;
  started_at: string | null;
  ready_at: string | null;
  ended_at: string | null;
}

export interface Bucket {
  upto: number;
  depth: number;
}

export interface Gpu {
  index: number;
  uuid: string | null;
  name?: string | null;
  util_ratio: number | null;
  mem_used_bytes: number | null;
  mem_total_bytes?: number | null;
  power_w: number | null;
  temp_c: number | null;
  reason: string | null;
}

export interface MetricRecord {
  t: number;
  step: number | null;
  train?: { loss?: number | null; eal?: number | null; tok_s?: number | null; lr?: number | null } | null;
  queue?: { hs?: number | null; min_ready?: number | null; max_depth?: number | null; buckets?: Bucket[] | null } | null;
}

export interface GpuSnapshot {
  t: number | null; // seconds since the epoch
  gpus: Gpu[];
  reason: string | null;
  message: string | null;
}

export interface Run {
  id: string;
  name: string;
  node: string;
  phase: string;
  desired: string;
  generation: number;
  conditions: Condition[];
  attempt: Attempt | null;
  status: Status | null;
  train: MetricRecord["train"];
  queue: MetricRecord["queue"];
  gpu: GpuSnapshot | null;
  hold: { reason: string; message: string; since: string } | null;
  next_start_at: string | null;
}

export interface Operation {
  id: string;
  kind: string;
  status: "pending" | "running" | "done" | "failed" | "superseded";
  progress: { step?: string; message?: string } | null;
  error: { reason: string; message: string; hint?: string | null } | null;
}

export interface Event {
  id: number;
  at: string;
  actor: string;
  subject: string; // run/NAME, node/NAME …
  reason: string;
  message: string;
  level: string;

}

export interface Plan {
  steps?: { action: string; detail?: string }[];
  costs?: Record<string, unknown>;
  risks?: string[];
  summary?: string;
}
