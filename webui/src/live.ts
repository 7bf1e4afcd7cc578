import { signal } from "@preact/signals";

// A clock that ticks once a second while the page is visible, so that ages stay true without a fetch.
export const now = signal(Date.now());

setInterval(() => {
  if (!document.hidden) now.value = Date.now();
}, 1000);
