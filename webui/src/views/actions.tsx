import { useState } from "preact/hooks";
import { get, post } from "../api";
import type { Operation, Plan, Run } from "../model";
import { runPath } from "../routes";
import { Confirm, Problem } from "./parts";

type Action = "start" | "stop" | "restart";

const LIVE = new Set(["starting", "running", "stopping"]);
const POLL_MS = 500;

const sleep = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

async function carryOut(run: string, action: Action, progress: (text: string) => void): Promise<void> {
  let operation = await post<Operation>(`/v1${runPath(run)}/${action}`);
  while (operation.status === "pending" || operation.status === "running") {
    progress(operation.progress?.message ?? operation.progress?.step ?? operation.status);
    await sleep(POLL_MS);
    operation = await get<Operation>(`/v1/operations/${operation.id}`);
  }
  if (operation.error) throw new Error(`${operation.error.message}${operation.error.hint ? ` — ${operation.error.hint}` : ""}`);
}

function PlanText({ plan }: { plan: Plan | null }) {
  if (!plan) return <p class="soft">working out the cost …</p>;
  return (
    <>
      {plan.summary && <p>{plan.summary}</p>}
      {plan.risks?.map((risk) => <p key={risk} class="notice warn">{risk}</p>)}
    </>
  );
}

// Start, stop, restart: busy until the operation has ended, failures with cause and remedy.
export function Actions({ run, onDone }: { run: Run; onDone: () => void }) {
  const [busy, setBusy] = useState<string | null>(null);
  const [asking, setAsking] = useState<Action | null>(null);
  const [plan, setPlan] = useState<Plan | null>(null);
  const [error, setError] = useState<unknown>(null);
  const isLive = LIVE.has(run.phase);

  async function act(action: Action): Promise<void> {
    setAsking(null);
    setError(null);
    setBusy(`${action} …`);
    try {
      await carryOut(run.name, action, (text) => setBusy(`${action}: ${text}`));
    } catch (caught) {
      setError(caught instanceof Error && !(caught as { reason?: string }).reason ? caught.message : caught);
    } finally {
      setBusy(null);
      onDone();
    }
  }

  function ask(action: Action): void {
    setAsking(action);
    setPlan(null);
    post<Plan>(`/v1${runPath(run.name)}/${action}?dry_run=true`).then(setPlan, (caught: unknown) => {
      setPlan({ risks: [caught instanceof Error ? caught.message : String(caught)] });
    });
  }

  return (
    <div class="row" role="group" aria-label={`actions for ${run.name}`}>
      {busy && <span class="soft" role="status">{busy}</span>}
      {!isLive && <button class="primary" disabled={busy !== null} onClick={() => void act("start")}>Start</button>}
      {isLive && <button disabled={busy !== null} onClick={() => ask("restart")}>Restart</button>}
      {(isLive || run.phase === "backoff") && <button class="danger" disabled={busy !== null} onClick={() => ask("stop")}>Stop</button>}
      {error !== null && <Problem error={error} />}
      {asking && (
        <Confirm title={`${asking === "stop" ? "Stop" : "Restart"} ${run.name}?`} action={asking === "stop" ? "Stop" : "Restart"} isDangerous={asking === "stop"} onCancel={() => setAsking(null)} onConfirm={() => void act(asking)}>
          <p>It is asked to finish its step and to save a checkpoint; a {asking === "stop" ? "later start" : "new attempt"} resumes from the newest one. A program that saves none begins again. Earlier logs stay as they are.</p>
          <PlanText plan={plan} />
        </Confirm>
      )}
    </div>
  );
}
