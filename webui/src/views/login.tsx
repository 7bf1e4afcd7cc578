import { useState } from "preact/hooks";
import { login, loginNotice } from "../api";
import { Problem } from "./parts";

export function Login() {
  const [token, setToken] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    setBusy(true);
    try {
      await login(token.trim());
    } catch (caught) {
      setError(caught);
      setBusy(false);
    }
  }

  return (
    <main>
      <form class="card" style={{ maxWidth: "460px", margin: "64px auto" }} onSubmit={(event) => void submit(event)}>
        <h1>Log in</h1>
        {loginNotice.value && <p class="notice warn">{loginNotice.value}</p>}
        <p class="soft">
          Paste an API token. <code>dflashctl serve</code> prints where the admin token lies, and a link that logs in once;
          <code> dflashctl token create</code> makes further ones.
        </p>
        <label for="token">Token</label>
        <div class="row">
          <input id="token" type="password" autocomplete="current-password" required value={token} onInput={(event) => setToken(event.currentTarget.value)} style={{ flex: 1 }} />
          <button class="primary" disabled={isBusy}>Log in</button>
        </div>
        {error !== null && <Problem error={error} />}
      </form>
    </main>
  );
}
