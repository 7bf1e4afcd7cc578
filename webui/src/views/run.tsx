import { useEffect, useState } from "preact/hooks";
import { loadTokenNames } from "../actors";
import { get } from "../api";
import { Chart } from "../charts/chart";
import { decimal, integer } from "../format";
import type { Attempt, Event, MetricRecord, Page, Run } from "../model";
import { Link, location, navigate, runPath } from "../routes";
import { append, bucketLines, line, times } from "../series";
import { on, onReopen } from "../stream";
import { Actions } from "./actions";
import { Attempts, Conditions, Events, Facts, Failure } from "./details";
import { Gpus } from "./gpus";
import { LogPane } from "./log-pane";
import { Badge, Problem } from "./parts";

interface Live {
  run?: string | null;
  node?: string | null;
  subject?: string;
}

function Charts({ records }: { records: MetricRecord[] }) {
  const at = times(records);
  if (records.length === 0) {
    return <p class="card soft" data-testid="no-metrics">No metrics yet: charts appear with the first line that the trainer writes (a program that writes no metrics.ndjson has none).</p>;
  }
  return (
    <section class="card grid" aria-label="charts">
      <Chart title="Loss" unit="" times={at} lines={[line(records, "loss", "--series-1", (r) => r.train?.loss)]} format={(v) => decimal(v, 2)} />
      <Chart title="Throughput" unit="tokens/s" times={at} lines={[line(records, "tokens/s", "--series-3", (r) => r.train?.tok_s)]} format={integer} />
      <Chart title="Expected acceptance length" unit="tokens" times={at} lines={[line(records, "EAL", "--series-4", (r) => r.train?.eal)]} format={(v) => decimal(v, 2)} />
      <Chart title="Hidden-states queue by bucket" unit="packs" times={at} lines={bucketLines(records)} format={integer} />
    </section>
  );
}

export function RunView({ name }: { name: string }) {
  const [run, setRun] = useState<Run | null>(null);
  const [attempts, setAttempts] = useState<Attempt[]>([]);
  const [events, setEvents] = useState<Event[]>([]);
  const [records, setRecords] = useState<MetricRecord[]>([]);
  const [error, setError] = useState<unknown>(null);
  const base = `/v1${runPath(name)}`;

  function loadRun(): void {
    get<Run>(base).then((found) => { setRun(found); setError(null); }, setError);
    get<Page<Attempt>>(`${base}/attempts?limit=50`).then((page) => setAttempts(page.items), setError);
    get<Page<Event>>(`/v1/events?run=${encodeURIComponent(name)}&limit=50&order=desc`).then((page) => setEvents(page.items), setError);
  }

  function loadMetrics(): void {
    get<{ items: MetricRecord[] }>(`${base}/metrics?points=1000`).then((page) => setRecords((known) => append(known, page.items)), setError);
  }

  useEffect(() => {
    document.title = `${name} · dflash-supervisor`;
    loadRun();
    loadMetrics();
    void loadTokenNames();
    const isOurs = (data: unknown) => (data as Live).run === name || (data as Live).subject === `run/${name}`;
    const stops = [
      on("event", (data) => isOurs(data) && loadRun()),
      on("state", (data) => isOurs(data) && loadRun()),
      on("status", (data) => {
        if (!isOurs(data)) return;
        const status = (data as { status?: Run["status"] }).status ?? null;
        setRun((known) => (known ? { ...known, status } : known));
      }),
      on("metrics", (data) => {
        const record = (data as { record?: MetricRecord }).record;
        if (isOurs(data) && record) setRecords((known) => append(known, [record]));
      }),
      on("gpu", (data) => setRun((known) => (known && (data as Live).node === known.node ? { ...known, gpu: (data as { sample: Run["gpu"] }).sample } : known))),
      onReopen(() => { loadRun(); loadMetrics(); }),
    ];
    return () => stops.forEach((stop) => stop());
  }, [name]);

  if (error !== null && run === null) return <><p><Link to="/">All runs</Link></p><Problem error={error} /></>;
  if (run === null) return <div class="skeleton" aria-busy="true" />;
  const asked = Number(location.value.searchParams.get("attempt"));
  const shown = attempts.find((attempt) => attempt.number === asked) ?? run.attempt;
  const latest = records.at(-1)?.train ?? run.train;
  return (
    <>
      <p><Link to="/">All runs</Link></p>
      <section class="card">
        <div class="row between">
          <div class="row"><h1>{run.name}</h1><Badge word={run.phase} /><span class="soft">on {run.node}</span></div>
          <Actions run={run} onDone={loadRun} />
        </div>
        {error !== null && <Problem error={error} />}
        {run.hold && <div class="notice warn"><strong>{run.hold.reason}</strong>: {run.hold.message}</div>}
        <Failure attempt={run.attempt} />
        <Facts run={run} latest={latest} />
        <Conditions conditions={run.conditions} />
      </section>
      <Charts records={records} />
      <Gpus snapshot={run.gpu} />
      <Attempts attempts={attempts} selected={shown?.number ?? null} onSelect={(number) => navigate(`${runPath(name)}?attempt=${number}`)} />
      {shown && <LogPane run={name} attempt={shown.number} attemptId={shown.id} isLive={shown.ended_at === null} />}
      <Events events={events} />
    </>
  );
}
