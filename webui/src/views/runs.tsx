import { useEffect, useState } from "preact/hooks";
import { get } from "../api";
import { decimal, integer } from "../format";
import type { Page, Run } from "../model";
import { Link, location, navigate, runPath } from "../routes";
import { on, onReopen } from "../stream";
import { Actions } from "./actions";
import { Badge, Problem, When } from "./parts";

const PHASES = ["running", "starting", "stopping", "backoff", "held", "pending", "stopped", "succeeded", "failed"];

function progress(run: Run): string {
  const status = run.status;
  if (status?.step == null) return status?.phase ?? "–";
  return status.total_steps == null ? integer(status.step) : `${integer(status.step)} / ${integer(status.total_steps)}`;
}

function Row({ run, onChange }: { run: Run; onChange: () => void }) {
  return (
    <tr>
      <td><Link to={runPath(run.name)}><strong>{run.name}</strong></Link><div class="soft">{run.node}</div></td>
      <td><Badge word={run.phase} />{(run.hold ?? run.attempt)?.reason && run.phase !== "running" && <div class="soft">{(run.hold ?? run.attempt)?.reason}</div>}</td>
      <td data-label="Attempt" class="number">{run.attempt?.number ?? "–"}</td>
      <td data-label="Step" class="number">{progress(run)}</td>
      <td data-label="Loss" class="number">{decimal(run.train?.loss, 3)}</td>
      <td data-label="Expected acceptance length" class="number">{decimal(run.train?.eal, 2)}</td>
      <td data-label="Tokens/s" class="number">{integer(run.train?.tok_s)}</td>
      <td data-label="Since"><When at={run.attempt?.ended_at ?? run.attempt?.started_at} /></td>
      <td><Actions run={run} onDone={onChange} /></td>
    </tr>
  );
}

export function RunList() {
  const [runs, setRuns] = useState<Run[] | null>(null);
  const [error, setError] = useState<unknown>(null);
  const phase = location.value.searchParams.get("phase") ?? "";

  function load(): void {
    get<Page<Run>>("/v1/runs?limit=200").then(
      (page) => {
        setRuns(page.items);
        setError(null);
      },
      setError,
    );
  }

  useEffect(() => {
    load();
    const stops = [on("event", load), on("state", load), onReopen(load)];
    const timer = setInterval(() => !document.hidden && load(), 10_000);
    return () => {
      stops.forEach((stop) => stop());
      clearInterval(timer);
    };
  }, []);

  useEffect(() => {
    document.title = "runs · dflash-supervisor";
  }, []);

  const shown = runs?.filter((run) => phase === "" || run.phase === phase);
  return (
    <>
      <div class="row between" style={{ marginBottom: "12px" }}>
        <h1>Runs</h1>
        <label class="soft">
          phase{" "}
          <select value={phase} onChange={(event) => navigate(event.currentTarget.value ? `/?phase=${event.currentTarget.value}` : "/")}>
            <option value="">all</option>
            {PHASES.map((name) => <option key={name} value={name}>{name}</option>)}
          </select>
        </label>
      </div>
      {error !== null && <Problem error={error} />}
      {runs === null && error === null && <div class="skeleton" aria-busy="true" />}
      {shown?.length === 0 && (
        <div class="card">
          {phase ? <p>No run is {phase}.</p> : <p>No runs yet. Store and start one: <code class="mono">dflashctl run FILE.toml</code></p>}
        </div>
      )}
      {shown && shown.length > 0 && (
        <div class="card scroll" tabIndex={0}>
          <table>
            <thead>
              <tr><th>Run</th><th>Phase</th><th class="number">Attempt</th><th class="number">Step</th><th class="number">Loss</th><th class="number"><abbr title="expected acceptance length">EAL</abbr></th><th class="number">Tokens/s</th><th>Since</th><th>Actions</th></tr>
            </thead>
            <tbody>{shown.map((run) => <Row key={run.id} run={run} onChange={load} />)}</tbody>
          </table>
        </div>
      )}
    </>
  );
}
