import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError } from "../api";
import { ago, utc } from "../format";
import { now } from "../live";

const TONES: Record<string, string> = {
  running: "good", ready: "good", succeeded: "good", done: "good", true: "good",
  pending: "busy", starting: "busy", stopping: "busy", planned: "busy", preflight: "busy", launching: "busy", started: "busy",
  backoff: "warn", held: "warn", unknown: "warn", quarantined: "bad",
  failed: "bad", launch_failed: "bad", lost: "bad", false: "bad",
  stopped: "idle",
};

// Colour never stands alone: the word is always there.
export function Badge({ word, title }: { word: string; title?: string | undefined }) {
  return <span class={`badge ${TONES[word] ?? "idle"}`} title={title}>{word.replace("_", " ")}</span>;
}

export function When({ at }: { at: string | null | undefined }) {
  return <time dateTime={at ?? undefined} title={utc(at)}>{ago(at, now.value)}</time>;
}

export function Problem({ error }: { error: unknown }) {
  if (error instanceof ApiError) {
    return (
      <div class="notice" role="alert">
        <strong>{error.reason}</strong>: {error.message}
        {error.hint && <div class="soft">{error.hint}</div>}
      </div>
    );
  }
  return <div class="notice" role="alert">{String(error)}</div>;
}

interface ConfirmProps {
  title: string;
  action: string;
  isDangerous?: boolean;
  onCancel: () => void;
  onConfirm: () => void;
  children: ComponentChildren;
}

export function Confirm({ title, action, isDangerous, onCancel, onConfirm, children }: ConfirmProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onCancel={onCancel} aria-labelledby="confirm-title">
      <h2 id="confirm-title">{title}</h2>
      <div>{children}</div>
      <div class="row" style={{ justifyContent: "flex-end", marginTop: "16px" }}>
        <button onClick={onCancel}>Cancel</button>
        <button class={isDangerous ? "danger" : "primary"} onClick={onConfirm}>{action}</button>
      </div>
    </dialog>
  );
}
