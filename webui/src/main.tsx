import { render } from "preact";
import { useEffect } from "preact/hooks";
import { ApiError, get, login, loginNotice, logout, session } from "./api";
import { duration } from "./format";
import { now } from "./live";
import { Link, location, navigate } from "./routes";
import { lastMessageAt, link, open } from "./stream";
import "./style.css";
import { theme, toggleTheme } from "./theme";
import "./tokens.css";
import { Login } from "./views/login";
import { RunView } from "./views/run";
import { RunList } from "./views/runs";

const STALE_AFTER_S = 30;

function LinkBadge() {
  const age = lastMessageAt.value === null ? null : (now.value - lastMessageAt.value) / 1000;
  if (link.value === "offline") return <span class="badge bad" title="values on this page are no longer live">offline{age !== null && `, last data ${duration(age)} ago`}</span>;
  if (link.value === "connecting") return <span class="badge busy">connecting</span>;
  if (age !== null && age > STALE_AFTER_S) return <span class="badge warn">quiet for {duration(age)}</span>;
  return <span class="badge good">live</span>;
}

function Page() {
  const path = location.value.pathname;
  const match = /^\/runs\/([^/]+)\/?$/.exec(path);
  if (match?.[1]) return <RunView key={match[1]} name={decodeURIComponent(match[1])} />;
  if (path === "/" || path === "/runs") return <RunList />;
  return <p class="card">There is nothing at {path}. <Link to="/">All runs</Link></p>;
}

function App() {
  useEffect(() => {
    void enter();
  }, []);
  useEffect(() => {
    if (session.value === "in") open();
  }, [session.value]);

  if (session.value === "unknown") return <main><div class="skeleton" aria-busy="true" /></main>;
  if (session.value === "out") return <Login />;
  return (
    <>
      <header class="topbar">
        <Link to="/" class="brand">dflash-supervisor</Link>
        <LinkBadge />
        <span class="spread" />
        <button class="plain" onClick={toggleTheme} aria-label={`switch to ${theme.value === "dark" ? "light" : "dark"} theme`}>{theme.value === "dark" ? "light theme" : "dark theme"}</button>
        <button class="plain" onClick={() => void logout()}>log out</button>
      </header>
      <main><Page /></main>
    </>
  );
}

// A one-time code in the fragment logs in and is removed from the address at once.
async function enter(): Promise<void> {
  const code = new URLSearchParams(window.location.hash.slice(1)).get("code");
  if (code) {
    navigate(window.location.pathname + window.location.search, true);
    try {
      await login(code);
      return;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the session of an earlier login may still be valid
      loginNotice.value = "That link has been used or has expired: it logs in once.";
    }
  }
  try {
    await get("/v1/runs?limit=1");
    session.value = "in";
  } catch (error) {
    session.value = error instanceof ApiError && error.status === 401 ? "out" : "in";
  }
}

render(<App />, document.getElementById("app")!);
