import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ApiError, readLog } from "../api";
import { bytes } from "../format";
import { LogBuffer } from "../log";
import { on } from "../stream";

const ROW = 18;
const FIRST_BYTES = 262_144;
const PIECE = 262_144;
const OVERSCAN = 20;

interface Props {
  run: string;
  attempt: number;
  attemptId: string;
  isLive: boolean;
}

// Follows at the end, stops when the reader scrolls up, and says how many new lines wait below.
export function LogPane({ run, attempt, attemptId, isLive }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const buffer = useRef<LogBuffer | null>(null);
  const source = useRef({ run, attempt });
  const isBusy = useRef(false);
  const isWanted = useRef(false);
  const [version, setVersion] = useState(0);
  const [isFollowing, setFollowing] = useState(true);
  const [unseen, setUnseen] = useState(0);
  const [top, setTop] = useState(0);
  const [needle, setNeedle] = useState("");
  const [start, setStart] = useState(0);
  const [problem, setProblem] = useState<string | null>(null);

  async function fetchOnce(): Promise<void> {
    const from = source.current;
    if (buffer.current === null) {
      const { size } = await readLog(from.run, from.attempt, 0, 0);
      if (source.current !== from) return;
      buffer.current = new LogBuffer(Math.max(0, size - FIRST_BYTES));
      setStart(buffer.current.nextOffset);
    }
    for (;;) {
      const piece = await readLog(from.run, from.attempt, buffer.current.nextOffset, PIECE);
      if (source.current !== from || piece.data.length === 0) return;
      const added = buffer.current.add(piece.data, piece.offset);
      setUnseen((count) => count + added);
      setVersion((count) => count + 1);
    }
  }

  // One read at a time; a wish that comes meanwhile is carried out after it, so the last bytes are never missed.
  async function fetchMore(): Promise<void> {
    isWanted.current = true;
    if (isBusy.current) return;
    isBusy.current = true;
    while (isWanted.current) {
      isWanted.current = false;
      try {
        await fetchOnce();
        setProblem(null);
      } catch (error) {
        setProblem(error instanceof ApiError ? `${error.message}${error.hint ? `: ${error.hint}` : ""}` : String(error));
      }
    }
    isBusy.current = false;
  }

  useEffect(() => {
    source.current = { run, attempt };
    buffer.current = null;
    setFollowing(true);
    setVersion((count) => count + 1);
    void fetchMore();
    const stop = on("log", (data) => {
      const message = data as { attempt_id?: string };
      if (message.attempt_id === attemptId) void fetchMore();
    });
    // a dead attempt's log does not change and is not polled
    const timer = isLive ? setInterval(() => void fetchMore(), 5000) : undefined;
    return () => {
      stop();
      clearInterval(timer);
    };
  }, [run, attempt, attemptId, isLive]);

  const lines = useMemo(() => {
    const current = buffer.current;
    if (!current) return [];
    const tail = current.tail;
    const all = tail === null ? current.lines : [...current.lines, tail];
    return needle === "" ? all : all.filter((line) => line.toLowerCase().includes(needle.toLowerCase()));
  }, [version, needle]);

  useEffect(() => {
    const element = host.current;
    if (element && isFollowing) {
      element.scrollTop = element.scrollHeight;
      setUnseen(0);
    }
  }, [lines, isFollowing]);

  function scrolled(): void {
    const element = host.current;
    if (!element) return;
    setTop(element.scrollTop);
    const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < ROW * 1.5;
    setFollowing(isAtEnd);
    if (isAtEnd) setUnseen(0);
  }

  const height = host.current?.clientHeight ?? 360;
  const first = Math.max(0, Math.floor(top / ROW) - OVERSCAN);
  const visible = lines.slice(first, first + Math.ceil(height / ROW) + 2 * OVERSCAN);

  return (
    <section class="card" aria-label="log">
      <div class="row between">
        <h2>Log of attempt {attempt}</h2>
        <div class="row">
          <input type="search" placeholder="filter lines" aria-label="filter log lines" value={needle} onInput={(event) => setNeedle(event.currentTarget.value)} />
          <button aria-pressed={isFollowing} onClick={() => setFollowing(!isFollowing)}>{isFollowing ? "following the end" : "follow the end"}</button>
          <a class="button" href={`/v1/runs/${encodeURIComponent(run)}/attempts/${attempt}/log`} download={`${run}-${attempt}.log`}>download</a>
        </div>
      </div>
      {start > 0 && <p class="soft">shows from byte {start} on ({bytes(start)} before it are in the download)</p>}
      {problem && <p class="notice warn">{problem}</p>}
      <div class="log" ref={host} onScroll={scrolled} tabIndex={0} data-testid="log">
        <div class="log-space" style={{ height: `${lines.length * ROW}px` }}>
          {visible.map((line, index) => (
            <div key={first + index} class="log-line" style={{ top: `${(first + index) * ROW}px` }}>{line}</div>
          ))}
        </div>
        {lines.length === 0 && <p class="soft" style={{ padding: "8px" }}>{needle ? "no line matches" : "nothing written yet"}</p>}
        {!isFollowing && unseen > 0 && (
          <div class="log-more"><button class="primary" onClick={() => setFollowing(true)}>{unseen} new lines</button></div>
        )}
      </div>
    </section>
  );
}
