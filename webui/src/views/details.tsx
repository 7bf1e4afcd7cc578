import { useState } from "preact/hooks";
import { actorName, tokenNames } from "../actors";
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
      <dt>loss · expected acceptance length · tokens/s</dt>
      <dd>{decimal(latest?.loss, 3)} · {decimal(latest?.eal, 2)} · {integer(latest?.tok_s)}</dd>
      <dt>last checkpoint</dt>
      <dd>{checkpoint ? `step ${integer(checkpoint.step)}` : "–"}</dd>
      {run.next_start_at && <><dt>next start</dt><dd>{utc(run.next_start_at)}</dd></>}
    </dl>
  );
}

// What holds is a line of badges; what does not hold, or is not known, says why and since when.
export function Conditions({ conditions }: { conditions: Condition[] }) {
  // after the end of an attempt most are not known any more, which its state says already
  const open = conditions.filter((condition) => condition.status !== "true" && condition.reason !== "Ended");
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

// As the command line calls it: the name that the check or the launch gave to the cause, and the reason of the end.
function reasonOf(attempt: Attempt): string | null {
  if (attempt.state !== "launch_failed" || !attempt.reason) return attempt.reason;
  const cause = attempt.launch_error?.reason ?? attempt.preflight?.find((check) => check.status === "fail")?.reason;
  return cause && cause !== attempt.reason ? `${cause} (${attempt.reason})` : attempt.reason;
}

function ending(attempt: Attempt): string {
  const cause = [reasonOf(attempt), attempt.exit_signal != null ? `signal ${attempt.exit_signal}` : attempt.exit_code != null ? `exit ${attempt.exit_code}` : null];
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
                  <td data-label="No.">{attempt.number}</td>
                  <td data-label="State"><Badge word={attempt.state} /></td>
                  <td data-label="Why it began">{attempt.trigger}</td>
                  <td data-label="Why it ended">{ending(attempt)}{attempt.message && <div class="soft">{attempt.message}</div>}</td>
                  <td data-label="Started" class="nowrap"><When at={attempt.started_at} /></td>
                  <td data-label="Ran">{attempt.started_at ? duration(((attempt.ended_at ? Date.parse(attempt.ended_at) : now.value) - Date.parse(attempt.started_at)) / 1000) : "–"}</td>
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

const SHOWN_EVENTS = 12;

// The reason and the last words of an attempt that did not end well, where the reader looks first.
export function Failure({ attempt }: { attempt: Attempt | null }) {
  if (!attempt || !["failed", "launch_failed", "lost", "quarantined"].includes(attempt.state)) return null;
  const words = attempt.launch_error?.message ?? attempt.last_lines.at(-1);
  return (
    <div class="notice" role="status">
      <strong>{ending(attempt)}</strong>{attempt.message && `: ${attempt.message}`}
      {words && <div class="mono">{words}</div>}
    </div>
  );
}

export function Events({ events }: { events: Event[] }) {
  const [isAll, setAll] = useState(false);
  const shown = isAll ? events : events.slice(0, SHOWN_EVENTS);
  return (
    <section class="card" aria-label="events">
      <h2>Events</h2>
      {events.length === 0 && <p class="soft">none yet</p>}
      {events.length > 0 && (
        <div class="scroll" tabIndex={0}>
          <table>
            <tbody>
              {shown.map((event) => (
                <tr key={event.id}>
                  <td class="soft nowrap"><When at={event.at} /></td>
                  <td>{event.reason}</td>
                  <td>{event.message}</td>
                  <td class="soft" title={event.actor}>{actorName(event.actor, tokenNames.value)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {events.length > SHOWN_EVENTS && (
        <button class="plain" onClick={() => setAll(!isAll)}>{isAll ? "show fewer" : `show ${events.length - SHOWN_EVENTS} more`}</button>
      )}
    </section>
  );
}
