import { signal } from "@preact/signals";

// The one EventSource of a tab: browsers open six connections per host, so everything live is multiplexed
// here by event name. Closed while the tab is hidden; on return the listeners are told to read a snapshot first.

export type Link = "connecting" | "live" | "offline";

export const link = signal<Link>("connecting");
export const lastMessageAt = signal<number | null>(null);

type Listener = (data: unknown) => void;

const listeners = new Map<string, Set<Listener>>();
const reopened = new Set<() => void>();
let source: EventSource | null = null;
let lastEventId = "";

function dispatch(name: string, message: MessageEvent<string>): void {
  lastMessageAt.value = Date.now();
  if (message.lastEventId) lastEventId = message.lastEventId;
  const data: unknown = JSON.parse(message.data);
  for (const listener of listeners.get(name) ?? []) listener(data);
}

function attach(name: string): void {
  source?.addEventListener(name, (message) => dispatch(name, message as MessageEvent<string>));
}

export function open(): void {
  if (source !== null || document.hidden) return;
  link.value = "connecting";
  const resume = lastEventId ? `&last_event_id=${encodeURIComponent(lastEventId)}` : "";
  source = new EventSource(`/v1/telemetry/stream?events=true${resume}`, { withCredentials: true });
  source.onopen = () => {
    const wasOffline = link.value !== "live";
    link.value = "live";
    lastMessageAt.value = Date.now();
    if (wasOffline) for (const callback of reopened) callback();
  };
  source.onerror = () => {
    link.value = "offline";
    // readyState CLOSED: the browser gave up (a refused session, say); try again later ourselves
    if (source?.readyState === EventSource.CLOSED) {
      close();
      link.value = "offline";
      setTimeout(open, 3000);
    }
  };
  for (const name of listeners.keys()) attach(name);
}

export function close(): void {
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

export function on(name: string, listener: Listener): () => void {
  const known = listeners.get(name);
  if (known) {
    known.add(listener);
  } else {
    listeners.set(name, new Set([listener]));
    attach(name);
  }
  return () => listeners.get(name)?.delete(listener);
}

// Called whenever the stream has (re)opened: read a snapshot, what was missed is not replayed for metrics.
export function onReopen(callback: () => void): () => void {
  reopened.add(callback);
  return () => reopened.delete(callback);
}
