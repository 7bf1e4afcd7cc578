import { signal } from "@preact/signals";

// The only caller of fetch. Errors arrive as problem+json and are thrown as ApiError with cause and remedy.

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly reason: string,
    message: string,
    readonly hint: string | null,
  ) {
    super(message);
  }
}

export type SessionState = "unknown" | "in" | "out";

export const session = signal<SessionState>("unknown");
export const loginNotice = signal<string | null>(null);

interface Problem {
  detail?: string;
  title?: string;
  reason?: string;
  hint?: string | null;
}

async function failure(response: Response): Promise<ApiError> {
  let problem: Problem = {};
  if ((response.headers.get("content-type") ?? "").includes("json")) problem = (await response.json()) as Problem;
  return new ApiError(response.status, problem.reason ?? "Failed", problem.detail ?? problem.title ?? `HTTP ${response.status}`, problem.hint ?? null);
}

async function call(path: string, init: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...init });
  } catch {
    throw new ApiError(0, "Offline", "the supervisor does not answer", "look whether `dflashctl serve` is running; its runs go on without it");
  }
  if (response.status === 401) session.value = "out";
  if (!response.ok) throw await failure(response);
  return response;
}

export async function get<T>(path: string): Promise<T> {
  return (await (await call(path, { headers: { accept: "application/json" } })).json()) as T;
}

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json", accept: "application/json", "idempotency-key": crypto.randomUUID() },
    body: JSON.stringify(body),
  });
  return response.status === 204 ? (undefined as T) : ((await response.json()) as T);
}

// Takes an API token or the one-time code of the URL's fragment; the answer sets the session cookie.
export async function login(secret: string): Promise<void> {
  await call("/v1/session", { method: "POST", headers: { authorization: `Bearer ${secret}`, "content-type": "application/json" }, body: "{}" });
  session.value = "in";
}

export async function logout(): Promise<void> {
  await call("/v1/session", { method: "DELETE", headers: { "content-type": "application/json" } });
  session.value = "out";
}

export interface LogPiece {
  data: Uint8Array;
  offset: number;
  size: number;
}

export async function readLog(run: string, attempt: number, offset: number, limit: number): Promise<LogPiece> {
  const response = await call(`/v1/runs/${encodeURIComponent(run)}/attempts/${attempt}/log?offset=${offset}&limit=${limit}`);
  return {
    data: new Uint8Array(await response.arrayBuffer()),
    offset: Number(response.headers.get("x-log-offset") ?? offset),
    size: Number(response.headers.get("x-log-size") ?? 0),
  };
}
