import { effect, signal } from "@preact/signals";

// Light and dark follow the system until the reader chooses; charts read this signal to recolour.
export type Theme = "light" | "dark";

const KEY = "dflash-theme";
const media = window.matchMedia("(prefers-color-scheme: dark)");
const stored = localStorage.getItem(KEY);

export const theme = signal<Theme>(stored === "light" || stored === "dark" ? stored : media.matches ? "dark" : "light");

media.addEventListener("change", (event) => {
  if (localStorage.getItem(KEY) === null) theme.value = event.matches ? "dark" : "light";
});

effect(() => {
  document.documentElement.dataset["theme"] = theme.value;
});

export function toggleTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  localStorage.setItem(KEY, theme.value);
}
