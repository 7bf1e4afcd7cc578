import { bytes, decimal, integer, percent } from "../format";
import { now } from "../live";
import type { Gpu, GpuSnapshot } from "../model";
import { When } from "./parts";

const STALE_MS = 15_000;

function Tile({ gpu }: { gpu: Gpu }) {
  const used = gpu.mem_used_bytes != null && gpu.mem_total_bytes ? gpu.mem_used_bytes / gpu.mem_total_bytes : null;
  return (
    <div class="tile">
      <div class="row between"><strong>GPU {gpu.index}</strong><span class="soft" title={gpu.uuid ?? ""}>{gpu.name ?? ""}</span></div>
      <div class="big">{percent(gpu.util_ratio)}</div>
      <div class="meter" aria-hidden="true"><div style={{ width: `${(gpu.util_ratio ?? 0) * 100}%` }} /></div>
      <div class="soft">{bytes(gpu.mem_used_bytes)} of {bytes(gpu.mem_total_bytes)} ({percent(used)})</div>
      <div class="soft">{integer(gpu.power_w)} W · {decimal(gpu.temp_c, 0)} °C</div>
      {gpu.reason && <div class="soft">{gpu.reason}</div>}
    </div>
  );
}

// Values grow grey when they are stale; a machine without telemetry says why.
export function Gpus({ snapshot }: { snapshot: GpuSnapshot | null }) {
  const at = snapshot?.t == null ? null : new Date(snapshot.t * 1000).toISOString();
  const isStale = snapshot?.t != null && now.value - snapshot.t * 1000 > STALE_MS;
  return (
    <section class="card" aria-label="GPUs">
      <div class="row between"><h2>GPUs</h2>{at && <span class="soft">sampled <When at={at} /></span>}</div>
      {(!snapshot || snapshot.gpus.length === 0) && (
        <p class="soft" data-testid="gpu-unavailable">unavailable{snapshot?.reason ? `: ${snapshot.reason}` : ": no sample yet"}{snapshot?.message ? ` (${snapshot.message})` : ""}</p>
      )}
      <div class={`tiles ${isStale ? "stale" : ""}`}>{snapshot?.gpus.map((gpu) => <Tile key={gpu.index} gpu={gpu} />)}</div>
    </section>
  );
}
