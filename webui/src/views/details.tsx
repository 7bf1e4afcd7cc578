import { decimal, duration, integer, utc } from "../format";
import { now } from "../live";
import type { Attempt, Condition, Event, MetricRecord, Run } from "../model";
import { Badge, When } from "./parts";

export function Facts({ run, latest }: { run: Run; latest: MetricRecord["train"] }) {
  const status = run.status;
  const checkpoint = run.attempt?.last_checkpoint;
  return (
    <dl class="facts" style={{ margin: "12px 0" }}>
      <dt>attempt</dt>
      <dd>{run.attempt ? <>{run.attempt.number} · <Badge word={run.attempt.state} /> started <When at={run.attempt.started_at} /></> : "none yet"}</dd>
      <dt>trainer phase</dt>
      <dd>{status?.phase ?? "–"}{status?.phase_since != null && ` for ${duration(now.value / 1000 - status.phase_since)}`}{status?.message ? ` (${status.message})` : ""}</dd>
      <dt>step</dt>
      <dd>{integer(status?.step)} of {integer(status?.total_steps)}</dd>
      <dt>loss · EAL · tokens/s</dt>
      <dd>{decimal(latest?.loss, 3)} · {decimal(latest?.eal, 2)} · {integer(latest?.tok_s)}</dd>
      <dt>last checkpoint</dt>
      <dd>{checkpoint ? `step ${integer(checkpoint.step)}` : "–"}</dd>
      {run.next_start_at && <><dt>next start</dt><dd>{utc(run.next_start_at)}</dd></>}
    </dl>
  );
}

// What holds is a line of badges; what does not hold, or is not known, says why and since when.
export function Conditions({ conditions }: { conditions: Condition[] }) {
  const open = conditions.filter((condition) => condition.status !== "true");
  return (
    <>
      <div class="row" role="group" aria-label="conditions that hold">
        {conditions.filter((condition) => condition.status === "true").map((condition) => (
          <span key={condition.type} class="badge good" title={`${condition.reason} since ${utc(condition.since)}`}>{condition.type}</span>
        ))}
      </div>
      {open.length > 0 && (
        <div class="scroll" tabIndex={0} style={{ marginTop: "8px" }}>
          <table>
            <tbody>
              {open.map((condition) => (
                <tr key={condition.type}>
                  <td>{condition.type}</td>
                  <td><Badge word={condition.status} /></td>
                  <td>{condition.reason}{condition.message && <div class="soft">{condition.message}</div>}</td>
                  <td class="soft nowrap"><When at={condition.since} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}

function ending(attempt: Attempt): string {
  const cause = [attempt.reason, attempt.exit_signal != null ? `signal ${attempt.exit_signal}` : attempt.exit_code != null ? `exit ${attempt.exit_code}` : null];
  return cause.filter(Boolean).join(" · ") || "–";
}

interface AttemptsProps {
  attempts: Attempt[];
  selected: number | null;
  onSelect: (number: number) => void;
}

export function Attempts({ attempts, selected, onSelect }: AttemptsProps) {
  return (
    <section class="card" aria-label="attempts">
      <h2>Attempts</h2>
      {attempts.length === 0 && <p class="soft">none yet</p>}
      {attempts.length > 0 && (
        <div class="scroll" tabIndex={0}>
          <table>
            <thead><tr><th>No.</th><th>State</th><th>Why it began</th><th>Why it ended</th><th>Started</th><th>Ran</th><th>Log</th></tr></thead>
            <tbody>
              {attempts.map((attempt) => (
                <tr key={attempt.id}>
                  <td>{attempt.number}</td>
                  <td><Badge word={attempt.state} /></td>
                  <td>{attempt.trigger}</td>
                  <td>{ending(attempt)}{attempt.message && <div class="soft">{attempt.message}</div>}</td>
                  <td class="nowrap"><When at={attempt.started_at} /></td>
                  <td>{attempt.started_at ? duration(((attempt.ended_at ? Date.parse(attempt.ended_at) : now.value) - Date.parse(attempt.started_at)) / 1000) : "–"}</td>
                  <td><button class="plain" aria-pressed={attempt.number === selected} title={attempt.log_path} onClick={() => onSelect(attempt.number)}>show log</button></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

export function Events({ events }: { events: Event[] }) {
  return (
    <section class="card" aria-label="events">
      <h2>Events</h2>
      {events.length === 0 && <p class="soft">none yet</p>}
      {events.length > 0 && (
        <div class="scroll" tabIndex={0}>
          <table>
            <tbody>
              {events.map((event) => (
                <tr key={event.id}>
                  <td class="soft nowrap"><When at={event.at} /></td>
                  <td>{event.reason}</td>
                  <td>{event.message}</td>
                  <td class="soft">{event.actor}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
