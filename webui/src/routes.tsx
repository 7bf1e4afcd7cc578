import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";

// Every view, and what is selected in it, has a URL; the back button works.

export const location = signal(new URL(window.location.href));

window.addEventListener("popstate", () => {
  location.value = new URL(window.location.href);
});

export function navigate(path: string, replace = false): void {
  if (replace) history.replaceState(null, "", path);
  else history.pushState(null, "", path);
  location.value = new URL(window.location.href);
}

export function runPath(name: string): string {
  return `/runs/${encodeURIComponent(name)}`;
}

interface LinkProps {
  to: string;
  class?: string;
  children: ComponentChildren;
}

export function Link({ to, children, ...rest }: LinkProps) {
  return (
    <a
      href={to}
      {...rest}
      onClick={(event) => {
        if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
        event.preventDefault();
        navigate(to);
      }}
    >
      {children}
    </a>
  );
}
